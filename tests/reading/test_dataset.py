"""However samples are requested, a dataset returns each as it was packed, or an error that says where it is damaged."""

import io
import pickle
import re
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardkit.codecs.registry import Decoder
from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    SampleError,
    ShardError,
    TruncatedShardError,
    UnfinishedDatasetError,
)
from shardkit.loading.loader import ShardLoader
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.reading import access
from shardkit.reading import index_cache as indexes
from shardkit.reading.dataset import ShardDataset
from shardkit.storage.local import LocalStorage
from tests.support.forge import index_of, index_path, rewrite_index
from tests.support.shared import examples

COUNT = 203


def sample_of(i):
    """Return a sample: each has cls and txt, and some also have json or a large bin."""
    sample = {"__key__": f"k/{i:04d}", "cls": i, "txt": f"text {i} " * (i % 7 + 1)}
    if i % 3 == 0:
        sample["json"] = {"n": i}
    if i % 5 == 0:
        sample["bin"] = bytes([i % 256]) * (900 + i)
    return sample


SAMPLES = [sample_of(i) for i in range(COUNT)]
COLUMNS = {
    "label": lambda sample: sample["cls"] % 10,
    "width": lambda sample: sample["cls"] / 4 if sample["cls"] % 3 == 0 else None,
    "late": lambda sample: sample["cls"] if sample["cls"] > 150 else None,  # null in all samples of the first shards
}


def pack_samples(folder, compression="none", samples=SAMPLES, **options):
    options = {"shard_samples": 50, "block_bytes": 9000, "columns": COLUMNS, **options}
    pack(samples, folder, compression=compression, shuffle=False, progress=False, **options)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return {compression: pack_samples(folder / compression, compression) for compression in ("none", "zst")}


@pytest.fixture(params=["none", "zst"])
def folder(request, folders):
    return folders[request.param]


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def without_url(sample):
    assert re.search(r"-00000[0-9]\.tar(\.zst)?\Z", sample["__url__"])
    return {name: value for name, value in sample.items() if name != "__url__"}


def read(dataset, index=slice(None)):
    return [without_url(sample) for sample in dataset[index]]


def numbers(dataset):
    return [sample["cls"] for sample in dataset]


@pytest.fixture
def ranges(monkeypatch):
    """Return a list of the ranges that are read from files: (name, start, size)."""
    seen = []

    def remember(name, size_of):
        honest = getattr(LocalStorage, name)

        def read(self, url, start, what, *, fresh=False):
            if not url.endswith((".json", ".parquet", ".npy")):
                seen.append((url.rpartition("/")[2], start, size_of(what)))
            return honest(self, url, start, what, fresh=fresh)

        monkeypatch.setattr(LocalStorage, name, read)

    remember("read_range", int)
    remember("read_into", len)
    return seen


def test_every_sample_is_what_was_packed(folder):
    dataset = ShardDataset(folder)

    assert len(dataset) == COUNT
    assert read(dataset) == SAMPLES
    assert dataset.keys() == [sample["__key__"] for sample in SAMPLES]
    assert len({sample["__url__"] for sample in dataset}) == len(dataset.manifest.shards) == 5


@given(data=st.data())
@examples(0.6)
def test_it_is_indexed_as_a_list(folders, data):
    dataset = ShardDataset(folders[data.draw(st.sampled_from(["none", "zst"]))], fields=("cls",))
    expected = list(range(COUNT))
    ends = st.none() | st.integers(-COUNT - 5, COUNT + 5)
    part = slice(data.draw(ends), data.draw(ends), data.draw(st.none() | st.sampled_from([-7, -1, 1, 2, 60])))
    number = data.draw(st.integers(-COUNT, COUNT - 1))
    kind = data.draw(st.sampled_from([int, np.int64, np.int16, np.array]))

    assert [sample["cls"] for sample in dataset[part]] == expected[part]
    assert dataset[kind(number)]["cls"] == expected[number]


@pytest.mark.parametrize("number", [COUNT, -COUNT - 1, 1 << 70])
def test_a_number_beyond_the_end_is_an_index_error(number, folders):
    with pytest.raises(IndexError, match=rf"has no sample {number:,}, it has 203"):
        ShardDataset(folders["none"])[number]


