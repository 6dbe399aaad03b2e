"""Samples that are read one by one from the system's page cache are the same as those of whole blocks."""

import errno
import gc
import os
import shutil
import threading
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.errors import DatasetError, ShardError, TruncatedShardError
from shardkit.packing.indexing import index_shards
from shardkit.reading import access
from shardkit.reading.block import Block
from shardkit.reading.memory import Buffers
from shardkit.reading.page_cache import OpenFile, ResidentBlock
from tests.support.shared import assert_same_batch, misplace, tar_of

COUNT = 60
BYTES = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8).tobytes()


def sample_of(i):
    sample = {
        "__key__": f"k/{i:03d}",
        "bin": BYTES[i : 20_000 + 317 * i],
        "cls": i,
        "npy": np.full((50, 50), i, np.float64),
    }
    if i % 7 == 3:
        del sample["npy"]
    if i % 5 == 1:
        sample["aaa"] = b""  # this field comes before all others
    return sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a dataset of large samples."""
    folder = tmp_path_factory.mktemp("resident") / "large"
    options = {"shard_samples": 25, "block_bytes": 130_000, "compression": "none", "progress": False, "shuffle": False}
    shardkit.pack(map(sample_of, range(COUNT)), folder, columns={"label": "cls"}, **options)
    return folder


@pytest.fixture
def opened(monkeypatch):
    """Make all blocks seem to be in memory, and return a list of those that are opened instead of read."""
    opened, open_block = [], ShardDataset.open_block

    def note(self, *place):
        block = open_block(self, *place)
        opened.append(isinstance(block, ResidentBlock))
        return block

    monkeypatch.setattr(ShardDataset, "open_block", note)
    monkeypatch.setattr(OpenFile, "is_resident", lambda *_: True)  # some file systems do not report it
    return opened


def epochs(folder, fields, *, count=1, loader=None, **options):
    """Return the batches of some epochs."""
    made = ShardLoader(ShardDataset(folder, fields=fields, **options), 7, **loader or {})
    batches = [batch for _ in range(count) for batch in made]
    made.close()
    return batches


@pytest.mark.parametrize(
    "fields", [None, ("bin",), {"data": "bin", "label": "cls"}, ("bin", "npy?", "aaa?"), {"none": "there;is;none?"}]
)
@pytest.mark.parametrize("options", [{}, {"decode": False}, {"columns": ("label",), "decode": False}])
@pytest.mark.parametrize("loader", [{}, {"shuffle": False, "num_workers": 1, "memory": "1MB"}, {"drop_last": True}])
def test_they_are_the_samples_of_whole_blocks(folder, opened, monkeypatch, fields, options, loader):
    if fields is None:
        loader = {"collate_fn": list, **loader}  # arrays that some samples lack cannot be batched
    if "columns" in options and isinstance(fields, dict):
        options = {"decode": False}  # the column would have the name of a field
    found = epochs(folder, fields, count=2, loader=loader, **options)
    assert all(opened)
    monkeypatch.setattr(access, "_LARGE_BYTES", 1 << 40)
    del opened[:]
    expected = epochs(folder, fields, count=2, loader=loader, **options)

    assert opened
    assert not any(opened)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, list):
            assert [list(sample) for sample in ours] == [list(sample) for sample in theirs]
        else:
            assert_same_batch(ours, theirs)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_each_comes_once_with_its_own_bytes(folder, opened, worker_type):
    batches = epochs(folder, ("bin",), decode=False, loader={"worker_type": worker_type, "transform": dict})
    found = {key: data for batch in batches for key, data in zip(batch["__key__"], batch["bin"], strict=True)}

    assert all(opened)
    assert found == {f"k/{i:03d}": sample_of(i)["bin"] for i in range(COUNT)}


def test_whole_blocks_are_read_of_small_samples_compressed_shards_and_into_caches(folder, opened, tmp_path):
    small, compressed = tmp_path / "small", tmp_path / "compressed"
    shardkit.pack(({"__key__": str(i), "txt": "a" * 900} for i in range(50)), small, progress=False, compression="none")
    shardkit.pack(map(sample_of, range(9)), compressed, progress=False, compression="zst")

    assert sum(len(batch["txt"]) for batch in epochs(small, ("txt",))) == 50
    assert sum(len(batch["bin"]) for batch in epochs(compressed, ("bin",))) == 9
    assert len(epochs(folder, ("bin",), cache=tmp_path / "cache", cache_bytes="1GB")) == 9
    assert opened
    assert not any(opened)


def test_a_part_of_a_file_is_in_memory_once_it_was_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(4_000_000))
    file = OpenFile(str(path))
    os.fsync(file.descriptor)
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    evicted = file.is_resident(1_000_000, 2_000_000)
    path.read_bytes()
    try:
        os.preadv(file.descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        assert not file.is_resident(1_000_000, 2_000_000)  # this file system does not report it
    else:
        assert file.is_resident(1_000_000, 2_000_000)
        assert file.is_resident(17, 1)
        assert not file.is_resident(3_500_000, 600_000)  # the file ends before that
    assert not evicted


def test_what_is_not_in_memory_is_read_ahead(folder, monkeypatch):
    monkeypatch.setattr(OpenFile, "is_resident", lambda *_: False)

    assert isinstance(ShardDataset(folder, fields=("bin",)).open_block(0, 0, Buffers(0)), Block)


def test_no_more_files_are_open_than_are_allowed(tmp_path, opened, monkeypatch):
    options = {"shard_samples": 2, "compression": "none", "progress": False}
    shardkit.pack(map(sample_of, range(COUNT)), tmp_path / "many", **options)
    monkeypatch.setattr(access, "_FILES", 3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    dataset = ShardDataset(tmp_path / "many", fields=("bin",), decode=False)
    counts, keys = [], []
    for batch in ShardLoader(dataset, 7):
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        keys += batch["__key__"]

    assert all(opened)
    assert sorted(keys) == [f"k/{i:03d}" for i in range(COUNT)]
    assert max(counts) <= before + 3 + 4  # those that two threads are fetching and two are reading
    del dataset
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def damage(shard, at):
    data = shard.read_bytes()
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 4]))


@pytest.fixture
def copied(folder, tmp_path):
    """Return a copy of the dataset that may be damaged."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_damage_costs_the_sample_that_has_it(copied, opened):
    dataset = ShardDataset(copied, fields=("bin",), decode=False)
    offset, size, _ = (int(part[7]) for part in dataset._access.indexes.rows(1, 0).members["bin"])
    shard = next(copied.glob("*-000001.tar"))
    damage(shard, offset + size - 1)

    with pytest.raises(ShardError, match=rf"{shard.name}: field 'bin' of sample 'k/027' at byte {offset:,}") as error:
        epochs(copied, ("bin",), decode=False)
    assert (error.value.url, error.value.key, error.value.field, error.value.offset) == (
        str(shard),
        "k/027",
        "bin",
        offset,
    )
    loader = ShardLoader(dataset, 7, on_error="skip")
    assert sorted(key for batch in loader for key in batch["__key__"]) == [
        f"k/{i:03d}" for i in range(COUNT) if i != 27
    ]
    assert loader.skipped == 1
    assert all(opened)


