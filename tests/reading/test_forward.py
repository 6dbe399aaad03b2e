"""Shards are found by the names that users give, and are read completely or with an error that says where."""

import random
import re
import sys
from dataclasses import replace
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.codecs.compress import compress_frame, gzip_writer
from shardkit.errors import ArgumentError, DatasetError, ShardError, TruncatedShardError, UnfinishedDatasetError
from shardkit.format.index import BlockTable, IndexBuilder, ShardFacts, publish_index
from shardkit.format.manifest import Manifest
from shardkit.format.side_files import publish_manifest
from shardkit.format.tar import END_OF_ARCHIVE, Member, padding
from shardkit.reading.forward import ShardLocation, _group, find_shards, read_shard
from shardkit.sample import KEY, URL, FieldSelection, split_name
from shardkit.storage.local import LocalStorage, LocalStream
from tests.support.forge import manifest_of
from tests.support.shared import MIB, peak_memory
from tests.support.shared import tar_of as tar


def samples_of(numbers):
    return [{KEY: f"{i:04d}", "txt": f"text {i}".encode() * 3, "cls": b"%d" % i} for i in numbers]


def tar_of(samples):
    return tar([(f"{s[KEY]}.{field}", s[field]) for s in samples for field in s if field != KEY])


NO_BLOCKS = BlockTable(*([np.zeros(0, dtype=np.int64)] * 5))


