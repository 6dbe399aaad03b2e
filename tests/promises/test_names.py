"""Names in a dataset never become paths outside their folder, and links there are never followed."""

import http.server
import io
import ntpath
import os
import shutil
import tarfile
import threading
import unicodedata
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from shardkit.storage.local import LocalStorage
from shardkit.storage.safe_names import check_no_links, find_unsafe, fold
from tests.support.shared import examples

SAMPLES = [{"__key__": f"k/{i:04d}", "bin": bytes([i]) * 900, "cls": i % 5} for i in range(12)]
PACK = {"shard_bytes": "20kB", "block_bytes": "4kB", "compression": "none", "num_workers": 1, "progress": False}

PIECES = [
    "a",
    "A",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "K",
    "\u212a",
    "con",
    "NUL",
    "com1",
    "lpt²",
    "aux.b",
    "..",
    ".",
    "/",
    "\\",
]
PIECES += ["\0", "\n", "\x7f", ":", " ", "b.jpg", "c" * 250, "\ud800", "~", "-", "*", "C:", "//", "CONIN$", "😀"]
hostile = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join) | st.text(max_size=8)
harmless = st.lists(
    st.sampled_from(["a", "A", "é", "e\u0301", "ß", "ss", "b.jpg", "😀", "-", "x"]), min_size=1, max_size=4
)
plain = st.lists(harmless.map("".join), min_size=1, max_size=3).map("/".join)
CHANGES = [
    str.lower,
    str.upper,
    str.swapcase,
    partial(unicodedata.normalize, "NFC"),
    partial(unicodedata.normalize, "NFD"),
]


