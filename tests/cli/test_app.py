"""The command line reports what it did, exits with the promised status, and never shows a traceback."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from shardkit.format.manifest import read_manifest
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.inspection.contents import Footprint, Sizes, compute_statistics, recognise_source
from shardkit.packing.writer import ShardWriter
from shardkit.storage.local import LocalStorage
from tests.support.folders import files_of
from tests.support.forge import index_of
from tests.support.shared import COMPRESSIONS, every_compression, started, tar_of

STORAGE = LocalStorage()
NUM_SAMPLES = 14


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text_of(i):
    return f"the caption of picture {i} " * 40 * i


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return one dataset for each compression; they are never changed."""
    folders = {}
    for compression in COMPRESSIONS:
        folders[compression] = tmp_path_factory.mktemp(compression) / "train"
        options = {"compression": compression, "shard_samples": 8, "block_bytes": 4000, "classes": ("cat", "dog")}
        with ShardWriter(str(folders[compression]), **options) as writer:
            for i in range(NUM_SAMPLES):
                writer.write({"__key__": f"{i:04d}", "txt": text_of(i), "cls": i % 3})
    return folders


@pytest.fixture
def bare(tmp_path):
    """Return a folder with one tar and no manifest."""
    members = [("a.txt", b"one"), ("a.cls", b"1"), ("b.txt", b"two")]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/x.tar").write_bytes(tar_of(members))
    return tmp_path / "bare"


@pytest.fixture
def photos(tmp_path):
    """Return class folders of files that look like images by their names."""
    for i in range(20):
        file = tmp_path / "photos" / ["cat", "dog"][i % 2] / f"{i:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\xff\xd8" + bytes([i]) * 1000)
    return tmp_path / "photos"


def assert_is_one_line_of_error(result, message):
    assert result.exit_code == 2, result.output
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["pack", "index", "verify", "ls", "cat", "stats"])
def test_help_reads_well_and_has_an_example(command):
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert f"  Example: shardkit {command} " in result.stdout
    assert "Args:" not in result.stdout
    assert command in invoke("--help").stdout


def test_the_list_of_commands_is_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    assert "..." not in invoke("--help").stdout.replace("COMMAND [ARGS]...", "")


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["pack"], ["cache"], ["cache", "clear"]])
def test_help_is_there_by_both_names(command, option):
    assert invoke(*command, option).exit_code == 0
    assert invoke(*command, option).output == invoke(*command, "--help").output


def test_the_version_is_printed():
    assert (invoke("--version").exit_code, invoke("--version").output) == (0, shardkit.__version__ + "\n")


def test_verify_says_that_all_is_well(originals):
    result = invoke("verify", originals["zst"])

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "14 samples in 2 shards read; everything is as it should be\n"
    assert json.loads(invoke("verify", originals["zst"], "--json").stdout)["ok"] is True


def test_verify_exits_with_1_and_says_what_is_damaged_and_what_is_whole(dataset):
    folder = dataset()
    shard = folder / "train-000000.tar"
    row = index_of(folder).rows().to_pylist()[3]
    data = bytearray(shard.read_bytes())
    data[row["txt:offset"]] ^= 1
    shard.write_bytes(data)

    result = invoke("verify", folder)

    assert result.exit_code == 1
    assert f"{shard}: 7 of 8 samples are whole\n" in result.stdout
    assert f"  sample '0003': field 'txt' at byte {row['txt:offset']:,} does not match the index\n" in result.stdout
    assert "  not whole: 0003; all others are\n" in result.stdout
    assert result.stdout.endswith("1 shard is damaged\n")
    report = invoke("verify", folder, "--json")
    assert report.exit_code == 1
    assert json.loads(report.stdout)["damaged"][0]["damaged"] == ["0003"]


def test_verify_says_what_it_could_not_check(bare):
    result = invoke("verify", bare)

    assert result.exit_code == 0
    assert "note: there is no manifest" in result.stdout


@every_compression
def test_ls_lists_samples_with_the_sizes_of_their_fields(compression, originals):
    lines = invoke("ls", originals[compression]).stdout.splitlines()
    objects = [json.loads(line) for line in invoke("ls", originals[compression], "--json").stdout.splitlines()]

    assert lines[7] == f"0007\tcls 1  txt {len(text_of(7)):,}"
    assert [(o["key"], o["fields"]["txt"]) for o in objects] == [(f"{i:04d}", len(text_of(i))) for i in range(14)]


def test_a_key_cannot_give_orders_to_the_terminal(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_of([("a\x1b[2J.txt", b"")]))

    assert invoke("ls", tmp_path).stdout == "a\\x1b[2J\ttxt 0\n"