def test_damage_that_was_none_is_read_again(copied, opened, monkeypatch):
    """Memory, or a remote file system, may return wrong bytes once."""
    wrong, pread = [], os.pread

    def wrong_once(descriptor, size, offset):
        data = pread(descriptor, size, offset)
        if size > 10_000 and not wrong:
            wrong.append(offset)
            return bytes(len(data))
        return data

    monkeypatch.setattr(os, "pread", wrong_once)
    batches = epochs(copied, ("bin",), decode=False)

    assert wrong
    assert all(opened)
    assert {k: d for b in batches for k, d in zip(b["__key__"], b["bin"], strict=True)} == {
        f"k/{i:03d}": sample_of(i)["bin"] for i in range(COUNT)
    }


class Gate(threading.Event):
    """A transform that lets the first two samples pass, and the others once it is set."""

    def __call__(self, sample):
        assert sample["__key__"] in ("k/000", "k/001") or self.wait(60)
        return sample


def test_a_shard_that_is_cut_while_it_is_open_is_an_error(copied, opened):
    gate = Gate()
    dataset = ShardDataset(copied, fields=("bin",), decode=False)
    batches = iter(ShardLoader(dataset, 2, shuffle=False, transform=gate))
    next(batches)
    os.truncate(next(copied.glob("*-000000.tar")), 300_000)
    gate.set()

    with pytest.raises(TruncatedShardError, match=r"000000\.tar: "):
        list(batches)
    assert all(opened)