@pytest.mark.parametrize("index", [1.0, "k/0001", [1, 2], np.array([1, 2]), None])
def test_what_is_no_index_is_an_error_that_says_what_to_do(index, folders):
    with pytest.raises(ArgumentError, match=r"must be a whole number or a slice, got .*subset\(\).*batch_sampler="):
        ShardDataset(folders["none"])[index]


def test_only_the_bytes_of_the_fields_asked_for_are_read(folders, ranges):
    dataset = ShardDataset(folders["none"], fields={"text": "json;txt", "label": "cls"}, decode=False)
    sample = dataset[100]

    assert without_url(sample) == {"__key__": "k/0100", "text": b"text 100 " * 3, "label": b"100"}
    assert [size for _, _, size in ranges] == [3, 27]
    assert {name for name, _, _ in ranges} == {"none-000002.tar"}


def test_of_a_compressed_shard_one_block_is_read_once(folders, ranges):
    dataset = ShardDataset(folders["zst"])
    block_samples = dataset.manifest.block_samples
    assert 1 < block_samples < 25

    read(dataset, slice(block_samples))
    assert len(ranges) == 1
    dataset[block_samples]
    assert len(ranges) == 2


def test_fields_are_picked_named_and_decoded_as_a_stream_does(folder):
    dataset = ShardDataset(folder, fields={"meta": "json?", "label": "cls"})

    assert read(dataset, slice(2, 4)) == [
        {"__key__": "k/0002", "meta": None, "label": 2},
        {"__key__": "k/0003", "meta": {"n": 3}, "label": 3},
    ]
    assert ShardDataset(folder, decode=False)[3]["json"] == b'{"n":3}'
    with pytest.raises(SampleError, match="sample 'k/0001': has no field json") as error:
        ShardDataset(folder, fields=("json",))[1]
    assert error.value.key == "k/0001"


def test_a_field_that_no_sample_has_is_an_error_at_once(folders):
    with pytest.raises(ArgumentError, match=r"fields: no sample of .* has jpg or png; there are bin, cls, json, txt"):
        ShardDataset(folders["none"], fields={"image": "jpg;png"})

    assert ShardDataset(folders["none"], fields={"image": "jpg;png?", "cls": "cls"})[0]["image"] is None


def test_what_cannot_be_decoded_is_an_error_that_says_where(tmp_path):
    pack_samples(tmp_path / "d", samples=[{"__key__": "a", "cls": b"seven"}], columns=None)

    with pytest.raises(CodecError, match=r"d-000000\.tar, sample 'a', field 'cls' cannot be decoded") as error:
        ShardDataset(tmp_path / "d")[0]
    assert (error.value.key, error.value.field) == ("a", "cls")


def test_a_transform_makes_the_sample_and_draws_the_same_every_time(folders):
    drawn = ShardDataset(folders["none"], fields=("cls",), transform={"cls": lambda value, rng: (value, rng.bits())})
    whole = ShardDataset(folders["none"], transform=lambda sample: sample["cls"] + 1000)

    assert drawn[3] == drawn[3]
    assert len({drawn[i]["cls"][1] for i in range(20)}) == 20
    assert whole[-1] == 1202


def test_index_columns_come_with_samples_and_with_blocks(folder):
    dataset = ShardDataset(folder, fields={"number": "cls"}, columns=("label", "width", "late"))
    block = dataset.read_block(3, 1)
    first = int(dataset._first[3]) + dataset.manifest.block_samples

    assert without_url(dataset[3]) == {"__key__": "k/0003", "number": 3, "label": 3, "width": 0.75, "late": None}
    assert without_url(dataset[201]) == {"__key__": "k/0201", "number": 201, "label": 1, "width": 50.25, "late": 201}
    assert [dataset.load(block.sample(row)) for row in range(3)] == dataset[first : first + 3]


@pytest.mark.parametrize(
    ("columns", "fields", "problem"),
    [
        (("lable",), None, r"has no column 'lable'; there are label, late, width"),
        ("label", None, r"must be a sequence of names, got the text 'label'"),
        (("label",), {"label": "cls"}, r"'label' is a field too; give the field a new name"),
        (("__key__",), None, r"has no column '__key__'"),
    ],
)
def test_a_column_that_cannot_come_is_an_error(columns, fields, problem, folders):
    with pytest.raises(ArgumentError, match=problem):
        ShardDataset(folders["none"], columns=columns, fields=fields)


