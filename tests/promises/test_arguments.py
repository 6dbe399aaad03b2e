"""Arguments that are wrong are errors when they are given, whose message says what was expected."""

import inspect
import os
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import ArgumentError, check_whole
from shardkit.format.manifest import read_manifest
from shardkit.inspection.verification import verify
from shardkit.loading.stream import ShardStream
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.packing.workers import Workers
from shardkit.packing.writer import ShardWriter
from shardkit.sources.shards import ShardSource
from shardkit.storage.base import parse_bytes
from shardkit.storage.local import LocalStorage
from shardkit.storage.registry import storage_for

SAMPLES = [{"__key__": f"{i:02d}", "cls": i} for i in range(20)]


@pytest.fixture
def dataset(tmp_path):
    pack(SAMPLES, tmp_path / "digits", shard_samples=5, compression="none", progress=False)
    return tmp_path / "digits"


@pytest.mark.parametrize("transform", [{"lable": str}, {("label", "lable"): dict}, {"label": str, "cls": str}])
@pytest.mark.parametrize("fields", [None, {"label": "cls"}])
def test_a_function_for_a_field_that_there_is_not_is_refused_before_anything_is_read(transform, fields, dataset):
    if fields is None:
        transform = {"lable": str}
    where = "label" if fields else "cls"
    calls = [
        lambda: shardkit.ShardDataset(dataset, fields=fields, transform=transform),
        lambda: shardkit.ShardLoader(shardkit.ShardDataset(dataset, fields=fields), 4, transform=transform),
    ]
    calls += [lambda: ShardStream(dataset, fields=fields, transform=transform)] if fields else []
    for call in calls:
        with pytest.raises(ArgumentError, match=rf"has a function for '(lable|cls)', and the fields are {where}$"):
            call()


def test_what_a_function_of_the_sample_adds_may_have_a_function(dataset):
    added = shardkit.ShardDataset(dataset, transform=lambda sample: sample | {"twice": 2 * sample["cls"]})
    loader = shardkit.ShardLoader(added, 20, transform={"twice": lambda value: value + 1})

    assert sorted(next(iter(loader))["twice"].tolist()) == [2 * i + 1 for i in range(20)]


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


@pytest.mark.parametrize("name", ["C:\\data", "a:b", "-x"])
def test_a_destination_whose_shards_could_not_be_named_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(ArgumentError, match=r"destination .*: has no name that can be used for shards"):
        pack(SAMPLES, f"{tmp_path}/{name}", progress=False)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("destination", [3, None, b"bytes", ["folder"]])
def test_a_destination_that_is_no_path_is_refused(destination):
    for write in (ShardWriter, lambda destination: pack(SAMPLES, destination, progress=False)):
        with pytest.raises(ArgumentError, match="destination must be text or a path, got"):
            write(destination)


def test_an_empty_text_is_no_path(tmp_path):
    for call in (ShardWriter, lambda path: pack(SAMPLES, path, progress=False), read_manifest, verify):
        with pytest.raises(ArgumentError, match=r"is empty, expected a path; the current folder is written '\.'"):
            call("")
    for urls in ("", [tmp_path, ""]):
        with pytest.raises(ArgumentError, match=r"urls.* is empty, expected a path"):
            ShardStream(urls)


@pytest.mark.parametrize("classes", [3, "cat", [3], b"dog"])
def test_classes_that_are_no_texts_are_refused(classes, dataset, tmp_path):
    with pytest.raises(ArgumentError, match="classes must be a sequence of texts, got"):
        ShardWriter(tmp_path / "new", classes=classes)
    with pytest.raises(ArgumentError, match="classes must be a sequence of texts, got"):
        index_shards(dataset, classes=classes)
    assert not (tmp_path / "new").exists()


PUBLIC = {name: getattr(shardkit, name) for name in shardkit.__all__ if name != "StreamWarning"}
TAKES_OPTIONS = [
    name for name, call in PUBLIC.items() if callable(call) and "storage_options" in inspect.signature(call).parameters
]


@pytest.mark.parametrize("options", [3, "key=SECRET", ["key"], [("key", "SECRET")], 0, "", {3: "SECRET"}])
@pytest.mark.parametrize("name", TAKES_OPTIONS)
def test_storage_options_that_are_no_mapping_of_names_are_refused_and_not_shown(name, options, dataset, tmp_path):
    others = {"pack": (SAMPLES, tmp_path / "new"), "ShardWriter": (tmp_path / "new",), "shuffle_report": (dataset, 8)}

    with pytest.raises(ArgumentError, match="storage_options must be a mapping of names to values, got") as caught:
        PUBLIC[name](*others.get(name, (dataset,)), storage_options=options)
    assert "SECRET" not in str(caught.value)


