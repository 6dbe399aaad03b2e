"""If a place cannot be written to: an error of shardkit that names it and says what to do, and no partial files."""

import copy
import ctypes
import errno
import os
import pickle
import re
import socket
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from shardkit.errors import StorageError
from tests.support.folders import contents_of
from tests.support.forks import forkserver
from tests.support.shared import without_rights

SAMPLES = [{"__key__": f"k/{i:04d}", "bin": os.urandom(900), "cls": i % 5} for i in range(60)]
PACK = {"shard_bytes": "20kB", "block_bytes": "4kB", "compression": "none", "num_workers": 1, "progress": False}
SERVER = forkserver(__name__)


def unchanged(sample):
    return sample


class Given(NamedTuple):
    """The input of the writers: the same samples as a dataset, as files and in memory."""

    dataset: Path
    files: Path
    samples: list


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("given") / "train", tmp_path_factory.mktemp("files")
    shardkit.pack(SAMPLES, folder, **PACK)
    for sample in SAMPLES:
        (files / f"{sample['__key__'][2:]}.bin").write_bytes(sample["bin"])
    return Given(folder, files, SAMPLES)


# The writers. Each is called with the input and the destination.


def by_pack(given, out):
    shardkit.pack(shardkit.FileFolder(given.files), out, **PACK)


def by_pack_of_an_iterable(given, out):
    shardkit.pack(iter(given.samples), out, **PACK)


def by_pack_with_transform(given, out):
    shardkit.pack(shardkit.FileFolder(given.files), out, transform=unchanged, **PACK)


def by_pack_of_splits(given, out):
    shardkit.pack(given.samples, out, splits={"train": 0.5, "val": 0.5}, **PACK)


def by_writer(given, out):
    with shardkit.ShardWriter(out, shard_bytes="20kB") as writer:
        for sample in given.samples:
            writer.write(sample)


def by_writer_that_goes_on(given, out):
    with shardkit.ShardWriter(out, shard_bytes="20kB", resume=True) as writer:
        for sample in given.samples[writer.samples :]:
            writer.write(sample)


def by_index(given, out):
    shardkit.index_shards(given.dataset, out=out)


def by_plot(given, out):
    shardkit.shuffle_report(given.dataset, 8).plot(f"{out}/a.svg")


def by_command(given, out):
    result = CliRunner().invoke(app, ["pack", str(given.files), str(out), "--compression", "none", "--workers", "1"])
    if result.exit_code == 2 and "error: " in result.stderr:
        raise shardkit.ShardkitError(result.stderr.partition("error: ")[2])
    if result.exception is not None:
        raise result.exception


WRITERS = [
    by_pack,
    by_pack_of_an_iterable,
    by_pack_with_transform,
    by_pack_of_splits,
    by_writer,
    by_index,
    by_plot,
    by_command,
]


def refusal(write, *args):
    """Return the message with which a writer refuses to write; None if it does not refuse."""
    try:
        write(*args)
    except shardkit.ShardkitError as error:
        return str(error)
    return None


# Places where nothing can be written. Each is made in an empty folder; the function returns the destination.


def in_a_file(folder):
    (folder / "place").write_bytes(b"mine")
    return folder / "place/train"


def over_a_file(folder):
    (folder / "place").write_bytes(b"mine")
    return folder / "place"


def over_a_fifo(folder):
    os.mkfifo(folder / "place")
    return folder / "place"


def over_a_socket(folder):
    here = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{here}/place")  # the path may be too long for it
    os.close(here)
    return folder / "place"


def over_a_device(folder):
    (folder / "place").symlink_to("/dev/null")
    return folder / "place"


def over_a_link_to_nothing(folder):
    (folder / "place").symlink_to("nothing")
    return folder / "place"


def over_a_link_to_itself(folder):
    (folder / "place").symlink_to("place")
    return folder / "place"


def under_a_long_name(folder):
    return folder / ("place" + 251 * "e")