def test_without_index_columns_the_error_says_how_to_make_some(tmp_path):
    pack_samples(tmp_path / "d", columns=None)

    with pytest.raises(ArgumentError, match=r"has no column 'label'; there are none; pack\(columns=...\)"):
        ShardDataset(tmp_path / "d", columns=["label"])


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ([("label", "==", 3)], lambda i: i % 10 == 3),
        ([("label", "in", [3, 4]), ("width", ">", 10)], lambda i: i % 10 in (3, 4) and i % 3 == 0 and i > 40),
        ([[("label", "==", 3)], [("__key__", "==", "k/0007")]], lambda i: i % 10 == 3 or i == 7),
        ([("late", ">", 0)], lambda i: i > 150),
        ([("label", "not in", list(range(10)))], lambda _: False),
        ([("json:size", ">", 0)], lambda i: i % 3 == 0),
        (pc.field("width").is_null() & (pc.field("label") < 2), lambda i: i % 3 and i % 10 < 2),
        (pc.starts_with(pc.field("__key__"), "k/01"), lambda i: 100 <= i < 200),
        (pc.scalar(True), lambda _: True),
    ],
)
def test_where_selects_what_it_says(where, expected, folder, ranges):
    dataset = ShardDataset(folder, where=where)
    read_so_far = list(ranges)
    count = len(dataset)
    selected = [i for i in range(COUNT) if expected(i)]

    assert read_so_far == []
    assert count == len(selected)
    assert numbers(dataset) == selected
    assert dataset.keys() == [f"k/{i:04d}" for i in selected]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (
            [("lable", "==", 3)],
            "No match for FieldRef.*the index has the columns label, late, width, __key__, bin:size",
        ),
        (pc.field("a") == pc.field("b"), "the index has the columns label"),
        ([("label", "==", "three")], "no kernel matching"),
        (pc.field("label") + 1, "must evaluate to bool"),
        ([], "expected an expression of pyarrow.compute, or a list of conditions"),
        ("label == 3", "expected an expression of pyarrow.compute"),
        ([("label", "~", 3)], "is not a valid operator.*expected an expression"),
        ({"label": 3}, "expected an expression"),
        (lambda row: row["label"] == 3, "expected an expression"),
    ],
)
def test_a_condition_that_cannot_be_is_an_error_that_names_what_there_is(where, problem, folders):
    with pytest.raises(ArgumentError, match=problem):
        ShardDataset(folders["none"], where=where)


def test_a_condition_on_columns_made_of_others_is_decided(tmp_path):
    samples = [{"__key__": str(i), "cls": i} for i in range(20)]
    pack_samples(tmp_path / "d", samples=samples, columns={"tags": lambda s: ["x"] * s["cls"], "label": "cls"})
    many = ShardDataset(tmp_path / "d", where=pc.list_value_length(pc.field("tags")) > 16)

    assert numbers(many) == [17, 18, 19]


def test_an_index_error_of_a_transform_is_not_the_end_of_a_dataset(folder):
    dataset = ShardDataset(folder, fields={"label": "cls"}, transform={"label": lambda label: "abc"[label]})

    with pytest.raises(IndexError, match="out of range"):
        list(dataset)


def test_a_dataset_of_no_samples_is_one(folder, tmp_path):
    nothing = ShardDataset(folder, where=[("label", ">", 99)])
    index_shards([], out=tmp_path / "empty")

    for dataset in (nothing, ShardDataset(tmp_path / "empty"), ShardDataset(folder).subset([])):
        assert (len(dataset), list(dataset), dataset[:], dataset.keys(), dataset.num_blocks) == (0, [], [], [], 0)
        assert dataset.order(seed=0, epoch=0).num_samples == 0
        assert len(dataset.places(np.zeros(0, dtype=np.int64)).shard) == 0
        with pytest.raises(IndexError):
            dataset[0]
        with pytest.raises(KeyError):
            dataset.by_key("k/0000")
    assert nothing.digest != ShardDataset(folder).digest