def write_dataset(folder, shards, compress=lambda data: data, suffix=".tar"):
    """Write shards of samples with indexes and a manifest, and return the locations that find_shards finds."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(shards):
        data, builder, offset = tar_of(samples), IndexBuilder(), 0
        for sample in samples:
            begin, members = offset, []
            for field in [name for name in sample if name != KEY]:
                size = len(sample[field])
                members.append((field, offset + 512, size, crc32(sample[field])))
                offset += 512 + size + padding(size)
            builder.add(sample[KEY], begin, offset - begin, members)
        name, stored = f"train-{number:06d}{suffix}", compress(data)
        (folder / name).write_bytes(stored)
        fields, sha = tuple(sorted(builder.fields)), f"{number:064x}"
        facts = ShardFacts(name, len(samples), len(stored), len(data), sha, "none", 16, fields)
        entries.append(publish_index(LocalStorage(), str(folder), name, builder.table(), facts, NO_BLOCKS))
    manifest = Manifest(tuple(entries), block_samples=16, fields=("cls", "txt"), url=str(folder))
    publish_manifest(LocalStorage(), manifest, [NO_BLOCKS] * len(entries), pa.schema([]))
    return find_shards(str(folder))


def read(location, **options):
    """Return the samples without their URL, and the error that ended them."""
    samples = []
    try:
        for sample in read_shard(location, **options):
            assert sample.pop(URL) == location.url
            samples.append(sample)
    except ShardError as error:
        return samples, error
    return samples, None


def names_of(urls):
    return [location.url for location in find_shards(urls)]


def test_samples_are_what_was_written(tmp_path):
    samples = samples_of(range(20))
    (tmp_path / "a.tar").write_bytes(tar_of(samples))

    assert read(ShardLocation(str(tmp_path / "a.tar"))) == (samples, None)


@pytest.mark.parametrize("form", ["zst", "gz"])
def test_compressed_shards_are_read_with_and_without_an_index(tmp_path, form):
    def compress(data):
        if form == "zst":
            return compress_frame(data[:5000], 3) + compress_frame(data[5000:], 3)
        writer = gzip_writer(6)
        return writer.compress(data) + writer.flush()

    samples = samples_of(range(20))
    (location,) = write_dataset(tmp_path, [samples], compress, f".tar.{form}")

    assert read(location) == (samples, None)
    assert read(ShardLocation(location.url)) == (samples, None)
    assert read(location, selection=FieldSelection.parse(["cls"]))[0][3] == {KEY: "0003", "cls": b"3"}


def test_members_are_grouped_by_adjacent_equal_keys(tmp_path):
    members = [
        ("a.txt", b"1"),
        ("b.txt", b"2"),
        ("b.CLS", b"3"),
        ("._b.jpg", b"x"),
        ("b.seg.png", b"4"),
        ("a.txt", b"5"),
    ]
    (tmp_path / "a.tar").write_bytes(tar(members))

    assert read(ShardLocation(str(tmp_path / "a.tar")))[0] == [
        {KEY: "a", "txt": b"1"},
        {KEY: "b", "txt": b"2", "cls": b"3", "seg.png": b"4"},
        {KEY: "a", "txt": b"5"},
    ]


@example(["a.b", "/.b", ".b", "__c.b", "__c.b__", "c/a.b", "c.a/b"])
@given(st.lists(st.lists(st.sampled_from(["a", "B", "_", "__", ".", "/"]), min_size=1, max_size=7).map("".join)))
def test_names_are_taken_as_the_rules_split_them(names):
    members = [Member(name, 1024 * i, 1024 * i + 512, 1, b"1") for i, name in enumerate(names)]
    expected, doubled = [], False
    for name in names:
        split = split_name(name)
        if split is None:
            continue
        key, field = split
        if not expected or expected[-1][KEY] != key:
            expected.append({KEY: key, URL: "x.tar"})
        if field in expected[-1]:
            expected.pop()  # it is incomplete
            doubled = True
            break
        expected[-1][field] = b"1"
    found = []
    try:
        found.extend(_group(iter(members), "x.tar", None))
    except ShardError:
        assert doubled
    else:
        assert not doubled

    assert found == expected


@pytest.mark.parametrize("fields", [None, ["cls"]])
@pytest.mark.parametrize("second", ["b.txt", "b.TXT", "b.__key__", "b.__source__"])
def test_a_field_twice_in_a_sample_is_an_error_that_says_where(tmp_path, second, fields):
    (tmp_path / "a.tar").write_bytes(tar([("a.txt", b""), ("b.txt", b""), ("b.cls", b"1"), (second, b"2")]))
    samples, error = read(ShardLocation(str(tmp_path / "a.tar")), selection=FieldSelection.parse(fields))

    assert [sample[KEY] for sample in samples] == ["a"]
    assert (error.offset, error.key, error.field) == (4 * 512, "b", second[2:].lower())


@pytest.mark.parametrize("indexed", [False, True])
def test_a_shard_cut_anywhere_is_an_error_after_whole_samples_only(tmp_path, indexed):
    samples = samples_of(range(4))
    (location,) = write_dataset(tmp_path, [samples])
    if not indexed:
        location = ShardLocation(location.url)
    whole = (tmp_path / "train-000000.tar").read_bytes()
    for cut in [*range(0, len(whole), 97), *range(len(whole) - 1024, len(whole), 31)]:
        (tmp_path / "train-000000.tar").write_bytes(whole[:cut])
        before, error = read(location)

        assert isinstance(error, TruncatedShardError), cut
        assert before == samples[: len(before)], cut
        assert len(before) < len(samples), cut


@given(position=st.integers(0, 4 * 2048 + 1023), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found_with_an_index_or_changes_nothing(tmp_path_factory, position, bit):
    folder = tmp_path_factory.mktemp("flip")
    samples = samples_of(range(4))
    (location,) = write_dataset(folder, [samples])
    shard = folder / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[position] ^= 1 << bit
    shard.write_bytes(data)
    before, error = read(location)

    assert before == samples[: len(before)]
    assert error is not None or before == samples


def test_a_changed_byte_of_data_is_named_by_shard_offset_key_and_field(tmp_path):
    (location,) = write_dataset(tmp_path, [samples_of(range(4))])
    shard = tmp_path / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[2 * 2048 + 512] ^= 1
    shard.write_bytes(data)
    samples, error = read(location)

    assert [sample[KEY] for sample in samples] == ["0000", "0001"]
    assert (error.url, error.offset, error.key, error.field) == (str(shard), 2 * 2048 + 512, "0002", "txt")
    assert "CRC-32" in str(error)
    assert read(location, selection=FieldSelection.parse(["cls"]))[1] is None  # unread fields are not compared


def other_samples():
    """Yield shards that differ from their index, and the place where the difference is noticed."""
    samples = samples_of(range(4))
    renamed = [dict(sample, **{KEY: "x" + sample[KEY]}) if i == 2 else sample for i, sample in enumerate(samples)]
    longer = [dict(sample, txt=sample["txt"] + b"!") if i == 2 else sample for i, sample in enumerate(samples)]
    more = [dict(sample, jpg=b"") if i == 2 else sample for i, sample in enumerate(samples)]
    fewer = [{KEY: s[KEY], "cls": s["cls"]} if i == 2 else s for i, s in enumerate(samples)]
    return {
        "one sample fewer": (samples[:3], 3, "0003", ""),
        "one sample more": ([*samples, {KEY: "0004", "txt": b"", "cls": b""}], 4, "0004", ""),
        "another key": (renamed, 2, "x0002", ""),
        "another size": (longer, 2, "0002", "txt"),
        "one field more": (more, 2, "0002", "jpg"),
        "one field fewer": (fewer, 2, "0002", "cls"),
        "another order": (samples[::-1], 0, "0003", ""),
        "empty": ([], 0, "0000", ""),
    }


@pytest.mark.parametrize("change", other_samples())
def test_a_whole_shard_that_is_not_what_its_index_says_is_an_error(tmp_path, change):
    instead, whole, key, field = other_samples()[change]
    (location,) = write_dataset(tmp_path, [samples_of(range(4))])
    (tmp_path / "train-000000.tar").write_bytes(tar_of(instead))
    samples, error = read(location)

    assert len(samples) == whole
    assert (error.key, error.field) == (key, field)
    assert re.search(rf"^shard {re.escape(location.url)}: .*; it is damaged or was replaced", str(error))


def test_samples_may_have_different_fields(tmp_path):
    samples = [{KEY: "a", "txt": b"1"}, {KEY: "b", "cls": b"2"}, {KEY: "c", "txt": b"3", "cls": b"4"}]
    (location,) = write_dataset(tmp_path, [samples])

    assert read(location) == (samples, None)
    assert read(location, selection=FieldSelection.parse(["cls"]))[0][0] == {KEY: "a"}


def test_the_index_of_another_shard_is_refused(tmp_path):
    first, second = write_dataset(tmp_path, [samples_of(range(4)), samples_of(range(4))])
    lie = replace(first.shard, index=second.shard.index, url=second.shard.url)

    with pytest.raises(DatasetError, match="is the index of another shard"):
        list(read_shard(ShardLocation(first.url, lie, first.folder)))
    (tmp_path / first.shard.index_url).write_bytes((tmp_path / second.shard.index_url).read_bytes())
    with pytest.raises(DatasetError, match=r"it has the SHA-256|it has .* bytes, expected|its footer has the CRC-32"):
        list(read_shard(first))


def test_a_missing_shard_and_a_missing_index_are_missing_files(tmp_path):
    (location,) = write_dataset(tmp_path, [samples_of(range(4))])
    (tmp_path / location.shard.index_url).unlink()

    with pytest.raises(FileNotFoundError):
        list(read_shard(location))
    with pytest.raises(FileNotFoundError):
        list(read_shard(ShardLocation(str(tmp_path / "none.tar"))))


@pytest.mark.parametrize("indexed", [False, True])
def test_fields_that_are_not_wanted_are_not_read(tmp_path, monkeypatch, indexed):
    samples = [{KEY: f"{i}", "jpg": bytes(1_000_000), "cls": b"1"} for i in range(5)]
    (location,) = write_dataset(tmp_path, [samples])
    if not indexed:
        location = ShardLocation(location.url)
    got = []
    honest = LocalStream.read
    monkeypatch.setattr(LocalStream, "read", lambda self, n, /: got.append(data := honest(self, n)) or data)
    found, error = read(location, selection=FieldSelection.parse({"label": "cls", "also": "index?"}))

    assert (found, error) == ([{KEY: f"{i}", "cls": b"1"} for i in range(5)], None)
    assert sum(map(len, got)) < 100_000


@pytest.mark.parametrize("end", ["close", "exception"])
def test_a_shard_is_closed_however_its_reading_ends(tmp_path, monkeypatch, end):
    opened = []
    honest = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda *a, **k: opened.append(stream := honest(*a, **k)) or stream)
    (tmp_path / "a.tar").write_bytes(tar_of(samples_of(range(4)))[: None if end == "close" else -100])
    samples = read_shard(ShardLocation(str(tmp_path / "a.tar")))
    if end == "close":
        next(samples)
        samples.close()
    else:
        with pytest.raises(TruncatedShardError):
            list(samples)

    assert [stream._file.closed for stream in opened] == [True]


def test_a_folder_with_a_manifest_is_its_shards_with_their_indexes(tmp_path):
    folder = tmp_path / "train"
    write_dataset(folder, [samples_of(range(3)), samples_of(range(3, 5))])
    (folder / "other.tar").write_bytes(END_OF_ARCHIVE)
    expected = [(f"{folder}/train-00000{i}.tar", str(folder), manifest_of(folder).shards[i]) for i in range(2)]

    for urls in (str(folder), folder, f"{folder}/", f"{folder}/manifest.json", [folder], f"file://{folder}"):
        assert [(found.url, found.folder, found.shard) for found in find_shards(urls)] == expected
    assert [found.shard.samples for found in find_shards(folder)] == [3, 2]


def test_a_folder_without_a_manifest_is_its_tars_and_no_index_is_trusted(tmp_path):
    for name in ("b.tar", "a.tar.zst", "a.parquet", "c.tgz", "notes.txt"):
        (tmp_path / name).touch()

    found = [ShardLocation(f"{tmp_path}/{name}") for name in ("a.tar.zst", "b.tar", "c.tgz")]

    assert find_shards(tmp_path) == found


def test_patterns_lists_and_standard_input_are_expanded_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("s/0/a-1.tar", "s/0/a-0.tar", "s/1/a-0.tar", "s/1/b[0].tar", "s/1/a.txt", "s/.hidden/a-0.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert names_of("x-{000..002}.tar") == ["x-000.tar", "x-001.tar", "x-002.tar"]
    assert names_of("s/0/*.tar") == ["s/0/a-0.tar", "s/0/a-1.tar"]
    assert names_of("s/*/a*") == ["s/0/a-0.tar", "s/0/a-1.tar", "s/1/a-0.tar"]
    assert names_of("./s/?/a-[1].tar") == ["./s/0/a-1.tar"]
    assert names_of(f"{tmp_path}/s/{{0,1}}/a-0*") == [f"{tmp_path}/s/0/a-0.tar", f"{tmp_path}/s/1/a-0.tar"]
    assert names_of("s/1/b[0].tar") == ["s/1/b[0].tar"]
    assert names_of(["b.tar", "a-{1,0}.tar", "-", "b.tar"]) == ["b.tar", "a-1.tar", "a-0.tar", "-", "b.tar"]
    assert names_of("s/1/a.txt") == ["s/1/a.txt"]
    assert names_of("s/.h*/*.tar") == ["s/.hidden/a-0.tar"]


@pytest.mark.parametrize(
    "pattern", ["a{1..99999999999}", "a{-7..99999999999..2}", "{a,b}{1..100}{1..100}{1..100}", "a{2000000..1}"]
)
def test_a_pattern_of_too_many_names_is_refused_in_little_memory(pattern, monkeypatch):
    monkeypatch.setattr(sys.modules["shardkit.reading.forward"], "_MAX_NAMES", 1000)

    def find():
        with pytest.raises(ArgumentError, match="stands for more than 1,000 names; correct it, or give a folder"):
            find_shards(pattern)

    assert peak_memory(find) < MIB
    assert len(find_shards("{a{001..400},b{001..600}}.tar")) == 1000


def test_what_exists_is_no_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a{1..2}", "b[0]"):
        write_dataset(tmp_path / folder, [samples_of(range(3))])
    for name in ("c{1,2}.tar", "a{1..2}/x.tar", "c1.tar"):
        (tmp_path / name).touch()

    assert names_of("a{1..2}") == ["a{1..2}/train-000000.tar"]
    assert names_of("b[0]") == ["b[0]/train-000000.tar"]
    assert names_of(["c{1,2}.tar", "a{1..2}/x.tar"]) == ["c{1,2}.tar", "a{1..2}/x.tar"]
    assert names_of("c{1,3}.tar") == ["c1.tar", "c3.tar"]


def test_what_is_not_there_says_what_was_looked_for(tmp_path):
    write_dataset(tmp_path / "all" / "train", [samples_of(range(3))])
    (tmp_path / "empty").mkdir()

    with pytest.raises(DatasetError, match=r"nothing\*\.tar: matches no shards"):
        find_shards(f"{tmp_path}/nothing*.tar")
    with pytest.raises(DatasetError, match=r"empty: has neither manifest\.json nor shards"):
        find_shards(tmp_path / "empty")
    with pytest.raises(DatasetError, match="none: does not exist; give a folder"):
        find_shards(tmp_path / "none")
    with pytest.raises(DatasetError, match=r"give one of the datasets in it: .*all/train"):
        find_shards(tmp_path / "all")
    with pytest.raises(ArgumentError, match="urls is empty"):
        find_shards([])
    with pytest.raises(ArgumentError, match="pipe: URLs"):
        find_shards("pipe:cat a.tar")
    with pytest.raises(ArgumentError, match="is not a valid brace pattern"):
        find_shards("a-{0..1.tar")


def test_an_unfinished_dataset_is_refused(tmp_path):
    write_dataset(tmp_path, [samples_of(range(3))])
    (tmp_path / "unfinished.json").write_text("{}")

    for urls in (tmp_path, tmp_path / "manifest.json"):
        with pytest.raises(UnfinishedDatasetError, match="is unfinished"):
            find_shards(urls)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UnfinishedDatasetError, match="is unfinished"):
        find_shards(tmp_path)


def test_a_long_shard_is_compared_over_many_batches_of_rows(tmp_path):
    numbers = list(range(9000))
    random.Random(0).shuffle(numbers)
    samples = [{KEY: f"{i:05d}", "cls": b"1"} for i in numbers]
    (location,) = write_dataset(tmp_path, [samples])

    assert read(location) == (samples, None)