def test_ls_lists_shards(originals, bare):
    shards = [json.loads(line) for line in invoke("ls", "--shards", "--json", originals["zst"]).stdout.splitlines()]

    assert [(Path(s["url"]).name, s["samples"]) for s in shards] == [
        ("train-000000.tar.zst", 8),
        ("train-000001.tar.zst", 6),
    ]
    assert invoke("ls", "--shards", bare).stdout == f"{bare}/x.tar\t2 samples\t4,096 bytes\tno index\n"
    assert invoke("ls", bare).stdout == "a\tcls 1  txt 3\nb\ttxt 3\n"


@every_compression
@pytest.mark.parametrize("key", ["0001", "0007", "0013"])
def test_cat_writes_one_member_and_nothing_else(compression, key, originals):
    result = invoke("cat", originals[compression], key, "txt")

    assert (result.exit_code, result.stdout_bytes) == (0, text_of(int(key)).encode())


def lose_everything_but(folder, wanted):
    """Overwrite the shards with zeros, except for the wanted members, given as (key, field)."""
    for number, path in enumerate(sorted(folder.glob("*.tar"))):
        rest = bytearray(path.stat().st_size)
        for row in index_of(folder, number).rows().to_pylist():
            for field in ("cls", "txt"):
                begin, end = row[f"{field}:offset"], row[f"{field}:offset"] + row[f"{field}:size"]
                if wanted(row["__key__"], field):
                    rest[begin:end] = path.read_bytes()[begin:end]
        path.write_bytes(rest)


def test_cat_reads_only_that_member_where_there_is_an_index(dataset):
    folder = dataset()
    lose_everything_but(folder, lambda key, field: (key, field) == ("0009", "txt"))

    assert invoke("cat", folder, "0009", "txt").stdout_bytes == text_of(9).encode()
    assert_is_one_line_of_error(
        invoke("cat", folder, "0008", "txt"), "does not match the index; 'shardkit verify' says what is whole"
    )


def test_stats_read_only_the_classes_where_there_is_an_index(dataset):
    folder = dataset()
    lose_everything_but(folder, lambda _, field: field == "cls")

    assert json.loads(invoke("stats", folder, "--json").stdout)["classes"] == {"cat": 5, "dog": 5, "2": 4}


def test_cat_of_what_is_not_there_is_an_error(originals, bare):
    for folder in (originals["none"], originals["gz"], bare):
        assert_is_one_line_of_error(invoke("cat", folder, "x", "txt"), "has no sample 'x'")
    assert_is_one_line_of_error(invoke("cat", originals["none"], "0001", "jpg"), "has no field 'jpg'")
    assert_is_one_line_of_error(invoke("cat", bare, "b", "cls"), "has no field 'cls'")
    assert invoke("cat", bare, "b", "txt").stdout_bytes == b"two"


@every_compression
def test_stats_are_counted_right(compression, originals):
    figures = json.loads(invoke("stats", originals[compression], "--json").stdout)

    sizes = [len(text_of(i)) for i in range(14)]
    files = [path.stat().st_size for path in files_of(originals[compression])]
    lost = sum(-size % 4096 for size in sizes) + 14 * 4095
    assert figures["samples"] == 14
    assert (
        figures["fields"]["txt"]
        == Sizes(14, sum(sizes), 0, (sizes[6] + sizes[7]) / 2, sum(sizes) / 14, sizes[13])._asdict()
    )
    assert figures["classes"] == {"cat": 5, "dog": 5, "2": 4}
    assert figures["before"] == Footprint(28, sum(sizes) + 14, lost)._asdict()
    assert figures["after"] == Footprint(len(files), sum(files), sum(-size % 4096 for size in files))._asdict()
    assert figures["tar_bytes"] == sum(shard.tar_size for shard in read_manifest(str(originals[compression])).shards)


def test_stats_print_tables(originals, bare):
    lines = invoke("stats", originals["none"]).stdout.splitlines()

    assert lines[0] == "14 samples in 2 shards"
    assert [re.split(" {2,}", line)[:2] for line in lines[2:5]] == [["field", "number"], ["cls", "14"], ["txt", "14"]]
    assert [re.split(" {2,}", line)[:2] for line in lines[-3:]] == [
        ["on disk", "files (inodes)"],
        ["unpacked, a file for every field", "28"],
        ["packed: shards, indexes, manifest", str(len(files_of(originals["none"])))],
    ]
    assert compute_statistics(str(bare)).classes == {"1": 1}
    assert invoke("stats", bare).exit_code == 0