@given(data=st.data())
def test_a_subset_is_those_samples_in_the_order_of_the_dataset(folders, data):
    dataset = ShardDataset(folders["none"], fields=("cls",), where=[("label", "!=", 5)])
    everything = numbers(dataset)
    chosen = data.draw(st.lists(st.integers(0, len(dataset) - 1), unique=True, max_size=30))
    negative = [i - len(dataset) if i % 2 else i for i in chosen]
    mask = np.isin(np.arange(len(dataset)), chosen)
    expected = [everything[i] for i in sorted(chosen)]

    for indices in (chosen, negative, np.array(chosen, dtype=np.uint8), mask, mask.tolist()):
        part = dataset.subset(indices)
        assert len(part) == len(chosen)
        assert numbers(part) == expected
        assert part.digest == dataset.subset(mask).digest
    if len(chosen) > 2:
        assert numbers(dataset.subset(chosen).subset([0, -1])) == [expected[0], expected[-1]]


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([3, 4, 3], "sample 3 is given more than once; give each once"),
        ([0, -COUNT], "sample 0 is given more than once; give each once"),
        ([COUNT], "there is no sample 203, there are 203"),
        ([-COUNT - 1, 0], "there is no sample -204, there are 203"),
        (np.array([1 << 63], dtype=np.uint64), "there is no sample 9,223,372,036,854,775,808"),
        ([0.5], "must be whole numbers or a mask in one dimension"),
        ([[0, 1]], "must be whole numbers or a mask in one dimension"),
        ([True, False], r"the mask has the shape \(2,\), expected \(203,\)"),
        (["k/0001"], "must be whole numbers or a mask"),
    ],
)
def test_indices_that_cannot_be_are_errors(indices, problem, folders):
    with pytest.raises(ArgumentError, match=problem):
        ShardDataset(folders["none"]).subset(indices)


def test_the_digest_says_which_samples_and_not_how_they_were_selected(folders):
    dataset = ShardDataset(folders["none"])
    by_label = ShardDataset(folders["none"], fields=("txt",), where=[("label", "==", 3)])
    threes = [i for i in range(COUNT) if i % 10 == 3]

    assert dataset.digest == dataset.manifest.digest
    assert by_label.digest == dataset.subset(threes).digest != dataset.digest
    assert re.fullmatch("[0-9a-f]{64}", by_label.digest)
    assert by_label.subset([0, 2]).digest == dataset.subset([3, 23]).digest
    assert dataset.subset(threes[1:]).digest != by_label.digest
    assert dataset.subset(range(COUNT)).digest == dataset.digest
    assert ShardDataset(folders["none"], where=[("label", ">=", 0)]).digest == dataset.digest


def test_samples_are_found_by_key(folder):
    dataset = ShardDataset(folder)
    threes = dataset.subset([i for i in range(COUNT) if i % 10 == 3])

    assert [dataset.by_key(f"k/{i:04d}")["cls"] for i in (0, 202, 77)] == [0, 202, 77]
    assert threes.by_key("k/0013")["cls"] == 13
    with pytest.raises(KeyError, match="none of the 20 samples has the key 'k/0014'"):
        threes.by_key("k/0014")
    assert threes.subset([1, 2]).by_key("k/0023")["cls"] == 23


def test_keys_with_the_same_hash_are_told_apart(folders, monkeypatch):
    monkeypatch.setattr("shardkit.reading.dataset.hash_key", lambda _: 7)
    monkeypatch.setattr("shardkit.reading.dataset.hash_keys", lambda keys: np.full(len(keys), 7, dtype=np.uint64))
    dataset = ShardDataset(folders["none"])

    assert dataset.by_key("k/0033")["cls"] == 33
    with pytest.raises(KeyError):
        dataset.by_key("k/0203")


def test_a_key_that_is_there_twice_is_an_error_and_the_others_are_found(tmp_path):
    for shard in ("a", "b"):
        pack_samples(tmp_path / shard, samples=SAMPLES[:3], columns=None)
    (tmp_path / "both").mkdir()
    for shard in ("a", "b"):
        shutil.copy(tmp_path / shard / f"{shard}-000000.tar", tmp_path / "both")
    index_shards(tmp_path / "both", progress=False)
    dataset = ShardDataset(tmp_path / "both")

    with pytest.raises(
        DatasetError, match=r"2 samples have the key 'k/0001', the first are the numbers 1 and 4"
    ) as error:
        dataset.by_key("k/0001")
    assert error.value.key == "k/0001"
    assert dataset.subset([0, 1, 2]).by_key("k/0001")["cls"] == 1


