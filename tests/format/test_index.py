"""An index holds every sample's place exactly, whatever fields it has, and is used only if it is whole."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import AccessError, ArgumentError, DatasetError, MissingFileError, StorageError
from shardkit.format import index as index_module
from shardkit.format.index import (
    MAX_BLOCK_SAMPLES,
    BlockTable,
    IndexBuilder,
    ShardFacts,
    ShardIndex,
    choose_block_samples,
    write_index,
)

NO_BLOCKS = BlockTable(*([np.zeros(0, dtype=np.int64)] * 5))
numbers = st.integers(0, 2**40)
members = st.dictionaries(
    st.sampled_from(["jpg", "txt", "seg.png", "cls"]),
    st.tuples(numbers, numbers, st.integers(0, 2**32 - 1)),
    min_size=1,
)
samples = st.lists(
    st.tuples(
        numbers,
        numbers,
        members,
        st.none() | st.text("aä/", max_size=4),
        st.none() | st.fixed_dictionaries({"n": numbers}),
    ),
    max_size=20,
)


def facts(count, fields=()):
    return ShardFacts("x.tar", count, 2048, 2048, "00" * 32, "none", 3, tuple(fields), plan="p")


def written(builder, count, blocks=NO_BLOCKS):
    file = io.BytesIO()
    write_index(file, builder.table(), facts(count, sorted(builder.fields)), blocks)
    return file


@given(samples, st.integers(1, 7))
def test_every_row_is_what_was_added_whatever_the_row_groups(given_samples, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "ROW_GROUP_ROWS", rows)
        builder = IndexBuilder()
        for i, (offset, size, places, source, columns) in enumerate(given_samples):
            builder.add(
                f"k{i}", offset, size, [(n, *place) for n, place in places.items()], columns=columns, source=source
            )
        file = written(builder, len(given_samples))
    index = ShardIndex(file, "x.parquet")
    fields = sorted({name for _, _, places, _, _ in given_samples for name in places})

    assert list(index.facts.fields) == fields
    assert index.has_source == any(source is not None for *_, source, _ in given_samples)
    for i, row in enumerate(index.rows().to_pylist()):
        offset, size, places, source, columns = given_samples[i]
        expected = {"__key__": f"k{i}", "__offset__": offset, "__size__": size}
        for name in fields:
            parts = places.get(name, (None, None, None))
            expected |= {f"{name}:{part}": v for part, v in zip(("offset", "size", "crc32"), parts, strict=True)}
        if index.has_source:
            expected["__source__"] = source
        if "n" in index.columns:
            expected["n"] = (columns or {}).get("n")
        assert row == expected


def test_facts_and_blocks_are_read_without_the_rows():
    blocks = BlockTable(*(np.arange(3) + i for i in range(5)))
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    index = ShardIndex(written(builder, 1, blocks), "x.parquet")

    assert index.facts == facts(1, ["txt"])
    assert len(index.blocks) == 3
    for name in ("offset", "size", "crc32", "stored_offset", "stored_size"):
        assert getattr(index.blocks, name).tolist() == getattr(blocks, name).tolist()


def test_types_do_not_depend_on_the_values():
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)], columns={"half": 0.5, "name": "x"}, source="a.txt")
    schema = builder.table().schema

    assert {name: str(schema.field(name).type) for name in schema.names} == {
        "__key__": "string", "__offset__": "int64", "__size__": "int64",
        "txt:offset": "int64", "txt:size": "int64", "txt:crc32": "uint32",
        "__source__": "string", "half": "double", "name": "string",
    }  # fmt: skip


def test_columns_without_a_common_type_are_an_error_also_across_row_groups(monkeypatch):
    monkeypatch.setattr(index_module, "ROW_GROUP_ROWS", 1)
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)], columns={"mixed": 1})
    builder.add("b", 1024, 1024, [("txt", 1536, 3, 7)], columns={"mixed": "text"})

    with pytest.raises(ArgumentError, match="their values have no common type"):
        builder.table()


def test_an_index_that_is_cut_anywhere_is_an_error():
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    data = written(builder, 1).getvalue()

    for cut in range(0, len(data), 7):
        with pytest.raises(DatasetError, match=r"x.parquet: is not an index of shardkit .* make it again"):
            ShardIndex(io.BytesIO(data[:cut]), "x.parquet")


def test_an_index_of_another_version_or_with_other_rows_is_refused(monkeypatch):
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    with pytest.raises(DatasetError, match="has 1 rows for 2 samples"):
        ShardIndex(written(builder, 2), "x.parquet")
    monkeypatch.setattr(index_module, "INDEX_VERSION", 9)
    file = written(builder, 1)
    monkeypatch.undo()

    with pytest.raises(DatasetError, match="is an index of version 9, this shardkit reads version 1; upgrade shardkit"):
        ShardIndex(file, "x.parquet")


@pytest.mark.parametrize("lost", ["__key__", "__offset__", "__size__", "txt:offset", "txt:size", "txt:crc32"])
def test_an_index_that_lacks_a_column_is_refused(lost):
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    none = np.zeros(0, dtype=np.int64)
    table = builder.table().drop_columns([lost])
    write_index(file := io.BytesIO(), table, facts(1, ["txt"]), BlockTable(none, none, none, none, none))

    with pytest.raises(DatasetError, match=f"x.parquet: lacks {lost}, which it should have for its fields"):
        ShardIndex(file, "x.parquet")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("samples", None, "a number is not an integer"), ("tar_size", [1], "a number is not an integer")],
        *[
            ("shard", 3, "a name is not text"),
            ("fields", [3], "a name is not text"),
            ("plan", {}, "a name is not text"),
        ],
        *[("file_size", -1, "a number is out of range"), ("tar_size", 2**63, "a number is out of range")],
        *[("block_samples", 0, "a number is out of range"), ("block_samples", True, "a number is not an integer")],
    ],
)
def test_an_index_whose_facts_are_none_is_refused(name, value, message):
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    none = np.zeros(0, dtype=np.int64)
    wrong = replace(facts(1, ["txt"]), **{name: value})
    write_index(file := io.BytesIO(), builder.table(), wrong, BlockTable(none, none, none, none, none))

    with pytest.raises(DatasetError, match=f"x.parquet: is not an index of shardkit .*{message}"):
        ShardIndex(file, "x.parquet")


@pytest.mark.parametrize("name", ["offset", "size", "crc32", "stored_offset", "stored_size"])
@pytest.mark.parametrize(
    "value", [np.array(1), np.arange(2), np.zeros((3, 1)), np.arange(4)], ids=["0", "2", "31", "4"]
)
def test_an_index_whose_block_table_has_columns_of_other_lengths_is_refused(name, value):
    blocks = replace(BlockTable(*(np.arange(3) for _ in range(5))), **{name: value.astype(np.int64)})

    with pytest.raises(
        DatasetError, match=r"x.parquet: is not an index .*: its block table is not one of columns of eq"
    ):
        ShardIndex(written(IndexBuilder(), 0, blocks), "x.parquet")


@pytest.mark.parametrize("name", ["offset", "size", "crc32", "stored_offset", "stored_size"])
def test_an_index_whose_block_table_has_a_negative_number_is_refused(name):
    blocks = replace(BlockTable(*(np.arange(3) for _ in range(5))), **{name: np.array([0, -(2**63), 2])})

    with pytest.raises(DatasetError, match=r"x.parquet: is not an index .*: its block table has a negative number"):
        ShardIndex(written(IndexBuilder(), 0, blocks), "x.parquet")


@pytest.mark.parametrize("metadata", [None, {"shardkit": "[" * 100_000}, {"shardkit": "7"}])
def test_a_parquet_file_of_somebody_else_is_no_index(metadata):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"__key__": ["a"]}).replace_schema_metadata(metadata), file)

    with pytest.raises(DatasetError, match="is not an index of shardkit"):
        ShardIndex(file, "x.parquet")


@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 10**9))
def test_blocks_have_at_least_one_sample_and_are_about_as_large_as_asked_for(count, mean, block_bytes):
    chosen = choose_block_samples(count, count * mean, block_bytes)

    assert 1 <= chosen <= MAX_BLOCK_SAMPLES
    if count and 1 < chosen < MAX_BLOCK_SAMPLES:
        assert abs(chosen * mean - block_bytes) <= mean / 2 + 1


@pytest.mark.parametrize("moment", ["when it is opened", "when its rows are read"])
@pytest.mark.parametrize("error", [AccessError, MissingFileError, StorageError])
def test_what_the_storage_says_is_said_as_it_is(moment, error):
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])

    class Failing(io.BytesIO):
        fails = moment == "when it is opened"

        def read(self, size=-1):
            if self.fails:
                raise error("a.parquet: is not to be had")
            return super().read(size)

    file = Failing(written(builder, 1).getvalue())

    def read():
        index = ShardIndex(file, "a.parquet")
        file.fails = True
        index.rows()

    with pytest.raises(error, match="is not to be had") as caught:
        read()
    assert type(caught.value) is error


@pytest.mark.parametrize("name", ["__key__", "__offset__", "__size__", "txt:offset", "txt:size", "txt:crc32"])
@pytest.mark.parametrize("row", range(3))
def test_a_null_in_a_row_is_damage(name, row):
    import pyarrow as pa

    builder = IndexBuilder()
    for key in "abc":
        builder.add(key, 0, 1024, [("txt", 512, 3, 7)])
    table = builder.table()
    column = table.column(name)
    values = [None if at == row else value for at, value in enumerate(column.to_pylist())]
    table = table.set_column(table.column_names.index(name), name, pa.array(values, column.type))
    write_index(file := io.BytesIO(), table, facts(3, ("txt",)), NO_BLOCKS)

    with pytest.raises(DatasetError, match=r"a\.parquet: is damaged \(a sample .*\); make it again"):
        ShardIndex(file, "a.parquet").rows()