def without_permission(folder):
    (folder / "place").mkdir()
    (folder / "place").chmod(0o555)
    return folder / "place/train"


def in_proc(_):
    return Path("/proc/place")


PLACES = [
    in_a_file,
    over_a_file,
    over_a_fifo,
    over_a_socket,
    over_a_device,
    over_a_link_to_nothing,
    over_a_link_to_itself,
    under_a_long_name,
    without_permission,
    in_proc,
]


@pytest.mark.parametrize("place", PLACES)
def test_where_nothing_can_be_written_every_writer_says_so_and_leaves_nothing(place, given, tmp_path):
    out, wrong = place(tmp_path), []
    before = [(path, path.lstat().st_mode, path.lstat().st_size) for path in sorted(tmp_path.rglob("*"))]
    for write in WRITERS:
        try:
            with without_rights():
                message = refusal(write, given, out)
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            wrong.append((write.__name__, repr(error)))
            continue
        if message is None or "place" not in message or not {";", "."} & set(message.partition("place")[2]):
            wrong.append((write.__name__, message))
        if [(path, path.lstat().st_mode, path.lstat().st_size) for path in sorted(tmp_path.rglob("*"))] != before:
            wrong.append((write.__name__, "has left something", sorted(tmp_path.rglob("*"))))

    assert wrong == []


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_refused_by_all_that_take_one(path, given, tmp_path):
    images, new = tmp_path / "images", tmp_path / "new"
    images.mkdir()
    (images / "a.jpg").write_bytes(b"")
    calls = [
        lambda: shardkit.ShardDataset(path),
        lambda: shardkit.ShardDataset(given.dataset, cache=path, cache_bytes="1MB"),
        lambda: shardkit.ShardStream(path),
        lambda: shardkit.ShardStream([given.dataset, path]),
        lambda: shardkit.ShardStream(f"{path}-{{0..3}}.tar"),
        lambda: shardkit.ShardStream(f"{path}*.tar"),
        lambda: shardkit.ShardSource(path),
        lambda: shardkit.ImageFolder(path),
        lambda: shardkit.ImageFolder(images, labels=f"{path}.csv"),
        lambda: shardkit.FileFolder(path),
        lambda: shardkit.read_manifest(path),
        lambda: shardkit.verify(path),
        lambda: shardkit.index_shards(path),
        lambda: shardkit.index_shards(given.dataset, out=new / path),
        lambda: shardkit.shuffle_report(path, 8),
        lambda: shardkit.shuffle_report(given.dataset, 8).plot(f"{path}.svg"),
        lambda: shardkit.pack(SAMPLES, new / path, **PACK),
        lambda: shardkit.pack(SAMPLES, new, splits={path: 1.0}, **PACK),
        lambda: shardkit.ShardWriter(new / path),
    ]
    for call in calls:
        with pytest.raises(shardkit.ArgumentError, match=r"a\\(x00|ud800)b"):
            call()
    assert not new.exists()


# Disks that are full or read-only. Each test runs in a process of its own, which mounts its own disk.