def test_every_block_is_its_samples(folder):
    dataset = ShardDataset(folder, where=[("label", "<", 7)])
    shard, block, row = dataset.places(np.arange(len(dataset)))
    expected = read(dataset)
    found = []
    for place in zip(shard.tolist(), block.tolist(), row.tolist(), strict=True):
        one = dataset.read_block(*place[:2])
        assert (one.shard, one.number) == place[:2]
        found.append(without_url(dataset.load(one.sample(place[2]))))

    assert found == expected
    assert dataset.block_bytes * ShardDataset(folder).num_blocks == pytest.approx(
        sum(shard.tar_size for shard in dataset.manifest.shards)
    )


def test_a_block_that_is_not_there_is_an_error(folders):
    with pytest.raises(ArgumentError, match=r"none-000000\.tar: has the blocks 0 to 13, not 99"):
        ShardDataset(folders["none"]).read_block(0, 99)


@pytest.mark.parametrize(
    "where", [None, [("label", "in", [1, 2])], [("__key__", "in", ["k/0000", "k/0120", "k/0202"])]]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once_and_its_blocks_are_those_with_samples(where, shuffle, folder, ranges):
    dataset = ShardDataset(folder, where=where)
    plan = dataset.order(seed=1, epoch=2, shuffle=shuffle)
    samples = plan.samples_at(np.arange(len(dataset)))
    shard, block, row = dataset.places(samples)
    blocks = {*zip(shard.tolist(), block.tolist(), strict=True)}
    found = [
        dataset.load(dataset.read_block(*place[:2]).sample(place[2]))["cls"]
        for place in zip(shard.tolist(), block.tolist(), row.tolist(), strict=True)
    ]

    assert sorted(samples.tolist()) == list(range(len(dataset)))
    assert len(blocks) == len(set(ranges)) == plan.num_blocks == dataset.num_blocks
    assert sorted(found) == numbers(dataset)
    assert (found == numbers(dataset)) == (not shuffle)


def test_a_selection_of_everything_has_the_order_of_the_dataset(folders):
    dataset = ShardDataset(folders["none"])
    half, other = dataset.subset(range(0, COUNT, 2)), ShardDataset(folders["none"], where=[("label", ">=", 0)])

    def order(dataset):
        return dataset.order(seed=3, epoch=1).samples_at(np.arange(len(dataset))).tolist()

    assert order(other) == order(dataset)
    assert sorted(order(half)) == list(range(102))


def test_lanes_follow_from_the_manifest_and_can_be_given(folders):
    dataset = ShardDataset(folders["none"])

    assert dataset.order(seed=0, epoch=0).lanes == max(
        n for n in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60) if n <= dataset.num_blocks
    )
    assert dataset.order(seed=0, epoch=0, lanes=3).lanes == 3


def test_a_flipped_bit_is_an_error_or_nothing_that_was_asked_for(copied):
    shard = next(copied.glob("*-000001.tar*"))
    whole = shard.read_bytes()
    table = ShardDataset(copied)._access.indexes.blocks(1).table
    first, samples = int(ShardDataset(copied)._first[1]), ShardDataset(copied).manifest.shards[1].samples
    for at in range(0, int(table.stored_offset[2]), 61):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        dataset = ShardDataset(copied)
        number = int(np.searchsorted(table.stored_offset, at, side="right")) - 1
        offset = int(table.offset[number])

        with pytest.raises(ShardError, match=rf"{shard.name}: .*block .*at byte {offset:,}") as error:
            dataset.read_block(1, number)
        assert (error.value.url, error.value.offset) == (str(shard), offset)
        damaged = []
        for i in range(first, first + samples):
            try:
                assert without_url(dataset[i]) == SAMPLES[i]
            except ShardError as damage:
                damaged.append(damage)
        assert {damage.url for damage in damaged} <= {str(shard)}
        if shard.suffix == ".zst":
            assert len(damaged) == dataset.manifest.block_samples
        else:
            assert len(damaged) <= 1
            assert all(f"field {d.field!r} of sample {d.key!r} at byte {d.offset:,}" in str(d) for d in damaged)