def stats(folder):
    return json.loads(invoke("stats", folder, "--json").stdout)


@pytest.mark.parametrize("kind", ["images", "files"])
def test_stats_count_files_and_folders_as_they_were(kind, tmp_path):
    """300 pictures in 6 folders are 300 files, not 600 with their labels."""
    for i in range(300):
        file = tmp_path / f"photos/deep/{i % 5}/{i}.jpg" if kind == "files" else tmp_path / f"photos/{i % 6}/{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(i))
        if kind == "files":
            file.with_suffix(".cls").write_text("1")
    invoke("pack", tmp_path / "photos", tmp_path / "out", "--kind", kind)
    invoke("pack", tmp_path / "out", tmp_path / "again", "--compression", "zst")

    files, more = (600, 300) if kind == "files" else (300, 0)
    sizes = sum(range(300)) + more
    lost = sum(-size % 4096 for size in range(300)) + 4095 * more
    for folder in ("out", "again"):
        figures = stats(tmp_path / folder)
        assert figures["before"] == Footprint(files, sizes, lost)._asdict()
        assert (figures["folders"], figures["originals"]) == (6, 300)
    assert stats(tmp_path / "photos") == {"before": Footprint(files, sizes, lost)._asdict(), "folders": 6}
    lines = [re.split(" {2,}", line)[:3] for line in invoke("stats", tmp_path / "out").stdout.splitlines()[-3:]]
    assert lines[0][:2] == ["unpacked: the files that it was packed of", f"{files}"]
    assert lines[1] == ["", "and their folders", "6"]
    (tmp_path / "nothing").mkdir()
    assert_is_one_line_of_error(invoke("stats", tmp_path / "nothing"), "has neither manifest.json nor shards")


def test_stats_of_several_datasets_count_classes_by_name(tmp_path):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["bird", "cat"])):
        with ShardWriter(str(tmp_path / name), classes=classes) as writer:
            for i, label in enumerate((0, 1, 1, 7)):
                writer.write({"__key__": f"{name}{i}", "cls": label})

    assert stats(tmp_path / "{a,b}")["classes"] == {"cat": 3, "dog": 2, "bird": 1, "7": 2}