@pytest.fixture(scope="module", autouse=True)
def unsynced():
    """Let the system decide when files reach the disk: no test here is about power cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def is_fine_on_windows(name):
    inside = ntpath.normpath(ntpath.join("C:\\folder", name))
    parts = name.split("/")
    return (
        inside == "C:\\folder\\" + "\\".join(parts)
        and not any(PureWindowsPath(part).is_reserved() or part[-1:] in (".", " ") for part in parts)
        and not ntpath.splitdrive(name)[0]
    )


def lookalikes(name):
    """Return the forms to which file systems that ignore case or normalize accents may convert a name."""
    forms = [unicodedata.normalize(form, name) for form in ("NFC", "NFD")]
    return {unicodedata.normalize("NFC", same) for form in forms for same in (form.lower(), form.upper().lower())}


@examples(4)
@given(names=st.lists(hostile, max_size=5) | st.lists(plain, min_size=1, max_size=5))
@example(["a/b", "a"])
@example(["a", "a/b"])
@example(["a.jpg/b", "A.JPG"])
@example(["É/a", "e\u0301/a"])
@example(["x" * 255 + "/" + "y" * 255])
@example(["/".join(["d" * 200] * 25)])
def test_names_that_are_accepted_are_files_of_their_own_inside_the_folder_everywhere(tmp_path_factory, names):
    unsafe = find_unsafe(names)
    if unsafe is not None:
        assert unsafe[0] in names
        assert unsafe[1]
        event("refused")
        return
    event(f"{len(names)} names")

    above = tmp_path_factory.mktemp("above")
    folder = above / "folder"
    folder.mkdir()
    check_no_links(folder, names)
    for name in names:
        with LocalStorage().create(f"{folder}/{name}") as file:
            file.write(name.encode())
    assert {path.read_bytes().decode() for path in folder.rglob("*") if path.is_file()} == set(names)
    assert names_in(above) == ["folder"]
    assert all(is_fine_on_windows(name) for name in names)
    seen = set()
    for name in names:
        assert not seen & lookalikes(name)
        seen |= lookalikes(name)
    shutil.rmtree(above)


@given(
    names=st.lists(st.from_regex(r"([a-z0-9_-]{1,20}/){0,3}[a-z0-9_-]{1,20}\.[a-z]{1,4}", fullmatch=True), unique=True)
)
def test_plain_names_are_accepted(names):
    devices = [name for name in names if not is_fine_on_windows(name)]
    folders = {str(above) for name in names for above in Path(name).parents}

    assert (find_unsafe(names) is None) == (not devices and not folders & set(names))


@examples(4)
@given(first=hostile | plain, changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3))
def test_names_are_folded_alike_whatever_their_case_and_their_accents(first, changes):
    second = first
    for change in changes:
        second = change(second)
    if lookalikes(first) & lookalikes(second):
        event("of one name" if first == second else "of two names")
        assert fold(first) == fold(second)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/etc/passwd", "absolute"),
        ("a/../../b", "leads out"),
        ("a//b", "file systems leave out"),
        ("./a", "file systems leave out"),
        ("", "file systems leave out"),
        ("a\0b", "control character"),
        ("a\x1bb", "control character"),
        ("..\\a", "backslash"),
        ("C:a", "colon"),
        ("a/nul.txt", "Windows"),
        ("a./b", "Windows"),
        ("a ", "Windows"),
        ("é" * 128, "more than 255 bytes"),
        ("a/" * 2100 + "a", "too long"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(name, problem):
    assert find_unsafe(["fine", name]) is not None
    assert problem in find_unsafe(["fine", name])[1]


# Links in the place of each written file.


def by_pack(out):
    shardkit.pack(SAMPLES, out, **PACK)


def by_pack_over(out):
    shardkit.pack(SAMPLES, out, overwrite=True, **PACK)


def by_pack_of_splits(out):
    shardkit.pack(SAMPLES, out, splits={"train": 0.5, "val": 0.5}, **PACK)


def by_writer_over(out):
    with shardkit.ShardWriter(out, shard_bytes="20kB", overwrite=True) as writer:
        for sample in SAMPLES:
            writer.write(sample)


def by_index(out):
    shardkit.index_shards(out / "tars", out=out, overwrite=True)


def by_cache(out):
    dataset = shardkit.ShardDataset(out / "data", cache=out, cache_bytes="10MB")
    assert [sample["cls"] for sample in dataset] == [sample["cls"] for sample in shardkit.ShardDataset(out / "data")]


OURS = [".shardkit-lock", ".shardkit-spill", "unfinished.json", "__index__", "__staging__"]  # during writing


@contextmanager
def prepared(folder, write):
    """Make a folder with the input of a writer, and delete it afterwards."""
    folder.mkdir(parents=True)
    if write is by_index:
        shardkit.pack(SAMPLES, folder / "tars", **PACK)
        for path in [path for path in (folder / "tars").rglob("*") if path.is_file() and path.suffix != ".tar"]:
            path.unlink()
    if write is by_cache:
        shardkit.pack(SAMPLES, folder / "data", **PACK)
    yield folder
    shutil.rmtree(folder)


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("write", [by_pack, by_pack_over, by_pack_of_splits, by_writer_over, by_index, by_cache])
def test_a_link_in_the_place_of_what_is_written_is_not_followed(write, tmp_path):
    with prepared(tmp_path / "clean/out", write) as folder:
        before = set(folder.rglob("*"))
        write(folder)
        written = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path not in before]
    assert len(written) >= 3
    followed = []
    for number, name in enumerate([*written, *OURS]):
        for kind in ("file", "folder", "nothing"):
            outside = tmp_path / f"outside{number}{kind}"
            outside.mkdir()
            (outside / "file").write_bytes(b"" if number % 2 else b"mine")
            (outside / "folder").mkdir()
            there = snapshot(outside)
            with prepared(tmp_path / f"{number}{kind}/out", write) as folder:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(outside / kind)
                try:
                    write(folder)
                except shardkit.ShardkitError as error:
                    assert str(folder) in str(error)  # noqa: PT017 - it may or may not be one
                if snapshot(outside) != there:
                    followed.append((name, kind))
    assert followed == []


# Names that come from strangers.


def hostile_tar(names):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    return file.getvalue()


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 1, 2)
    return result.exit_code


keys = st.lists(hostile.filter(lambda name: "\ud800" not in name and "\0" not in name), min_size=1, max_size=4)


@given(keys=keys)
@example(["../../../evil", "/tmp/shardkit-evil"])
@example(["..\\..\\evil", "a/../../../evil", "con"])
def test_hostile_keys_in_a_shard_lead_no_command_out_of_its_folder(tmp_path_factory, keys):
    above = tmp_path_factory.mktemp("above")
    folder = above / "folder"
    folder.mkdir()
    (folder / "a.tar").write_bytes(hostile_tar([f"{key}.cls" for key in keys]))
    is_dataset = run("index", folder) == 0
    for command in (["verify"], ["ls"], ["cat", keys[0], "cls"], ["pack", folder / "packed"]):
        run(command[0], folder, *command[1:])
    if is_dataset:
        dataset = shardkit.ShardDataset(folder, cache=folder, cache_bytes="1MB")
        assert len(list(dataset)) == len(dataset)

    assert names_in(above) == ["folder"]
    own = {"a.tar", "manifest.json", "packed", "shardkit-cache", "unfinished.json", "__index__", ".huggingface.yaml"}
    assert {name for name in names_in(folder) if not name.endswith(".parquet")} <= own
    assert not Path("/tmp/shardkit-evil.cls").exists()
    shutil.rmtree(above)


@given(name=hostile)
@example("../val")
@example("con")
def test_splits_are_folders_of_their_own_inside_the_destination(tmp_path_factory, name):
    above = tmp_path_factory.mktemp("above")
    try:
        shardkit.pack(SAMPLES[:4], above / "out", splits={name: 0.5, "train": 0.5}, **PACK)
    except shardkit.ShardkitError:
        assert names_in(above) == []
    else:
        assert names_in(above) == ["out"]
        assert names_in(above / "out") == sorted([".huggingface.yaml", name, "train"])
        assert is_fine_on_windows(name)
    shutil.rmtree(above)


@pytest.mark.parametrize("name", ["Train", "TRAIN", "train ", "nul", "..", "a/b"])
def test_a_split_that_could_be_another_folder_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(shardkit.ArgumentError, match="splits: "):
        shardkit.pack(SAMPLES, tmp_path / "out", splits={"train": 0.5, name: 0.5}, **PACK)

    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["nul.tar", "a:b.tar", "a\\b.tar"])
def test_shards_whose_indexes_could_be_elsewhere_are_refused(name, tmp_path):
    for shard in (name, "a.tar", "e\u0301.tar"):
        (tmp_path / shard).write_bytes(hostile_tar(["1.cls"]))

    with pytest.raises(shardkit.ArgumentError, match=r"the index '.*; rename the shard"):
        shardkit.index_shards(tmp_path)
    assert len(names_in(tmp_path)) == 3


@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("name", ["A.tar", "é.tar"])
def test_shards_that_differ_in_case_or_accents_have_indexes_that_are_files_of_their_own_everywhere(
    name, is_equal, tmp_path
):
    for number, shard in enumerate((name, "a.tar", "e\u0301.tar")):
        (tmp_path / shard).write_bytes(hostile_tar(["0.cls" if is_equal else f"{number}.cls"]))

    indexes = [shard.index_url for shard in shardkit.index_shards(tmp_path).shards]

    assert find_unsafe(indexes) is None
    assert len(indexes) == 3
    assert len(shardkit.ShardDataset(tmp_path)) == 3


class EveryName(http.server.BaseHTTPRequestHandler):
    """Has the same shard under every name."""

    def do_GET(self):
        data = hostile_tar(["1.cls"]) if self.path.endswith(".tar") else b""
        self.send_response(200 if data else 404)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_):
        """Say nothing."""


@pytest.mark.parametrize("name", ["..%2F..%2Fevil.tar", "%2Ftmp%2Fshardkit-evil.tar", "a%2F..%2F..%2Fevil.tar"])
def test_the_index_of_a_shard_from_the_web_lies_in_the_folder_that_was_named(name, tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EveryName) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            shardkit.index_shards(f"http://127.0.0.1:{server.server_port}/{name}", out=tmp_path / "a/b")
        finally:
            server.shutdown()
            thread.join()

    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet") if "a/b/" not in str(path)] == []
    assert not list(Path("/tmp").glob("shardkit-evil*"))