def test_any_flipped_byte_of_a_field_is_an_error_that_names_it(copied):
    shard = next(copied.glob("*-000000.tar"), None)
    if shard is None:
        return
    rows = index_of(copied).rows()
    offset, size = rows.column("txt:offset")[7].as_py(), rows.column("txt:size")[7].as_py()
    whole = shard.read_bytes()
    for at in range(offset, offset + size):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(ShardError, match="field 'txt' of sample 'k/0007'") as error:
            ShardDataset(copied)[7]
        assert (error.value.field, error.value.key, error.value.offset) == ("txt", "k/0007", offset)
        assert ShardDataset(copied, fields=("cls",))[7]["cls"] == 7


def test_a_shard_that_was_cut_or_replaced_is_an_error(copied):
    shard = next(copied.glob("*-000002.tar*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])

    with pytest.raises(TruncatedShardError, match=f"has {len(whole) - 1:,} bytes, its manifest says {len(whole):,}"):
        ShardDataset(copied)[100]
    shard.write_bytes(whole + b"x")
    with pytest.raises(ShardError, match="it was cut or replaced"):
        ShardDataset(copied).read_block(2, 0)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        ShardDataset(copied)[100]


def test_the_index_of_another_shard_is_an_error(copied):
    other = index_of(copied, 1)
    rewrite_index(copied, 2, rows=lambda _: other.rows(), facts=asdict(other.facts))

    for ask in (lambda d: d[100], lambda d: d.keys()):
        with pytest.raises(DatasetError, match="is the index of another shard than the manifest lists"):
            ask(ShardDataset(copied))
    with pytest.raises(DatasetError, match="is the index of another shard than the manifest lists"):
        ShardDataset(copied, where=[("__key__", "==", "1")])


def test_an_index_in_the_place_of_another_is_an_error(copied):
    shutil.copy(index_path(copied, 1), index_path(copied, 2))

    for ask in (lambda d: d[100], lambda d: d.keys()):
        with pytest.raises(DatasetError, match=rf"{index_path(copied, 2).name}: is not an index .*, expected"):
            ask(ShardDataset(copied))
    with pytest.raises(DatasetError, match=rf"{index_path(copied, 2).name}: is not an index .*, expected"):
        ShardDataset(copied, where=[("__key__", "==", "1")])


def test_a_missing_index_is_an_error_that_says_what_to_do(copied):
    index = index_path(copied, 2)
    index.unlink()

    with pytest.raises(
        FileNotFoundError, match=rf"1 of \d+ indexes are missing: __index__/{index.name}; .*'shardkit index"
    ):
        ShardDataset(copied)


def test_a_damaged_index_is_an_error(copied):
    index = index_path(copied, 2)
    whole = index.read_bytes()

    for at in range(0, len(whole), 97):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        dataset = ShardDataset(copied)
        for i in (100, 149):
            try:
                assert without_url(dataset[i]) == SAMPLES[i]  # the damage is in a part that was not read
            except DatasetError as error:
                assert error.url == str(index)  # noqa: PT017 - either an error or the sample


def test_blocks_are_read_and_columns_are_compared_without_any_index(copied):
    where = [("label", "==", 3), ("width", ">", 0)]
    expected = {s["__key__"]: s for s in ShardDataset(copied)}
    selected = [s["__key__"] for s in ShardDataset(copied, where=where)]
    for number in range(4):
        index_path(copied, number).write_bytes(b"")  # missing indexes are an error when the dataset is opened
    dataset = ShardDataset(copied, where=where)
    for number in range(4):
        index_path(copied, number).unlink()
    found = [s for batch in ShardLoader(dataset, 4, shuffle=False, collate_fn=list) for s in batch]

    assert len(selected) > 3
    assert found == [expected[key] for key in selected]


@pytest.mark.parametrize("compression", ["gz", "zst", "xz"])
def test_shards_that_can_only_be_read_from_their_beginning_are_refused_with_what_to_do(compression, folders, tmp_path):
    if compression == "gz":
        pack_samples(tmp_path / "d", "gz")
    else:
        import lzma

        from shardkit.codecs.compress import compress_frame

        compress = {"zst": partial(compress_frame, level=3), "xz": lzma.compress}[compression]
        (tmp_path / "d").mkdir()
        tar = (folders["none"] / "none-000000.tar").read_bytes()
        (tmp_path / "d" / f"d-000000.tar.{compression}").write_bytes(compress(tar))
        index_shards(tmp_path / "d", progress=False)

    with pytest.raises(
        DatasetError, match=rf"is {compression} .*'shardkit pack {tmp_path}/d NEW_FOLDER --kind shards'"
    ):
        ShardDataset(tmp_path / "d")


def test_what_is_no_dataset_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match=r"has no manifest\.json, so it is not a dataset; make one with"):
        ShardDataset(tmp_path)
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(UnfinishedDatasetError):
        ShardDataset(tmp_path)
    with pytest.raises(ArgumentError, match="url must be text or a path"):
        ShardDataset(3)


@pytest.mark.parametrize("decode", ["rgb", None, 3])
def test_decode_is_true_false_or_a_decoder(decode, folders):
    with pytest.raises(ArgumentError, match=r"decode is .*, expected True, False or a Decoder"):
        ShardDataset(folders["none"], decode=decode)

    assert ShardDataset(folders["none"], decode=Decoder(images="pil"))[0]["cls"] == 0


def test_strangers_shards_are_read_when_they_are_indexed_elsewhere(folders, tmp_path):
    (tmp_path / "theirs").mkdir()
    shutil.copy(folders["none"] / "none-000001.tar", tmp_path / "theirs" / "x.tar")
    index_shards(tmp_path / "theirs", out=tmp_path / "ours", progress=False)

    with pytest.raises(DatasetError, match="allow_any_url=True"):
        ShardDataset(tmp_path / "ours")
    dataset = ShardDataset(tmp_path / "ours", allow_any_url=True)
    assert numbers(dataset) == list(range(40, 40 + len(dataset)))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_strangers_tars_with_folders_links_and_long_names_are_read_sample_by_sample_and_block_by_block(form, tmp_path):
    samples = [
        (
            f"{'folder/' * (i % 20 * (1 if form == tarfile.USTAR_FORMAT else 2))}k{i}",
            {"cls": b"%d" % i, "Seg.PNG": b"x" * (i * 37 % 900)},
        )
        for i in range(60)
    ]
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=form) as archive:
            for key, fields in samples[number * 30 : number * 30 + 30]:
                folder = tarfile.TarInfo(f"{key}-folder")
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
                for field, data in fields.items():
                    member = tarfile.TarInfo(f"{key}.{field}")
                    member.size, member.mtime = len(data), 1.5
                    archive.addfile(member, io.BytesIO(data))
    index_shards(tmp_path, progress=False, block_bytes=5000)
    dataset = ShardDataset(tmp_path, decode=False)
    places = zip(*(place.tolist() for place in dataset.places(np.arange(60))), strict=True)
    in_blocks = [dataset.load(dataset.read_block(shard, block).sample(row)) for shard, block, row in places]
    expected = [(key, fields["cls"], fields["Seg.PNG"]) for key, fields in samples]

    assert dataset.num_blocks > 4
    assert [(s["__key__"], s["cls"], s["seg.png"]) for s in dataset] == expected
    assert in_blocks == dataset[:]