def test_a_dataset_whose_name_is_like_a_pattern_is_that_dataset(tmp_path, originals):
    folder = shutil.copytree(originals["none"], tmp_path / "train{1..2}[x]")

    assert compute_statistics(str(folder)) == compute_statistics(str(originals["none"]))
    assert invoke("cat", folder, "0001", "cls").stdout == "1"
    shutil.copytree(folder, tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    assert invoke("stats", tmp_path / "{a,b}").stdout.startswith("28 samples in 4 shards\n")


def test_index_makes_a_dataset(bare):
    result = invoke("index", bare, "--column", "label=cls", "--class", "cat", "--class", "dog", "--json")

    described = json.loads(result.stdout)
    manifest = read_manifest(str(bare))
    assert (described["samples"], described["digest"]) == (2, manifest.digest)
    assert (manifest.classes, dict(manifest.columns)) == (("cat", "dog"), {"label": "int64"})
    assert invoke("index", bare).stdout == f"{bare}: 2 samples in 1 shard, 4.1 KB\n"
    assert invoke("index", bare, "--out", bare / "out").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["verify"], "2 samples in 1 shard read; everything is as it should be\n"),
        (["ls"], "a\tcls 1  txt 3\nb\ttxt 3\n"),
        (["ls", "--shards"], "\t2 samples\t4,096 bytes\tnone\n"),
        (["cat"], "two"),
        (["stats"], "2 samples in 1 shard\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_shards_that_lie_elsewhere_are_looked_into_only_if_that_is_allowed(arguments, found, bare):
    invoke("index", bare, "--out", bare / "out")
    command = [*arguments, bare / "out", *(["b", "txt"] if arguments == ["cat"] else [])]

    refused, allowed = invoke(*command), invoke(*command, "--allow-any-url")

    assert refused.exit_code != 0
    assert "is outside its folder" in refused.output
    assert (allowed.exit_code, allowed.stderr) == (0, "")
    assert found in allowed.stdout


def test_index_refuses_what_no_longer_matches(bare):
    invoke("index", bare)
    data = bytearray((bare / "x.tar").read_bytes())
    data[512] ^= 1
    (bare / "x.tar").write_bytes(data)

    assert_is_one_line_of_error(invoke("index", bare), "as its manifest says")
    assert invoke("index", bare, "--overwrite").exit_code == 0


def test_pack_packs_class_folders_and_says_what_it_did(photos, tmp_path):
    options = ["--split", "train=0.5", "--split", "val=0.5", "--shard-samples", "4", "--column", "label=cls"]

    result = invoke("pack", photos, tmp_path / "out", *options, "--compression", "none", "--workers", "1")

    train, val = read_manifest(str(tmp_path / "out/train")), read_manifest(str(tmp_path / "out/val"))
    assert result.exit_code == 0, result.output
    assert result.stderr == f"{photos}: taken for images; --kind says otherwise\n"
    assert f"{tmp_path}/out/train: {train.num_samples} samples in {len(train.shards)} shards" in result.stdout
    assert "plain tar: read by tar, webdataset" in result.stdout
    assert train.num_samples + val.num_samples == 20
    assert (train.classes, dict(train.columns)) == (("cat", "dog"), {"label": "int64"})
    assert invoke("verify", tmp_path / "out/train").exit_code == 0


def test_pack_says_how_many_files_it_left_out(photos, tmp_path):
    (photos / "cat" / "no\nname.heic").write_bytes(b"...")

    result = invoke("pack", photos, tmp_path / "out", "--kind", "images", "--json")

    assert result.stderr == "note: 1 file was not packed, for example cat/no\\nname.heic\n"
    assert json.loads(result.stdout)["out"]["samples"] == 20


def test_pack_packs_shards_again_and_prints_json(originals, tmp_path):
    result = invoke("pack", originals["none"], tmp_path / "again", "--compression", "zst", "--no-shuffle", "--json")

    described = json.loads(result.stdout)["again"]
    assert (described["samples"], described["fields"]) == (14, ["cls", "txt"])
    assert invoke("cat", tmp_path / "again", "0003", "txt").stdout_bytes == text_of(3).encode()


def test_pack_says_which_classes_there_are_and_which_fields_samples_have(photos, tmp_path):
    classes = [f"class{i:02d}" for i in range(12)]
    for i, name in enumerate(classes):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "a.jpg").write_bytes(b"%d" % i)
        (tmp_path / "mixed").mkdir(exist_ok=True)
        (tmp_path / f"mixed/{i}.jpg").write_bytes(b"%d" % i)
    (tmp_path / "mixed/3.txt").write_text("three")

    for source, said in (
        (photos, "  2 classes: cat, dog\n  fields: cls, jpg in every sample\n"),
        (tmp_path / "many", f"  12 classes: {', '.join(classes[:10])}, ...\n  fields: cls, jpg in every sample\n"),
        (tmp_path / "mixed", "KB\n  fields: jpg in 12, txt in 1 of 12 samples\n"),
    ):
        assert said in invoke("pack", source, tmp_path / "out" / source.name).stdout
        assert said in invoke("pack", source, tmp_path / "out" / source.name).stdout  # already finished, reported again
    transformed = pack_again(tmp_path / "out/mixed", tmp_path / "out/again")
    assert transformed.packed["samples_with"] == {"jpg": 12, "txt": 1}


def pack_again(source, destination):
    return shardkit.pack(shardkit.ShardSource(source, filter=lambda _: True), destination, progress=False)["again"]


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["cat/1.jpg", "dog/1.JPG", ".git/config", "cat/.hidden.txt"], "images"),
        (["cat/1.jpg", "dog/1.jpe", ".DS_Store"], "images"),
        (["cat/1.jpg", "README.md"], "files"),
        (["1.jpg", "2.jpg", ".git/x"], "files"),
    ],
)
def test_what_is_hidden_does_not_decide_what_a_folder_is(tmp_path, files, kind):
    for name in files:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"")

    assert recognise_source(str(tmp_path / "in")) == kind
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "in").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    (tmp_path / "linked/itself").symlink_to(tmp_path / "linked")
    assert recognise_source(str(tmp_path / "linked")) == kind


def test_an_image_beside_class_folders_is_refused(photos, tmp_path):
    (photos / "stray.jpg").write_bytes(b"")

    result = invoke("pack", photos, tmp_path / "out")
    assert_is_one_line_of_error(result, "the image stray.jpg lies beside folders of images")
    assert "classes:" not in invoke("pack", photos, tmp_path / "out", "--kind", "files").stdout