@pytest.fixture
def tagged(tmp_path):
    """Return a dataset with a field whose CRC-32 is that of zero bytes, and that field."""
    tag = b"\x9d\x0a\xd9\x6d"
    assert zlib.crc32(tag) == zlib.crc32(b"") == 0
    shardkit.pack([{"__key__": "a", "bin": BYTES, "tag": tag}], tmp_path / "a", compression="none", progress=False)
    return ShardDataset(tmp_path / "a", fields=("tag",), decode=False), tag


def test_a_field_that_was_cut_off_is_never_read_as_nothing(tagged, opened, tmp_path):
    block = tagged[0].open_block(0, 0, Buffers(0))
    os.truncate(next(tmp_path.glob("a/*.tar")), 1000)

    assert opened == [True]
    with pytest.raises(TruncatedShardError):
        block.sample(0)


def test_a_field_that_cannot_be_read_at_first_is_never_read_as_nothing(tagged, opened, monkeypatch):
    dataset, tag = tagged
    block = dataset.open_block(0, 0, Buffers(0))
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))

    assert opened == [True]
    assert block.sample(0)["tag"] == tag


def test_a_shard_that_is_replaced_while_it_is_open_stays_what_it_was(copied, opened):
    gate = Gate()
    dataset = ShardDataset(copied, fields=("bin",), decode=False)
    batches = iter(ShardLoader(dataset, 2, shuffle=False, transform=gate))
    keys = list(next(batches)["__key__"])
    (copied / "new").write_bytes(bytes(10_000_000))
    (copied / "new").replace(next(copied.glob("*-000000.tar")))
    gate.set()
    keys += [key for batch in batches for key in batch["__key__"]]

    assert keys == [f"k/{i:03d}" for i in range(COUNT)]
    assert all(opened)


def test_fields_come_in_the_order_in_which_they_lie(tmp_path, opened):
    members = [(f"{i}.{field}", BYTES[i:]) for i in range(3) for field in ("z", "b", "a")[i:]]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    index_shards(tmp_path)
    batches = ShardLoader(ShardDataset(tmp_path, decode=False), 1, shuffle=False, collate_fn=list)

    assert [[name for name in sample if len(name) == 1] for (sample,) in batches] == [
        ["z", "b", "a"],
        ["b", "a"],
        ["a"],
    ]
    assert all(opened)


@pytest.mark.parametrize(("part", "value"), [(0, 0), (0, 1 << 60), (1, 1 << 60), (1, -1)])
def test_a_field_that_cannot_be_where_its_index_says_is_an_error(folder, opened, part, value):
    dataset = ShardDataset(folder, fields=("bin",))
    misplace(dataset, "bin", part, value)

    with pytest.raises(
        DatasetError, match=r"large-000001\.[0-9a-f]{16}\.parquet: is damaged \(sample 'k/027' is not in its block\)"
    ):
        list(ShardLoader(dataset, 7))
    assert any(opened)