def test_an_index_of_several_row_groups_is_read_as_one(tmp_path):
    rows = 4096
    count = rows + 1000
    samples = ({"__key__": f"{i:06d}", "cls": i} for i in range(count))
    pack_samples(tmp_path / "d", samples=samples, shard_samples=None, block_bytes="100kB", columns={"label": "cls"})
    dataset = ShardDataset(tmp_path / "d", fields={"number": "cls"}, columns=("label",))
    numbers = [0, rows - 1, rows, count - 1]
    _, block, _ = dataset.places(np.array(numbers))
    across = dataset.read_block(0, int(block[1]))
    loaded = [dataset.load(across.sample(row)) for row in range(len(across))]

    assert [shard.index.group_rows for shard in dataset.manifest.shards] == [rows]
    assert index_of(tmp_path / "d").num_groups == 2
    assert [(dataset[i]["number"], dataset[i]["label"]) for i in numbers] == [(i, i) for i in numbers]
    assert block[1] == block[2]
    assert all(sample["number"] == sample["label"] for sample in loaded)
    assert dataset.by_key(f"{count - 1:06d}")["number"] == count - 1


def test_eight_threads_at_once_get_what_one_gets(folder):
    dataset = ShardDataset(folder, columns=("label",))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(dataset.__getitem__, [i % COUNT for i in range(7, 7 + 5 * COUNT)]))
        blocks = list(pool.map(lambda i: dataset.read_block(i % 5, 0).keys(), range(50)))

    assert found == [dataset[i % COUNT] for i in range(7, 7 + 5 * COUNT)]
    assert blocks == [dataset.read_block(i % 5, 0).keys() for i in range(50)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_dataloader_get_what_one_process_gets(method, folder):
    dataset = ShardDataset(folder, fields=("cls", "txt"), where=[("label", "!=", 4)])
    expected = dataset[:]  # the caches and open files of this process are forked
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)

    assert list(loader) == expected


