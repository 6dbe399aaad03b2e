"""The side files hold the facts of all indexes; damage to a side file is an error before any of its data is used."""

import hashlib
import io
import tempfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ArgumentError, DatasetError, StorageError
from shardkit.format import parquet
from shardkit.format.columns import make_schema, promoted_columns
from shardkit.format.index import BLOCK_BYTES, BlockTable, IndexBuilder, ShardFacts, open_index, publish_index
from shardkit.format.manifest import Manifest, read_manifest, version_name
from shardkit.format.side_files import (
    CARD_NAME,
    BlockFile,
    ColumnFile,
    columns_of_indexes,
    encode_blocks,
    publish_manifest,
    regroup,
)
from shardkit.storage.local import LocalStorage
from tests.support.folders import names_in

STORAGE = LocalStorage()
NONE = BlockTable(*([np.zeros(0, dtype=np.int64)] * 5))
numbers = st.integers(0, 2**40)
block_rows = st.lists(
    st.tuples(numbers, st.integers(1, 2**40), st.integers(0, 2**32 - 1), numbers, st.integers(1, 2**40)), max_size=5
)
VALUES = {
    "label": st.integers(-(2**40), 2**40),
    "half": st.floats(allow_nan=False),
    "name": st.text("aä/", max_size=4),
    "tags": st.lists(st.text(max_size=2), max_size=3),
    "box": st.fixed_dictionaries({"x": st.integers(0, 9), "on": st.booleans()}),
    "nothing": st.none(),
}


def table_of(rows):
    return BlockTable(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))) if rows else NONE