@pytest.mark.parametrize("name", ["backup.tar", "manifest.json"])
def test_shards_among_images_are_not_taken_for_all_that_there_is(name, photos, tmp_path):
    (photos / name).write_bytes(END_OF_ARCHIVE)

    result = invoke("pack", photos, tmp_path / "out")
    assert_is_one_line_of_error(result, f"holds shards or a manifest, and images ({photos}/cat/0000.jpg)")
    assert "20 samples" in invoke("pack", photos, tmp_path / "out", "--kind", "images").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "files", "--class", "cat"], "--class is for images, not for files"),
        (["--split", "train"], "--split 'train': write name=value"),
        (["--split", "train=half"], "'half' is no share"),
        (["--shard-bytes", "many"], "'many' is not a size"),
        (["--compression", "rar"], "compression 'rar' is not known"),
        (["--kind", "files", "--labels", "labels.csv"], "--labels is for images"),
        (["--kind", "images", "--fields", "jpg"], "--fields is for files and shards"),
    ],
)
def test_wrong_options_of_pack_are_one_line(options, message, photos, tmp_path):
    result = invoke("pack", photos, tmp_path / "out", *options)

    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_source_is_recognised_by_what_is_in_it(photos, originals, bare, tmp_path):
    found = [recognise_source(str(path)) for path in (photos, photos / "cat", originals["gz"], bare, bare / "x.tar")]
    (photos / "cat/0000.txt").write_text("a cat")

    assert found == ["images", "files", "shards", "shards", "shards"]
    assert recognise_source(str(photos)) == "files"
    assert recognise_source(str(tmp_path / "bare")) == "shards"
    assert recognise_source("-") == recognise_source("train-{0..3}.tar") == "shards"


@pytest.mark.parametrize("command", ["verify", "ls", "stats", "index"])
def test_what_is_not_there_is_one_line_of_error(command, tmp_path):
    assert_is_one_line_of_error(
        invoke("pack", tmp_path / "nothing", tmp_path / "a"), "does not exist; name a folder of"
    )
    assert_is_one_line_of_error(invoke(command, tmp_path / "nothing"), "does not exist")
    assert_is_one_line_of_error(invoke(command, "odd://bucket/x"), "does not read or write odd: URLs")


@pytest.mark.parametrize("arguments", [["verify"], ["stats"], ["ls", "--shards"]])
def test_what_reads_shards_twice_refuses_standard_input(arguments):
    assert_is_one_line_of_error(invoke(*arguments, "-"), "standard input has no size and can be read only once; write")


def test_an_error_of_the_operating_system_is_one_line_too(bare):
    assert_is_one_line_of_error(
        invoke("ls", bare / "missing.tar"), "missing.tar: does not exist (No such file or directory); correct the path"
    )


def test_what_an_error_says_to_do_is_an_option_that_there_is(dataset, photos, tmp_path):
    folder = dataset()
    assert invoke("index", folder / "train-000000.tar", "--out", tmp_path / "out").exit_code == 0

    assert_is_one_line_of_error(invoke("pack", "--kind=images", photos, folder), "or pass --overwrite to replace it")
    assert_is_one_line_of_error(invoke("ls", tmp_path / "out"), "if you trust who wrote it, pass --allow-any-url")


def test_a_command_that_is_not_there_is_an_error_of_use():
    result = invoke("unpack")

    assert result.exit_code == 2
    assert "No such command 'unpack'" in result.stderr


def start(*arguments, **options):
    program = "from shardkit.cli.app import main; main()"
    return started([sys.executable, "-c", program, *map(str, arguments)], **options)


@pytest.mark.multiprocess
def test_the_program_writes_bytes_and_exits_with_its_code(dataset):
    folder = dataset()

    with start("cat", folder, "0005", "txt") as process:
        out, err = process.communicate()
    assert (out, err) == (text_of(5).encode(), b"")
    (folder / "train-000000.tar").unlink()
    with start("verify", folder) as process:
        out, err = process.communicate()

    assert (process.returncode, err) == (1, b"")
    assert b"is missing" in out


@pytest.mark.multiprocess
def test_ctrl_c_ends_it_with_one_line():
    with start("ls", "-", stdin=subprocess.PIPE) as process:
        process.stdin.write(tar_of([("a.bin", bytes(1 << 20))])[: 1 << 19])  # more than a pipe holds
        process.stdin.flush()  # the program reads, and waits for the rest
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


@pytest.mark.multiprocess
def test_standard_output_that_is_full_is_named(dataset):
    command = [sys.executable, "-c", "from shardkit.cli.app import main; main()", "ls", dataset()]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)

    assert done.returncode != 0
    assert done.stderr.startswith(b"error: standard output: cannot be written, because the disk is full (No space left")


@pytest.mark.multiprocess
def test_who_stops_reading_gets_no_error(tmp_path):
    folder = tmp_path / "many"
    with ShardWriter(str(folder)) as writer:
        for i in range(5000):
            writer.write({"__key__": f"{'long' * 10}{i:06d}", "cls": 1})
    with start("ls", folder) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        process.wait()

    assert (process.returncode, err) == (0, b"")
