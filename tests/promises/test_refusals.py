"""Whatever is wrong with files: an error of shardkit that names the file and says what to do, or the right samples."""

import dataclasses
import itertools
import os
import re
import shutil
import signal
import socket
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from shardkit.format.index import PARTS
from shardkit.inspection.contents import list_samples
from tests.support import forge
from tests.support.shared import examples, without_rights

SAMPLES = [{"__key__": f"k/{i:04d}", "txt": f"sample {i} " * 20, "cls": i % 5} for i in range(60)]
PACK = {"shard_samples": 20, "block_bytes": "2kB", "compression": "none", "shuffle": False, "progress": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a dataset of three shards."""
    folder = tmp_path_factory.mktemp("whole") / "train"
    shardkit.pack(SAMPLES, folder, columns={"label": "cls"}, **PACK)
    return folder


@pytest.fixture(scope="module")
def expected(whole):
    """Return the result of each reader and each command for a dataset without faults."""
    return Expected(
        {read: read(whole) for read in READERS} | {command: run_command(whole, command) for command in COMMANDS}
    )


class Expected(dict):
    """The expected results, with a short repr: hypothesis shows it with each failure, which it would otherwise hide."""

    def __repr__(self):
        return "..."


class Hang(BaseException):
    """An operation has waited too long."""


@contextmanager
def limited(path, seconds=20):
    """Raise Hang if the block takes longer, and release threads that wait for a FIFO."""

    def hang(*_):
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Faults of a file.


def miss(path):
    path.unlink()


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def make_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}")  # the path may be too long for it


def make_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_loop(path):
    path.unlink()
    path.symlink_to(path)


def dangle(path):
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def forbid(path):
    path.chmod(0)


def leave(_):
    """Leave the file unchanged."""


FAULTS = [miss, make_fifo, make_socket, make_device, make_folder, make_loop, dangle, forbid]
TARGETS = {"manifest": "manifest.json", "shard": "*-000001.tar", "index": "*-000001*.parquet"}


# The readers. Each returns a value that equals the expected one if everything was read correctly.


def plain(sample):
    return {name: value for name, value in sample.items() if name != "__url__"}


def by_number(folder):
    dataset = shardkit.ShardDataset(folder)
    return [plain(dataset[i]) for i in range(0, len(dataset), 7)]


def by_block(folder):
    dataset = shardkit.ShardDataset(folder)
    return [plain(dataset.read_block(1, number).sample(0)) for number in range(2)]


def by_key(folder):
    return plain(shardkit.ShardDataset(folder).by_key("k/0030"))


def all_keys(folder):
    return shardkit.ShardDataset(folder).keys()


def by_where(folder):
    dataset = shardkit.ShardDataset(folder, where=[("label", "==", 1)], columns=["label"])
    return [plain(sample) for sample in dataset[:]]


def by_loader(folder):
    loader = shardkit.ShardLoader(shardkit.ShardDataset(folder), 8, num_workers=2)
    return [batch["__key__"] for batch in loader]


def by_stream(folder):
    return [plain(sample) for sample in shardkit.ShardStream(folder, shuffle=False)]


def repacked(folder):
    out = folder.with_name("repacked")
    try:
        return shardkit.pack(shardkit.ShardSource(folder), out, **PACK)["repacked"].digest
    finally:
        assert {path.name for path in out.glob(".*")} <= {".huggingface.yaml"}
        shutil.rmtree(out, ignore_errors=True)


def indexed(folder):
    out = folder.with_name("indexed")
    try:
        return shardkit.index_shards(folder, out=out).num_samples
    finally:
        shutil.rmtree(out, ignore_errors=True)


def reported(folder):
    return shardkit.shuffle_report(folder, 8).to_json().replace(str(folder), "")


def manifest_of(folder):
    return shardkit.read_manifest(folder)


READERS = [
    by_number,
    by_block,
    by_key,
    all_keys,
    by_where,
    by_loader,
    by_stream,
    repacked,
    indexed,
    reported,
    manifest_of,
]
FEWER = [
    read for read in READERS if read not in (repacked, indexed)
]  # for many examples: those two take ten times as long
COMMANDS = [
    ("ls", "."),
    ("ls", ".", "--shards"),
    ("cat", ".", "k/0030", "txt"),
    ("stats", "."),
    ("index", ".", "--out", "../indexed"),
    ("pack", ".", "../repacked"),
    ("shuffle-report", ".", "--batch-size", "8"),
]


def run_command(folder, command):
    """Return the exit code, standard output and standard error of a command run on a dataset."""
    words = [str(folder) if word == "." else word.replace("../", f"{folder.parent}/") for word in command]
    try:
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr
    finally:
        for name in ("indexed", "repacked"):
            shutil.rmtree(folder.with_name(name), ignore_errors=True)


def says_where_and_what_to_do(message, path):
    """Return whether a message names a file, says what is wrong with it, and then says what to do."""
    return re.search(rf"{re.escape(path.name)}\b.*[;.,] \S+ \S+", message, re.DOTALL) is not None


def snapshot(folder):
    return {path: path.lstat() for path in sorted(folder.rglob("*"))}


@pytest.fixture
def damaged(whole, tmp_path):
    """Return a function that makes a dataset with a fault in one file, and returns its folder and the file."""

    def make(fault, target):
        folder = Path(shutil.copytree(whole, tmp_path / "train"))
        path = next(folder.rglob(TARGETS[target]))
        fault(path)
        return folder, path

    return make


# Without its manifest a dataset is a folder of tars, and without a shard the folder has one tar less. `index` makes a
# dataset of such folders, so neither is a fault.
FINE = {("miss", "manifest"): {"by_stream", "repacked", "indexed", "index", "ls", "stats", "pack"}}
FINE["miss", "shard"] = {"indexed", "index"}


@pytest.mark.filterwarnings("ignore:these shards are read without an index")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_reader_gives_the_right_samples_or_an_error_of_ours(damaged, fault, target, expected):
    folder, path = damaged(fault, target)
    before, wrong, errors = snapshot(folder), [], 0
    for read in READERS:
        try:
            with without_rights(), limited(path):
                found = read(folder)
                if found != expected[read] and read.__name__ not in FINE.get((fault.__name__, target), ()):
                    wrong.append((read.__name__, "other samples"))
        except shardkit.ShardkitError as error:
            errors += 1
            if not says_where_and_what_to_do(str(error), path):
                wrong.append((read.__name__, str(error)))
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            wrong.append((read.__name__, repr(error)))
    assert wrong == []
    assert errors
    assert list(snapshot(folder)) == list(before)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_command_prints_the_right_thing_or_one_line_that_says_what_to_do(whole, damaged, fault, target, expected):
    folder, path = damaged(fault, target)
    before, wrong, errors = snapshot(folder), [], 0
    for command in COMMANDS:
        if command[0] in FINE.get((fault.__name__, target), ()):
            continue
        try:
            with without_rights(), limited(path):
                code, out, error = run_command(folder, command)
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            wrong.append((command, repr(error)))
            continue
        if code == 0:
            if out != expected[command][1].replace(str(whole.parent), str(folder.parent)):
                wrong.append((command, out))
            continue
        errors += 1
        if code != 2 or "error: " not in error or not says_where_and_what_to_do(error, path):
            wrong.append((command, code, error))
    assert wrong == []
    assert errors
    assert list(snapshot(folder)) == list(before)


@pytest.mark.parametrize("target", ["shard", "index"])
@pytest.mark.parametrize("fault", FAULTS)
def test_verify_reports_the_file_and_nothing_that_is_not_so(damaged, fault, target):
    folder, path = damaged(fault, target)
    with without_rights(), limited(path):
        report = shardkit.verify(folder)

    problems = [problem for shard in report.damaged for problem in shard.problems]
    assert not report.ok
    assert [problem.url for problem in problems] == [str(path)]
    assert (problems[0].message.startswith("is missing")) == (fault in (miss, dangle))


# Files that are missing when a dataset is opened.


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Return a dataset of twelve shards, and the names of shards and of side files in its manifest."""
    folder = tmp_path_factory.mktemp("several") / "train"
    manifest = shardkit.pack(SAMPLES, folder, **PACK | {"shard_samples": 5})["train"]
    indexes = [*(shard.index_url for shard in manifest.shards), manifest.block_file_url]
    return folder, [shard.url for shard in manifest.shards], indexes


@given(data=st.data())
def test_all_that_is_missing_is_said_when_a_dataset_is_opened(several, data):
    folder, shards, indexes = several
    gone = sorted(data.draw(st.sets(st.sampled_from(shards + indexes), min_size=1)), key=(shards + indexes).index)
    aside = folder.with_name("aside")
    for name in gone:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(aside / name)
    errors = []
    try:
        for read in (shardkit.ShardDataset, shardkit.ShardStream, shardkit.ShardSource, by_ls):
            with pytest.raises(shardkit.IncompleteDatasetError) as caught:
                read(folder)
            errors.append(caught.value)
    finally:
        for name in gone:
            (aside / name).rename(folder / name)

    lost, unindexed = (sum(name in gone for name in names) for names in (shards, indexes))
    counts = [f"{lost} of 12 shards"] * bool(lost) + [f"{unindexed} of 13 indexes"] * bool(unindexed)
    named = ", ".join(gone[:5]) + " ..." * (len(gone) > 5)
    for error in errors:
        assert str(error).startswith(f"{folder}: {' and '.join(counts)} are missing: {named}; fetch them again, or ")
        assert "'shardkit index " in str(error)
        assert error.missing == tuple(f"{folder}/{name}" for name in gone)
        assert isinstance(error, FileNotFoundError)
        assert isinstance(error, shardkit.DatasetError)
    assert shardkit.ShardDataset(folder)[0]["cls"] == 0


def by_ls(folder):
    return next(iter(list_samples(str(folder))))


@pytest.mark.parametrize("read", [shardkit.ShardDataset, shardkit.ShardStream, shardkit.ShardSource])
def test_to_open_a_dataset_takes_as_many_calls_whatever_the_number_of_its_shards(read, tmp_path, monkeypatch):
    calls = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def counted(*args, **options):
            calls[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    for shards in (2, 40):
        shardkit.pack(SAMPLES[:shards], tmp_path / f"{shards}", **PACK | {"shard_samples": 1})
    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        count(os, name)
    totals = []
    for shards in (2, 40):
        calls.clear()
        read(tmp_path / f"{shards}")
        totals.append(dict(calls))

    assert totals[0] == totals[1]
    assert totals[0]["listdir"] <= 4


@pytest.mark.filterwarnings("ignore:these shards are read without an index")
def test_shards_that_a_pattern_or_a_list_stands_for_are_missed_together(several):
    folder, shards, _ = several
    pattern = f"{folder}/train-{{000008..000013}}.tar"
    listed = [f"{folder}/{shards[0]}", f"{folder}/none.tar"]

    with pytest.raises(FileNotFoundError, match=r"000013\}\.tar: 2 of 6 shards are missing: .*012\.tar, .*013\.tar; "):
        shardkit.ShardStream(pattern)
    with pytest.raises(FileNotFoundError, match=r"^1 of 2 shards are missing: .*none\.tar; correct"):
        shardkit.ShardStream(listed)
    assert run_command(folder, ("ls", pattern))[0] == 2
    assert "2 of 6 shards are missing" in run_command(folder, ("ls", pattern))[2]


def by_sampler(dataset):
    loader = DataLoader(dataset, batch_sampler=shardkit.ShardSampler(dataset, 8), collate_fn=list)
    return list(loader)


def by_places(dataset):
    return [dataset[i] for i in range(len(dataset))]


def by_blocks(dataset):
    return [dataset.read_block(shard, 0) for shard in range(3)]


def by_threads(dataset):
    return list(shardkit.ShardLoader(dataset, 8, num_workers=2, on_error="skip"))


def by_processes(dataset):
    return list(shardkit.ShardLoader(dataset, 8, num_workers=1, worker_type="process", transform=plain))


@pytest.mark.multiprocess
@pytest.mark.parametrize("read", [by_sampler, by_places, by_blocks, by_threads, by_processes, list, shardkit.verify])
def test_a_shard_that_vanishes_under_a_reader_is_an_error_of_ours_that_names_it(read, damaged):
    folder, path = damaged(leave, "shard")
    opened = shardkit.ShardStream(folder, on_error="skip") if read is list else shardkit.ShardDataset(folder)
    path.unlink()
    if read is shardkit.verify:
        assert [problem.message for shard in read(folder).damaged for problem in shard.problems] == ["is missing"]
        return

    with pytest.raises(
        shardkit.ShardkitError, match=r"000001\.tar: does not exist .*; correct the path, or fetch"
    ) as e:
        read(opened)
    assert isinstance(e.value, FileNotFoundError)


# Wrong facts in an index or a manifest.


# The columns that locate samples. The values of promoted columns are the user's, and keys are any text.
LOCATING = ["__offset__", "__size__", *(f"{name}:{part}" for name in ("txt", "cls") for part in PARTS)]
CHANGES = ["null", "all null", "float"]
FORGED = [("__key__", change) for change in CHANGES] + list(itertools.product(LOCATING, [*CHANGES, "text"]))


@pytest.mark.parametrize(("name", "change"), FORGED)
@examples(1 / 50)
@given(rows=st.sets(st.integers(0, 19), min_size=1, max_size=4))
def test_nulls_and_other_types_in_an_index_are_errors_of_ours_or_the_right_samples(whole, expected, name, change, rows):
    import pyarrow as pa

    def changed(table):
        column = table.column(name)
        if change == "null":
            column = pa.array([None if i in rows else value for i, value in enumerate(column.to_pylist())], column.type)
        else:
            kind = {"all null": column.type, "text": pa.string(), "float": pa.float64()}[change]
            column = pa.array([None if change == "all null" else i for i in range(len(table))], pa.int64()).cast(kind)
        return table.set_column(table.column_names.index(name), name, column)

    folder = whole.with_name("forged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    forge.rewrite_index(folder, 1, rows=changed)
    path, wrong, refusals = forge.index_path(folder, 1), [], []
    for read in FEWER:
        try:
            found = read(folder)
            if (found.digest != expected[read].digest) if read is manifest_of else (found != expected[read]):
                wrong.append((read.__name__, "other samples"))
        except shardkit.ShardkitError as error:
            refusals.append(str(error))
            if not says_where_and_what_to_do(str(error), path):
                wrong.append((read.__name__, str(error)))
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            wrong.append((read.__name__, repr(error)))
    report = shardkit.verify(folder)

    assert wrong == []
    assert refusals or name == "__size__"  # only `verify` compares that
    assert [shard.url for shard in report.damaged] == [str(next(folder.glob(TARGETS["shard"])))]


@given(
    name=st.sampled_from(["blocks", "block_samples"]),
    value=st.integers(0, 2**62) | st.integers(0, 40),
    shard=st.integers(0, 2),
)
def test_numbers_of_blocks_that_are_not_so_are_said_to_be_the_manifests(whole, expected, name, value, shard):
    path = whole / "manifest.json"
    right = path.read_bytes()

    def lie(says):
        part = says["shardlist"][shard] if name == "blocks" else says
        assume(value != part[name])
        part[name] = value

    forge.edit_manifest(whole, lie)
    wrong = []
    try:
        for read in FEWER:
            try:
                if read in (reported, manifest_of):  # they only repeat the manifest
                    read(whole)
                elif read(whole) != expected[read]:
                    wrong.append((read.__name__, "other samples"))
            except shardkit.DatasetError as error:
                if "again" not in str(error):
                    wrong.append((read.__name__, str(error)))
            except Exception as error:  # noqa: BLE001 - it is what is looked for
                wrong.append((read.__name__, repr(error)))
    finally:
        path.write_bytes(right)
    assert wrong == []


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["a\0.tar", "\0", "../a.tar", "/etc/a.tar", "C:\\a.tar", "..\\a.tar"])
def test_a_manifest_that_names_what_cannot_be_a_shard_is_refused_by_all(damaged, name, trusted):
    folder, path = damaged(leave, "manifest")
    manifest = shardkit.read_manifest(folder)
    shards = (dataclasses.replace(manifest.shards[0], url=name), *manifest.shards[1:])
    path.write_text(dataclasses.replace(manifest, shards=shards).to_json())
    problem = r"are missing" if trusted and "\0" not in name else r"manifest\.json: names the shard '"

    for read in (shardkit.ShardDataset, shardkit.ShardStream, shardkit.ShardSource):
        with pytest.raises(shardkit.DatasetError, match=problem):
            read(folder, allow_any_url=trusted)


# Sources to pack.


def fifo_at(path):
    os.mkfifo(path)


def unreadable_file_at(path):
    path.write_bytes(b"1")
    path.chmod(0)


def unreadable_folder_at(path):
    path.mkdir(mode=0)


def loop_at(path):
    path.symlink_to(path.name)


SOURCES = {
    "files": lambda folder: shardkit.pack(shardkit.FileFolder(folder), folder.parent / "out", **PACK),
    "images": lambda folder: shardkit.pack(
        shardkit.ImageFolder(folder, labels={"a.jpg": 1, "b.jpg": 2}), folder.parent / "out", **PACK
    ),
    "labels": lambda folder: shardkit.ImageFolder(folder.with_name("images"), labels=folder / "b.jpg.csv"),
    "command": lambda folder: [
        run_command(folder, ("pack", ".", "../out")),
        run_command(folder, ("pack", ".", "../out", "--kind", "files")),
    ],
}


@pytest.mark.parametrize("make", [fifo_at, unreadable_file_at, unreadable_folder_at, loop_at])
@pytest.mark.parametrize("source", SOURCES)
def test_what_cannot_be_read_of_a_source_is_named_and_nothing_is_left(source, make, tmp_path):
    folder = tmp_path / "source"
    for name in ("source", "images"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(b"0")
    path = folder / ("b.jpg.csv" if source == "labels" else "b.jpg")
    make(path)
    message = ""
    with without_rights(), limited(path):
        try:
            results = SOURCES[source](folder)
        except shardkit.ShardkitError as error:
            message = str(error)
        else:
            assert source == "command"
            assert {code for code, _, _ in results} == {2}
            message = results[0][2]

    assert says_where_and_what_to_do(message, path)
    assert {path.name for path in (tmp_path / "out").glob("*")} <= {"unfinished.json"}


def test_a_wrong_place_is_said_to_be_one(several, tmp_path):
    folder = several[0]
    shardkit.pack(SAMPLES, tmp_path / "splits", splits={"train": 0.5, "val": 0.5}, **PACK)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jpg").write_bytes(b"0")

    for read in (shardkit.ShardDataset, shardkit.read_manifest):
        with pytest.raises(
            shardkit.DatasetError, match=r"splits: has no manifest.json itself; give one of .*s/train, "
        ):
            read(tmp_path / "splits")
        with pytest.raises(
            shardkit.DatasetError, match=r"nowhere: does not exist, so it has no manifest\.json; correct"
        ):
            read(tmp_path / "nowhere")
        with pytest.raises(
            shardkit.DatasetError, match=r"empty: has no manifest\.json, so it is not a dataset; make one"
        ):
            read(tmp_path / "empty")
    assert "nowhere: does not exist; give a folder" in run_command(tmp_path / "nowhere", ("ls", "."))[2]
    assert "empty: has neither manifest.json nor shards" in run_command(tmp_path / "empty", ("ls", "."))[2]
    code, _, error = run_command(tmp_path / "a.jpg", ("pack", ".", "../out"))
    assert (code, "a.jpg: is a file that is not called like a shard" in error) == (2, True)
    assert run_command(folder, ("ls", "."))[0] == 0