@st.composite
def datasets(draw):
    """Return the block table of each shard, and the promoted columns of each of its samples."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=3))
    row = st.fixed_dictionaries({name: st.none() | VALUES[name] for name in names})
    return names, draw(st.lists(st.tuples(block_rows, st.lists(row, max_size=6)), max_size=3))


def write(folder, shards):
    """Write a dataset of indexes and side files, without shards."""
    entries, types = [], []
    for number, (blocks, rows) in enumerate(shards):
        builder, table = IndexBuilder(), table_of(blocks)
        for i, row in enumerate(rows):
            builder.add(f"{number}/{i}", 1024 * i, 1024, [("txt", 1024 * i + 512, 3, 7)], columns=row)
        facts = ShardFacts(
            f"a-{number}.tar", len(rows), 2**50, 2**50, f"{number:064x}", "none", 3, ("txt",) if rows else ()
        )
        rows_table = builder.table()
        entries.append(publish_index(STORAGE, str(folder), f"a-{number}.tar", rows_table, facts, table))
        types.append(promoted_columns(rows_table.schema))
    schema = pa.unify_schemas([pa.schema([]), *types], promote_options="permissive")
    schema = make_schema(list(schema))
    columns = {field.name: str(field.type) for field in schema}
    manifest = Manifest(tuple(entries), 3, ("txt",), columns=columns, url=str(folder))
    return publish_manifest(STORAGE, manifest, (table_of(blocks) for blocks, _ in shards), schema)


def all_rows(file):
    return [row for group in range(file.num_groups) for row in file.rows(file.schema.names, group).to_pylist()]


@given(dataset=datasets(), group_rows=st.integers(1, 5))
def test_side_files_say_what_the_indexes_say(dataset, group_rows, tmp_path_factory):
    names, shards = dataset
    folder = tmp_path_factory.mktemp("side")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_LEAST_GROUP_ROWS", group_rows)
        patch.setattr(parquet, "_MOST_GROUP_ROWS", group_rows)
        manifest = write(folder, shards)
    found = read_manifest(folder)
    file = BlockFile(found, STORAGE)

    assert found == manifest
    for number, (rows, _) in enumerate(shards):
        expected = open_index(STORAGE, str(folder), found.shards[number]).blocks
        assert file.table(number).to_bytes() == expected.to_bytes() == table_of(rows).to_bytes()
    everything = [row for _, rows in shards for row in rows]
    names = names if everything else []
    assert (found.column_file is not None) == bool(names)
    if found.column_file is None:
        return
    columns = ColumnFile(found, STORAGE)
    assert all_rows(columns) == [{name: row[name] for name in sorted(names)} for row in everything]
    assert {field.name: str(field.type) for field in columns.schema} == found.columns
    assert columns.num_groups == -(-len(everything) // group_rows)
    tables = columns_of_indexes(STORAGE, found, columns.schema)
    for group, rows in enumerate(regroup(tables, group_rows)):
        assert rows.equals(columns.rows(columns.schema.names, group))


@pytest.fixture
def dataset(tmp_path):
    shards = [
        ([(0, 1024, 7, 0, 1024), (1024, 512, 8, 1024, 512)], [{"label": i, "name": "x" * i} for i in range(5)]),
        ([(0, 512, 9, 0, 512)], [{"label": None, "name": "y"}]),
    ]
    return write(tmp_path, shards)


def test_a_block_file_is_an_array_of_numpy_of_36_bytes_a_block(dataset, tmp_path):
    path = tmp_path / dataset.block_file_url
    array = np.load(path)

    assert array.dtype.names == ("offset", "size", "crc32", "stored_offset", "stored_size")
    assert (array.dtype.itemsize, BLOCK_BYTES) == (36, 36)
    assert array.tolist() == [(0, 1024, 7, 0, 1024), (1024, 512, 8, 1024, 512), (0, 512, 9, 0, 512)]
    assert (dataset.block_file.size, dataset.block_file.sha256) == (
        path.stat().st_size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def test_the_bytes_of_a_block_file_are_these():
    data, facts = encode_blocks([table_of([(0, 1024, 7, 0, 1024)]), NONE, table_of([(1024, 512, 2**32 - 1, 3, 4)])])

    assert data[:10] == b"\x93NUMPY\x01\x00" + (len(data) - 72 - 10).to_bytes(2, "little")
    assert data[-72:].hex() == (
        "000000000000000000040000000000000700000000000000000000000004000000000000"
        "00040000000000000002000000000000ffffffff03000000000000000400000000000000"
    )  # fmt: skip
    assert facts.size == len(data)
    assert np.load(io.BytesIO(encode_blocks([])[0])).tolist() == []


def test_others_read_a_file_of_columns(dataset, tmp_path):
    assert pq.read_table(tmp_path / dataset.column_file_url).to_pylist() == [
        *[{"label": i, "name": "x" * i} for i in range(5)],
        {"label": None, "name": "y"},
    ]


def test_a_flipped_bit_in_the_block_file_is_an_error_for_the_shard_that_has_it(dataset, tmp_path):
    path = tmp_path / dataset.block_file_url
    whole = path.read_bytes()
    expected = [BlockFile(dataset, STORAGE).table(i).to_bytes() for i in range(2)]
    begin = len(whole) - 3 * BLOCK_BYTES
    for bit in range(8 * begin, 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        hit = int(bit // 8 >= begin + 2 * BLOCK_BYTES)

        with pytest.raises(DatasetError, match=rf"\.npy: is damaged \(its part of shard a-{hit}\.tar has the CRC-32"):
            BlockFile(dataset, STORAGE).table(hit)
        assert BlockFile(dataset, STORAGE).table(1 - hit).to_bytes() == expected[1 - hit]


def test_a_flipped_bit_in_the_file_of_columns_is_an_error_unless_nobody_reads_it(dataset, tmp_path):
    path = tmp_path / dataset.column_file_url
    whole = path.read_bytes()
    expected = all_rows(ColumnFile(dataset, STORAGE))
    unread = set()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            found = all_rows(ColumnFile(dataset, STORAGE))
        except DatasetError as error:
            assert error.url == str(path)  # noqa: PT017 - either an error or all rows
            continue
        assert found == expected
        unread.add(at)

    assert unread == {0, 1, 2, 3}  # the magic at its beginning, which only verify compares


@pytest.mark.parametrize("which", ["block_file", "column_file"])
def test_side_files_that_are_missing_cut_or_longer_are_errors(which, dataset, tmp_path):
    path = tmp_path / getattr(dataset, f"{which}_url")
    whole = path.read_bytes()

    def read():
        return BlockFile(dataset, STORAGE).table(1) if which == "block_file" else all_rows(ColumnFile(dataset, STORAGE))

    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(DatasetError, match="is damaged"):
            read()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read()


def test_a_manifest_whose_numbers_do_not_fit_its_side_files_is_an_error(dataset):
    file = dataset.block_file
    for size in (0, 7, file.size - 36, file.size + 36, 2**50):
        lie = replace(dataset, block_file=replace(file, size=size))
        with pytest.raises(DatasetError, match="is damaged"):
            BlockFile(lie, STORAGE).table(0)
    shards = (replace(dataset.shards[0], blocks=3), dataset.shards[1])
    with pytest.raises(DatasetError, match="is damaged"):
        BlockFile(replace(dataset, shards=shards), STORAGE).table(0)
    shards = (replace(dataset.shards[0], samples=6), dataset.shards[1])
    with pytest.raises(DatasetError, match="is damaged"):
        ColumnFile(replace(dataset, shards=shards), STORAGE)


def test_a_version_of_a_dataset_stays_beside_its_successor(dataset, tmp_path):
    entries = (replace(dataset.shards[0], sha256="ff" * 32), dataset.shards[1])
    before = (tmp_path / "manifest.json").read_bytes()
    second = replace(dataset, shards=entries, columns={}, column_file=None)
    publish_manifest(STORAGE, second, [BlockFile(dataset, STORAGE).table(i) for i in range(2)], pa.schema([]))

    assert (tmp_path / version_name(dataset.digest)).read_bytes() == before
    assert read_manifest(tmp_path).digest == second.digest
    assert read_manifest(tmp_path, digest=dataset.digest) == dataset
    assert names_in(tmp_path).count("__index__/manifest-*.json") == 2


@pytest.fixture
def record_calls(monkeypatch):
    """Return a function that makes a method of the storage record the name of each file, and the other arguments."""

    def record(method):
        calls, original = [], getattr(LocalStorage, method)

        def call(self, url, *arguments, **options):
            calls.append((url.rpartition("/")[2], *arguments))
            return original(self, url, *arguments, **options)

        monkeypatch.setattr(LocalStorage, method, call)
        return calls

    return record


def test_the_manifest_is_written_last(tmp_path, record_calls):
    created = record_calls("create")
    write(tmp_path, [([], [{"label": 1}])])
    written = [name for (name,) in created]

    assert written[-1] == "manifest.json"
    assert written[0].endswith(".parquet")
    assert len(set(written)) == len(written)


def test_publishing_reads_nothing_of_an_index_twice(tmp_path, record_calls):
    read = record_calls("read_range")
    shards = [([], [{"label": i, "name": "x" * i} for i in range(9)]) for _ in range(3)]
    manifest = write(tmp_path, shards)

    assert {name for name, _, _ in read} == {s.index_url.rpartition("/")[2] for s in manifest.shards}
    assert len(set(read)) == len(read)


def test_a_disk_that_does_not_take_columns_that_wait_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(
        StorageError, match=r"none \(TMPDIR, where the file of columns of .* waits until it is whole\): does not"
    ):
        write(tmp_path, [([], [{"label": 1}])])


def test_a_card_of_another_author_stays(tmp_path):
    (tmp_path / CARD_NAME).write_text("configs: []\n")
    write(tmp_path, [([], [{"label": 1}])])
    assert (tmp_path / CARD_NAME).read_text() == "configs: []\n"
    (tmp_path / CARD_NAME).unlink()
    for _ in range(2):
        write(tmp_path, [([], [{"label": 1}])])
        assert "*.tar" in (tmp_path / CARD_NAME).read_text()


def test_a_column_whose_values_are_too_large_for_a_file_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_FOOTER_BYTES", 100)

    writer = shardkit.ShardWriter(tmp_path / "a", columns={"label": "cls"})
    writer.write({"__key__": "a", "cls": 1})
    with pytest.raises(ArgumentError, match="cannot be written"):
        writer.__exit__(None, None, None)
    assert not (tmp_path / "a/manifest.json").exists()
