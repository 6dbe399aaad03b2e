"""Two packs never mix in one folder, and a pack never destroys its source; a killed pack does not block others."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from shardkit.errors import ArgumentError, DatasetExistsError, SourceError
from shardkit.packing.job import pack
from shardkit.packing.lock import exclusive
from shardkit.sources.folders import FileFolder, ImageFolder
from shardkit.sources.shards import ShardSource
from tests.support.folders import contents_of, temporary_files


def hold(folder, ready):
    with exclusive([folder]):
        ready.set()
        signal.pause()


def test_a_second_pack_into_a_folder_is_refused_while_the_first_is_at_work(tmp_path):
    begun, go_on = threading.Event(), threading.Event()
    errors = []

    def slow():
        begun.set()
        go_on.wait(60)
        yield {"__key__": "a", "txt": b"first"}

    first = threading.Thread(target=pack, args=(slow(), tmp_path / "packed"), kwargs={"progress": False})
    first.start()
    begun.wait(60)
    try:
        pack([{"__key__": "b", "txt": b"second"}], tmp_path / "packed", progress=False)
    except DatasetExistsError as error:
        errors.append(str(error))
    finally:
        go_on.set()
        first.join()

    assert "is being packed by another process" in errors[0]
    assert ShardSource(tmp_path / "packed").listed().key(0) == "a"
    assert temporary_files(tmp_path / "packed") == []


def live_on(begun):
    begun.set()  # by now the child has released what it releases at its start
    signal.pause()


def hold_with_a_child(folder, ready):
    with exclusive([folder]):
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        child = fork.Process(target=live_on, args=(begun,))
        child.start()
        begun.wait(60)
        Path(f"{folder}.child").write_text(str(child.pid))
        ready.set()
        signal.pause()


@pytest.mark.multiprocess
@pytest.mark.parametrize("hold", [hold, hold_with_a_child])
def test_a_killed_pack_keeps_nobody_out(tmp_path, hold):
    folder = tmp_path / "packed"
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    holder = spawn.Process(target=hold, args=(str(folder), ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(DatasetExistsError), exclusive([str(folder)]):
        pass

    os.kill(holder.pid, signal.SIGKILL)
    holder.join()

    try:
        with exclusive([str(folder)]):
            pass
        assert list(folder.iterdir()) == []
    finally:
        for child in tmp_path.glob("*.child"):  # the child is still running
            os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_folder_that_was_made_for_nothing_is_taken_away(tmp_path):
    with exclusive([str(tmp_path / "a" / "b")]):
        assert (tmp_path / "a" / "b").is_dir()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", ["none", "zst"])
def test_a_dataset_is_not_packed_onto_itself(tmp_path, compression):
    pack([{"__key__": "a", "txt": b"1"}], tmp_path / "packed", compression=compression, progress=False)
    before = contents_of(tmp_path / "packed")
    (tmp_path / "link").symlink_to(tmp_path / "packed")

    for source in (tmp_path / "packed", tmp_path / "link"):
        with pytest.raises(ArgumentError, match="is where the samples are read from; choose another folder"):
            pack(ShardSource(source), tmp_path / "packed", overwrite=True, seed=1, progress=False)

    assert contents_of(tmp_path / "packed") == before


def test_files_are_not_packed_into_their_own_folder(tmp_path):
    (tmp_path / "a.txt").write_text("1")

    with pytest.raises(ArgumentError, match="is where the samples are read from; choose another folder"):
        pack(FileFolder(tmp_path), tmp_path / "below" / "packed", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("a.jpg,0\nb.jpg,\n", "line 3"),
        ("a.jpg,0\nb.jpg,cat\n", "not all labels are whole numbers"),
        ("a.jpg,0.0\nb.jpg,1.0\n", "not all labels are whole numbers"),
        ("a.jpg,0\nb.jpg,NaN\n", "not all labels are whole numbers"),
        ("a.jpg,0\na.jpg,1\n", "line 3"),
    ],
)
def test_labels_that_would_be_numbered_anew_are_refused(tmp_path, rows, fault):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "labels.csv").write_text("path,label\n" + rows)

    with pytest.raises(SourceError, match=fault):
        ImageFolder(tmp_path, labels=tmp_path / "labels.csv")


@pytest.mark.parametrize("text", ["path,label\na.jpg,é\n".encode("latin-1"), b"path,label\n" + b"x" * 200_000])
def test_a_table_of_labels_that_cannot_be_read_is_an_error_of_ours(tmp_path, text):
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "labels.csv").write_bytes(text)

    with pytest.raises(SourceError, match="is not a CSV file in UTF-8"):
        ImageFolder(tmp_path, labels=tmp_path / "labels.csv")


def test_patients_may_be_numbers(tmp_path):
    samples = [{"__key__": f"{i % 10}-{i}", "cls": 0} for i in range(50)]

    packed = pack(
        samples,
        tmp_path / "p",
        splits={"a": 0.5, "b": 0.5},
        split_by=lambda key: int(key[0]),
        compression="none",
        progress=False,
    )

    keys = {name: {s["__key__"][0] for s in ShardSource(tmp_path / "p" / name)} for name in packed}
    assert not keys["a"] & keys["b"]
