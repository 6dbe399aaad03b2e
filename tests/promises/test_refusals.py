"""Whatever is wrong with files: an error of ours that names the file and says what to do, or the right samples."""

import os
import re
import shutil
import signal
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from tests.support.shared import without_rights

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
    """Return what each reader and each command gives of a dataset that has no fault."""
    return {read: read(whole) for read in READERS} | {command: run_command(whole, command) for command in COMMANDS}


class Hang(BaseException):
    """Something has waited too long."""


@contextmanager
def limited(path, seconds=20):
    """Raise Hang if it takes longer, and let go who waits for a FIFO."""

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


# What may be wrong with a file.


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


FAULTS = [miss, make_fifo, make_socket, make_device, make_folder, make_loop, dangle, forbid]
TARGETS = {"manifest": "manifest.json", "shard": "*-000001.tar", "index": "*-000001*.parquet"}


# Who reads it. Each returns something that is equal if what was read is right.


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
        assert not [path for path in out.glob("*") if path.name.startswith(".")]
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
    """Return the exit code, standard output and standard error of a command about a dataset."""
    words = [str(folder) if word == "." else word.replace("..", str(folder.parent)) for word in command]
    try:
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr
    finally:
        for name in ("indexed", "repacked"):
            shutil.rmtree(folder.with_name(name), ignore_errors=True)


def says_where_and_what_to_do(message, path):
    """Return whether a message names a file, says what is wrong with it, and then what to do."""
    return re.search(rf"{re.escape(path.name)}\b.*[;.,] \S+ \S+", message, re.DOTALL) is not None


def snapshot(folder):
    return {path: path.lstat() for path in sorted(folder.rglob("*"))}


@pytest.fixture
def damaged(whole, tmp_path):
    """Return what makes a dataset one of whose files has a fault: its folder and the file."""

    def make(fault, target):
        folder = Path(shutil.copytree(whole, tmp_path / "train"))
        path = next(folder.rglob(TARGETS[target]))
        fault(path)
        return folder, path

    return make


# Without its manifest a dataset is a folder of tars, and without a shard its folder has one tar less, which is what
# `index` is to make a dataset of: neither is a fault.
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