def test_a_pickle_is_small_and_works(folder):
    dataset = ShardDataset(folder, columns=("label",), where=[("label", "!=", 4)])
    before = pickle.dumps(dataset)
    expected = dataset[:]
    assert dataset.by_key("k/0001")["cls"] == 1
    after = pickle.dumps(dataset)

    assert len(after) == len(before) < 6000
    assert pickle.loads(after)[:] == expected


def test_what_is_kept_of_indexes_is_bounded_and_goes_on_to_be_right(folder, monkeypatch):
    monkeypatch.setattr(indexes, "ROW_BYTES", 9000)
    monkeypatch.setattr(indexes, "BLOCK_TABLE_BYTES", 2000)
    monkeypatch.setattr(access, "FRAME_BYTES", 12_000)
    dataset = ShardDataset(folder)

    assert [without_url(dataset[i * 50 % COUNT]) for i in range(COUNT)] == [
        SAMPLES[i * 50 % COUNT] for i in range(COUNT)
    ]
    kept = dataset._access
    assert 0 < kept.indexes._rows.nbytes <= 9000
    assert 0 < kept.indexes._blocks.nbytes <= 2000
    assert kept._frames.nbytes <= 12_000


def test_opening_a_dataset_reads_its_manifest_only(folders, monkeypatch):
    opened = []
    for name in ("open", "read_range"):
        honest = getattr(LocalStorage, name)
        monkeypatch.setattr(
            LocalStorage, name, lambda self, *a, honest=honest, **k: opened.append(a[0]) or honest(self, *a, **k)
        )
    ShardDataset(folders["none"], fields=("cls",)).order(seed=0, epoch=0)

    assert [name.rpartition("/")[2] for name in opened] == ["manifest.json"]


@pytest.mark.parametrize(("part", "value"), [(1, 1 << 60), (1, -1), (0, 0), (0, 1 << 60)])
def test_a_field_that_cannot_be_where_its_index_says_is_not_read(part, value, copied):
    dataset = ShardDataset(copied)
    rows = dataset._access.indexes.rows(1, 0)
    writable = tuple(array.copy() for array in rows.members["txt"])
    writable[part][7] = value
    rows.members["txt"] = writable

    with pytest.raises(
        DatasetError, match=r"-000001\.[0-9a-f]{16}\.parquet: is damaged \(sample 'k/0047' is not in its block\)"
    ):
        dataset[int(dataset._first[1]) + 7]


def test_blocks_that_cannot_be_where_their_index_says_are_not_read(copied):
    dataset = ShardDataset(copied)
    table = dataset._access.indexes.blocks(1).table
    for name, value in [
        ("size", 1 << 60),
        ("stored_size", 1 << 60),
        ("offset", -512),
        ("stored_offset", 1 << 62),
        ("size", 0),
    ]:
        array = getattr(table, name).copy()
        getattr(table, name)[1] = value
        with pytest.raises(DatasetError, match="has blocks that cannot be in its shard"):
            dataset._access.indexes._check_table(1, table, "x.parquet")
        getattr(table, name)[:] = array
