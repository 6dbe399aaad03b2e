"""Arguments that are wrong are errors when they are given, whose message says what was expected."""

import numpy as np
import pytest

from shardkit.errors import ArgumentError, DatasetError, check_whole
from shardkit.pack import pack
from shardkit.storage import LocalStorage, parse_bytes, storage_for
from shardkit.stream import ShardStream
from shardkit.work import Workers
from shardkit.writer import ShardWriter

SAMPLES = [{"__key__": f"{i:02d}", "cls": i} for i in range(20)]


@pytest.fixture
def dataset(tmp_path):
    pack(SAMPLES, tmp_path / "digits", shard_samples=5, compression="none", progress=False)
    return tmp_path / "digits"


def labels(stream):
    return [sample["cls"] for sample in stream]


@pytest.mark.parametrize("value", [1.5, "one", None, np.float64(2.0), b"two"])
def test_what_is_no_whole_number_is_an_error_that_names_it(value, dataset, tmp_path):
    with pytest.raises(ArgumentError, match="seed must be a whole number, got"):
        ShardStream(dataset, seed=value)
    with pytest.raises(ArgumentError, match="buffer_size must be a whole number, got"):
        ShardStream(dataset, buffer_size=value)
    with pytest.raises(ArgumentError, match="epoch must be a whole number, got"):
        ShardStream(dataset).set_epoch(value)
    if value is not None:
        with pytest.raises(ArgumentError, match="batch_size must be a whole number, got"):
            ShardStream(dataset, batch_size=value)
        with pytest.raises(ArgumentError, match="num_workers must be a whole number, got"):
            Workers(num_workers=value)
        with pytest.raises(ArgumentError, match="shard_samples must be a whole number, got"):
            ShardWriter(tmp_path / "new", shard_samples=value)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_numpys_whole_numbers_are_as_good_as_pythons(kind, dataset, tmp_path):
    def order(seed):
        return labels(ShardStream(dataset, seed=seed, buffer_size=kind(3), open_shards=kind(2)))

    new = pack(SAMPLES, tmp_path / "new", shard_samples=kind(7), block_bytes=kind(100), progress=False)

    assert order(kind(7)) == order(7)
    assert len(new["new"].shards) == 3
    assert type(check_whole("n", kind(3))) is int
    assert parse_bytes(kind(100)) == 100


@pytest.mark.parametrize("size", ["9" * 30, 2**60 + 1, True, 0, 1.5, None, "10000000 TB"])
def test_a_size_that_cannot_be_one_is_an_error(size):
    with pytest.raises(ArgumentError, match="is not a size"):
        parse_bytes(size)


@pytest.mark.parametrize("decode", ["rgb", "pil", 3, None])
def test_decode_is_true_false_or_a_decoder(decode, dataset):
    with pytest.raises(ArgumentError, match=r"decode is .*, expected True, False or a Decoder"):
        ShardStream(dataset, decode=decode)


@pytest.mark.parametrize("transform", [3, "flip", {"cls": 3}, ["flip"]])
def test_a_transform_that_cannot_be_called_is_not_left_out_in_silence(transform, dataset):
    with pytest.raises(ArgumentError, match=r"transform is .*, expected a function, or a mapping"):
        ShardStream(dataset, transform=transform)


@pytest.mark.parametrize("name", ["C:\\data", "a:b", "-x", "a\0b", b"bytes"])
def test_a_destination_whose_shards_could_not_be_named_is_refused_before_anything_is_written(name, tmp_path):
    destination = name if isinstance(name, bytes) else f"{tmp_path}/{name}"

    with pytest.raises(ArgumentError, match=r"destination .*: has no name that shards could be called by"):
        pack(SAMPLES, destination, progress=False)

    assert list(tmp_path.iterdir()) == []


def test_a_name_with_nul_is_said_to_be_none():
    with pytest.raises(ArgumentError, match=r"'a\\x00b': no file's name has a NUL"):
        storage_for("a\0b")


def test_a_split_without_samples_is_said_to_have_none(tmp_path):
    pack(SAMPLES[:1], tmp_path, splits={"train": 0.999999, "val": 0.000001}, progress=False)

    with pytest.raises(DatasetError, match="val: has no shards, because it was packed without samples"):
        ShardStream(tmp_path / "val")


def test_a_full_disk_says_which_file_did_not_fit(tmp_path):
    def write():
        with LocalStorage().create(f"{tmp_path}/a.tar"):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.tar'"):
        write()
    assert list(tmp_path.iterdir()) == []