def mount(folder, options, flags=0):
    """Mount a file system in memory that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(mount, "is_apart"):
        uid, gid = os.getuid(), os.getgid()
        new_user, new_mounts = 0x10000000, 0x00020000
        assert libc.unshare(new_user | new_mounts) == 0, os.strerror(ctypes.get_errno())
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        mount.is_apart = True
    done = libc.mount(b"none", str(folder).encode(), b"tmpfs", flags, options.encode())
    assert done == 0, os.strerror(ctypes.get_errno())


def unmount(folder):
    assert ctypes.CDLL(None).umount2(str(folder).encode(), 2) == 0


def in_process(function, *args):
    """Run a function in a process of its own, and check that it succeeds."""
    process = SERVER.Process(target=told, args=(function, *args))
    process.start()
    process.join(120)
    process.kill()
    process.join()

    assert process.exitcode == 0


def told(function, *args):
    try:
        function(*args)
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


READ_ONLY = 1  # MS_RDONLY
REMOUNT = 32  # MS_REMOUNT


def write_to_read_only(given, folder):
    mount(folder, "size=1m")
    (folder / "place").mkdir()
    mount(folder, "size=1m", READ_ONLY | REMOUNT)
    for write in WRITERS:
        message = refusal(write, given, folder / "place/train")

        assert message is not None
        assert "place" in message
        assert "(Read-only file system); choose a folder on a disk that can be written to" in message, message


@pytest.mark.multiprocess
def test_a_disk_that_can_only_be_read_is_said_to_be_one(given, tmp_path):
    in_process(write_to_read_only, given, tmp_path)


PAGE = 4096
ROOM = 72  # pages: enough for all files written here, and for a spill in addition
FILLED = [by_pack, by_pack_with_transform, by_writer, by_index]


def write_to_full(write, given, folder):
    """Write to disks of every size; after each failure make room and continue."""
    mount(folder, f"size={4 * ROOM * PAGE}")
    write(given, folder / "train")
    expected = contents_of(folder)
    unmount(folder)
    failures, said = 0, 0
    for pages in range(1, ROOM, 3):
        mount(folder, f"size={pages * PAGE}")
        message = refusal(write, given, folder / "train")
        if message is not None:
            failures += 1
            said += re.search(r"\. The remaining shards have up to [\d.]+ KB\. Then run the same", message) is not None
            assert str(folder) in message
            assert "the disk is full (No space left on device); make room on it" in message
            assert "run the same pack again to continue" in message or write in (by_writer, by_index)
            assert not (folder / "train/manifest.json").exists()
            for name, data in contents_of(folder).items():  # no file with a final name is cut short
                assert name.endswith(("unfinished.json", ".segment")) or expected[name] == data, name
            mount(folder, f"size={4 * ROOM * PAGE}", REMOUNT)
            (by_writer_that_goes_on if write is by_writer else write)(given, folder / "train")
        assert contents_of(folder) == expected
        unmount(folder)
    assert 3 <= failures < len(range(1, ROOM, 3))
    assert (said > 0) == (write in (by_pack, by_pack_with_transform))


@pytest.mark.multiprocess
@pytest.mark.parametrize("write", FILLED)
def test_on_a_disk_of_any_size_all_is_written_or_the_error_says_what_to_do_and_it_goes_on(write, given, tmp_path):
    in_process(write_to_full, write, given, tmp_path)


def fill_temporary_folder(given, folder):
    tempfile.tempdir = str(folder)
    mount(folder, f"size={3 * PAGE}")
    message = refusal(by_writer, given, "memory://full/train")
    assert message is not None
    assert message.startswith(
        f"{folder} (TMPDIR, where memory://full/train/train-000000.tar waits until it is whole): "
    )
    assert "the disk is full" in message
    tempfile.tempdir = None
    os.environ["TMPDIR"] = "/proc/nowhere"
    tempfile._candidate_tempdir_list = lambda: ["/proc/nowhere"]  # as if /tmp were full too
    message = refusal(by_writer, given, "memory://none/train")
    assert message is not None
    assert message.startswith("TMPDIR: does not exist (No usable temporary directory found"), message


@pytest.mark.multiprocess
def test_a_temporary_folder_that_is_full_or_not_there_is_said_to_be_it(given, tmp_path):
    in_process(fill_temporary_folder, given, tmp_path)


def test_a_failure_of_the_system_keeps_its_number_and_says_it_in_other_processes_too(tmp_path):
    with pytest.raises(StorageError) as caught:
        shardkit.ShardWriter(f"{tmp_path}/{300 * 'e'}")
    for error in (caught.value, copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert error.errno == errno.ENAMETOOLONG
        assert str(error) == str(caught.value)