def test_a_name_with_nul_is_said_to_be_none():
    with pytest.raises(ArgumentError, match=r"'a\\x00b': no file's name has a NUL"):
        storage_for("a\0b")


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_full_disk_says_which_file_did_not_fit(tmp_path, size):
    def write():
        with LocalStorage().create(f"{tmp_path}/a.tar") as file, Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), file.fileno())
            file.write(bytes(size))  # a little is kept until the file is closed

    with pytest.raises(
        OSError, match=r"a\.tar: cannot be written, because the disk is full \(No space left on device\); make room"
    ):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("urls", [3, None, b"a.tar", {"a.tar": 1}, {"a.tar", "b.tar"}])
def test_what_names_no_shards_is_refused_by_what_it_is(urls, tmp_path):
    for call in (ShardStream, ShardSource, lambda urls: index_shards(urls, out=tmp_path / "out")):
        with pytest.raises(ArgumentError, match="urls must be text, a path, or a list of these, got"):
            call(urls)
        with pytest.raises(ArgumentError, match=r"urls\[1\] must be text or a path, got"):
            call(["a.tar", urls])
    for call in (verify, read_manifest):
        with pytest.raises(ArgumentError, match="url must be text or a path, got"):
            call(urls)


def test_paths_that_are_bytes_are_refused():
    class BytesPath:
        def __fspath__(self):
            return b"a.tar"

    with pytest.raises(ArgumentError, match="urls must be text or a path"):
        ShardStream(BytesPath())


@pytest.mark.parametrize("fields", [3, b"jpg", [3], [None], {"a": 3}, {3: "jpg"}])
def test_fields_that_are_no_text_are_refused(fields, dataset):
    with pytest.raises(ArgumentError, match="fields must be a sequence or a mapping of text, got"):
        ShardStream(dataset, fields=fields)


@pytest.mark.parametrize("value", [2**63, 2**70])
def test_counts_beyond_what_can_be_counted_are_errors(value, dataset):
    with pytest.raises(ArgumentError, match="epoch must be less than 9223372036854775807, got"):
        ShardStream(dataset).set_epoch(value)
    for name in ("batch_size", "buffer_size", "open_shards"):
        with pytest.raises(ArgumentError, match=f"{name} must be less than"):
            ShardStream(dataset, **{name: value})

    assert len(labels(ShardStream(dataset, seed=value))) == len(SAMPLES)
    stream = ShardStream(dataset)
    stream.set_epoch(2**63 - 2)
    assert len(labels(stream)) == len(SAMPLES)


@pytest.mark.parametrize("value", [True, np.array([1, 2]), np.array(1.0)])
def test_what_is_no_number_is_not_taken_for_one(value, dataset):
    with pytest.raises(ArgumentError, match="batch_size must be a whole number, got"):
        ShardStream(dataset, batch_size=value)


@pytest.mark.parametrize("rank", [1.5, [], None])
def test_a_rank_that_is_no_number_is_refused(rank, dataset):
    with pytest.raises(ArgumentError, match="rank"):
        ShardStream(dataset, rank=rank, world_size=3)


@pytest.mark.parametrize(
    "splits",
    [
        *[{"train": "0.9", "val": "0.1"}, {"train": -1, "val": 2}, {"train": float("nan"), "val": 1}, {"train": None}],
        *[{"a": [1]}, {"a": 1j}, {"a": float("inf")}, {"a": 0.5}, {"a": 1.0, "b": 0}, {}, ["train"], 0.9, "train"],
    ],
)
def test_splits_that_are_no_shares_are_refused(splits, tmp_path):
    with pytest.raises(ArgumentError, match="splits: expected positive shares that add up to 1"):
        pack(SAMPLES, tmp_path / "new", splits=splits, progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a:b", "a\\b", "a\0", 3, b"a"])
def test_a_split_whose_shards_could_not_be_named_is_refused(name, tmp_path):
    with pytest.raises(ArgumentError, match=r"splits: .* cannot be the name of a folder and its shards"):
        pack(SAMPLES, tmp_path / "new", splits={name: 1.0}, progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("source", ["photos", b"other", bytearray(b"x"), memoryview(b"x"), 3, None, {"a": 1}])
def test_what_is_no_source_is_refused_at_once(source, tmp_path):
    with pytest.raises(ArgumentError, match=r"source is .*, expected ImageFolder or another source, or samples"):
        pack(source, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": 3}, "transform is 3, expected a function"),
        ({"split_by": 3, "splits": {"a": 1.0}}, "split_by is 3, expected a function"),
        ({"split_by": str}, "split_by is given and splits is not; pass splits too"),
        ({"columns": ["cls"]}, r"columns is \['cls'\], expected a mapping"),
        ({"compression": None}, "compression None is not known"),
        ({"executor": 3}, "executor is 3, expected one of concurrent.futures"),
    ],
)
def test_wrong_arguments_of_a_pack_say_what_was_expected(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        pack(SAMPLES, tmp_path / "new", progress=False, **options)
    assert not (tmp_path / "new").exists()
