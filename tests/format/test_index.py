"""An index holds every sample's place exactly, whatever fields it has, and is used only if it is whole."""

import base64
import hashlib
import io
import json
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from shardkit.errors import AccessError, ArgumentError, DatasetError, MissingFileError, StorageError
from shardkit.format import index as index_module
from shardkit.format import parquet as parquet_module
from shardkit.format.index import (
    BLOCK_BYTES,
    MAX_BLOCK_SAMPLES,
    BlockTable,
    IndexBuilder,
    ShardFacts,
    ShardIndex,
    choose_block_samples,
    encode_index,
    publish_index,
    read_named_index,
)
from shardkit.format.parquet import CheckedParquet
from shardkit.storage.local import LocalStorage

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
    """Return an index's bytes, and the facts that a manifest records about it."""
    return encode_index(builder.table(), facts(count, sorted(builder.fields)), blocks)


def read(data, file=None):
    return ShardIndex.from_bytes(data, "x.parquet", file)


def one_sample():
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)])
    return builder


def format_1(table, described, blocks):
    """Return the bytes of an index in format 1: with the block table in the JSON, and no checksums."""
    described = {"version": 1, **described, "blocks": {k: v.tolist() for k, v in asdict(blocks).items()}}
    table = table.replace_schema_metadata({"shardkit": json.dumps(described, sort_keys=True)})
    file = io.BytesIO()
    pq.write_table(
        table, file, row_group_size=65_536, compression="zstd", use_dictionary=False, write_page_checksum=True
    )
    return file.getvalue()


def check_rows(index, given_samples):
    fields = sorted({name for _, _, places, _, _ in given_samples for name in places})

    assert list(index.facts.fields) == fields
    assert index.has_source == any(source is not None for *_, source, _ in given_samples)
    rows = index.rows().to_pylist()
    assert len(rows) == len(given_samples)
    for i, (row, (offset, size, places, source, columns)) in enumerate(zip(rows, given_samples, strict=True)):
        expected = {"__key__": f"k{i}", "__offset__": offset, "__size__": size}
        for name in fields:
            parts = places.get(name, (None, None, None))
            expected |= {f"{name}:{part}": v for part, v in zip(("offset", "size", "crc32"), parts, strict=True)}
        if index.has_source:
            expected["__source__"] = source
        if "n" in index.columns:
            expected["n"] = (columns or {}).get("n")
        assert row == expected


def build(given_samples):
    builder = IndexBuilder()
    for i, (offset, size, places, source, columns) in enumerate(given_samples):
        builder.add(f"k{i}", offset, size, [(n, *place) for n, place in places.items()], columns=columns, source=source)
    return builder


@given(samples, st.integers(1, 7), st.integers(1, 7))
def test_every_row_is_what_was_added_whatever_the_row_groups(given_samples, rows, built):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_BUILDER_ROWS", built)
        patch.setattr(parquet_module, "_LEAST_GROUP_ROWS", rows)
        patch.setattr(parquet_module, "_MOST_GROUP_ROWS", rows)
        data, file = written(build(given_samples), len(given_samples))
    for index in (read(data, file), read(data)):
        check_rows(index, given_samples)
        assert index.group_rows == file.group_rows == rows
        assert index.num_groups == -(-len(given_samples) // rows)
        wanted = ["__key__", "n", "__offset__", "nothing"]
        groups = [index.rows(wanted, group=group) for group in range(index.num_groups)]
        assert [len(group) for group in groups] == [
            min(rows, len(given_samples) - start) for start in range(0, len(given_samples), rows)
        ]
        for group, table in enumerate(groups):
            assert table.equals(index.rows(wanted).slice(group * rows, rows).combine_chunks())


@given(samples)
def test_an_index_of_format_1_is_read_for_ever(given_samples):
    blocks = BlockTable(*(np.arange(len(given_samples)) + i for i in range(5)))
    builder = build(given_samples)
    told = facts(len(given_samples), sorted(builder.fields))
    index = read(format_1(builder.table(), asdict(told), blocks))

    check_rows(index, given_samples)
    assert (index.version, index.facts, index.group_rows) == (1, told, 65_536)
    assert index.blocks.to_bytes() == blocks.to_bytes()


def test_the_bytes_of_a_block_table_are_these():
    table = BlockTable(*(np.array(column) for column in ([0, 1536], [1536, 512], [7, 2**32 - 1], [1, 2], [3, 4])))
    hidden = replace(table, stored_offset=np.zeros(0, np.int64), stored_size=np.zeros(0, np.int64))

    assert table.to_bytes().hex() == (
        "000000000000000000060000000000000700000001000000000000000300000000000000"
        "00060000000000000002000000000000ffffffff02000000000000000400000000000000"
    )  # fmt: skip
    assert hidden.to_bytes().hex() == (
        "000000000000000000060000000000000700000000000000000000000000000000000000"
        "00060000000000000002000000000000ffffffff00000000000000000000000000000000"
    )  # fmt: skip
    assert len(table.to_bytes()) == 2 * BLOCK_BYTES


@given(
    st.lists(
        st.tuples(numbers, numbers, st.integers(0, 2**32 - 1), numbers, st.integers(1, 2**40)), min_size=1, max_size=9
    ),
    st.booleans(),
)
def test_a_block_table_is_read_as_it_was_written(rows, is_stored):
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    table = BlockTable(*columns) if is_stored else BlockTable(*columns[:3], *([np.zeros(0, np.int64)] * 2))
    again = BlockTable.from_bytes(table.to_bytes())

    for name in BlockTable.__slots__:
        assert getattr(again, name).dtype == np.int64
        assert getattr(again, name).tolist() == getattr(table, name).tolist()


def test_what_a_manifest_says_of_an_index_is_true():
    data, file = written(one_sample(), 1, BlockTable(*(np.arange(3) + i for i in range(5))))
    footer = data[-file.footer_size :]

    assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert file.footer_size == int.from_bytes(footer[-8:-4], "little") + 8
    assert file.footer_crc32 == crc32(footer)
    metadata = pq.read_metadata(io.BytesIO(data)).metadata
    assert json.loads(metadata[b"shardkit"]) == {
        "version": 2,
        "group_rows": 4096,
        **asdict(facts(1)),
        "fields": ["txt"],
    }
    assert base64.b64decode(metadata[b"shardkit.blocks"]) == read(data).blocks.to_bytes()


def test_others_read_an_index(tmp_path):
    (tmp_path / "x.parquet").write_bytes(written(one_sample(), 1)[0])

    assert pq.read_table(tmp_path / "x.parquet").to_pylist() == [
        {"__key__": "a", "__offset__": 0, "__size__": 1024, "txt:offset": 512, "txt:size": 3, "txt:crc32": 7}
    ]


@pytest.mark.parametrize("file", [True, False], ids=["with what a manifest says", "without"])
def test_a_flipped_bit_anywhere_in_an_index_is_an_error_or_changes_nothing(file):
    builder = IndexBuilder()
    for i in range(3):
        builder.add(f"{i}", 1024 * i, 1024, [("txt", 1024 * i + 512, 3, 7)], columns={"n": i, "w": "w" * i})
    data, told = written(builder, 3, BlockTable(*(np.arange(3) + i for i in range(5))))
    expected = read(data)
    unnoticed = []
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            index = read(bytes(damaged), told if file else None)
            rows = index.rows()
        except DatasetError:
            continue
        unnoticed.append(bit // 8)
        if bit // 8 < len(data) - told.footer_size:  # a footer without a manifest has no checksum
            assert rows.equals(expected.rows())
    if file:
        assert unnoticed == []
    else:
        assert all(at >= len(data) - told.footer_size or at < 4 for at in unnoticed)


def test_facts_and_blocks_are_read_without_the_rows():
    blocks = BlockTable(*(np.arange(3) + i for i in range(5)))
    data, file = written(one_sample(), 1, blocks)
    read_bytes = []

    def read_range(offset, size):
        read_bytes.append((offset, size))
        return data[offset : offset + size]

    index = ShardIndex(
        lambda *, fresh: parquet_module.CheckedParquet(read_range, len(data), file),  # noqa: ARG005
        "x.parquet",
    )

    assert read_bytes == [(len(data) - file.footer_size, file.footer_size)]

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
    monkeypatch.setattr(index_module, "_BUILDER_ROWS", 1)
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 7)], columns={"mixed": 1})
    builder.add("b", 1024, 1024, [("txt", 1536, 3, 7)], columns={"mixed": "text"})

    with pytest.raises(ArgumentError, match="their values have no common type"):
        builder.table()


def test_an_index_that_is_cut_anywhere_is_an_error():
    data, file = written(one_sample(), 1)

    for cut in range(len(data)):
        for told in (None, file):
            with pytest.raises(DatasetError, match=r"x.parquet: is not an index of shardkit .* make it again"):
                read(data[:cut], told)


def test_an_index_with_other_rows_than_it_says_is_refused():
    with pytest.raises(DatasetError, match="it has 1 rows in 1 groups, expected 2"):
        read(written(one_sample(), 2)[0])


@pytest.mark.parametrize("version", [0, 3, 9, "2", None])
def test_an_index_of_another_version_is_refused(version, monkeypatch):
    monkeypatch.setattr(index_module, "FORMAT_VERSION", version)
    data, file = written(one_sample(), 1)
    monkeypatch.undo()

    message = f"is an index of version {version!r}, this shardkit reads versions 1 to 2; upgrade shardkit"
    with pytest.raises(DatasetError, match=message):
        read(data, file)


@pytest.mark.parametrize("rows", [0, -1, 65_537, "4096", None, True, 1.5])
def test_an_index_whose_groups_cannot_be_is_refused(rows, monkeypatch):
    told = {"version": 2, "group_rows": rows, **asdict(facts(1, ["txt"]))}
    monkeypatch.setattr(json, "dumps", lambda *_, **__: json.JSONEncoder().encode(told))
    data, file = written(one_sample(), 1)
    monkeypatch.undo()

    with pytest.raises(DatasetError, match=f"x.parquet: is not an index .*: has groups of {rows!r} rows"):
        read(data, file)


@pytest.mark.parametrize("lost", ["__key__", "__offset__", "__size__", "txt:offset", "txt:size", "txt:crc32"])
def test_an_index_that_lacks_a_column_is_refused(lost):
    data, file = encode_index(one_sample().table().drop_columns([lost]), facts(1, ["txt"]), NO_BLOCKS)

    with pytest.raises(DatasetError, match=f"x.parquet: lacks {lost}, which an index of its fields must have"):
        read(data, file)


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
    wrong = replace(facts(1, ["txt"]), **{name: value})

    for data in (
        encode_index(one_sample().table(), wrong, NO_BLOCKS)[0],
        format_1(one_sample().table(), asdict(wrong), NO_BLOCKS),
    ):
        with pytest.raises(DatasetError, match=f"x.parquet: is not an index of shardkit .*{message}"):
            read(data)


@pytest.mark.parametrize("name", ["offset", "size", "crc32", "stored_offset", "stored_size"])
@pytest.mark.parametrize(
    "value", [np.array(1), np.arange(2), np.zeros((3, 1)), np.arange(4)], ids=["0", "2", "31", "4"]
)
def test_an_index_of_format_1_whose_block_table_has_columns_of_other_lengths_is_refused(name, value):
    blocks = replace(BlockTable(*(np.arange(3) for _ in range(5))), **{name: value.astype(np.int64)})

    with pytest.raises(
        DatasetError, match=r"x.parquet: is not an index .*: its block table is not one of columns of eq"
    ):
        read(format_1(IndexBuilder().table(), asdict(facts(0)), blocks))


@pytest.mark.parametrize("blocks", [b"", b"!", b"AAAA", base64.b64encode(bytes(35)), base64.b64encode(bytes(37))])
def test_an_index_whose_block_table_has_no_whole_rows_is_refused(blocks, monkeypatch):
    monkeypatch.setattr(base64, "b64encode", lambda _: blocks)
    data, file = written(one_sample(), 1)
    monkeypatch.undo()
    if not blocks:
        assert len(read(data, file).blocks) == 0
        return

    with pytest.raises(DatasetError, match=r"x.parquet: is not an index of shardkit"):
        read(data, file)


@pytest.mark.parametrize("name", ["offset", "size", "crc32", "stored_offset", "stored_size"])
def test_an_index_whose_block_table_has_a_negative_number_is_refused(name):
    blocks = replace(BlockTable(*(np.arange(3) for _ in range(5))), **{name: np.array([0, -(2**63), 2])})
    wrong = [format_1(IndexBuilder().table(), asdict(facts(0)), blocks)]
    if name != "crc32":  # which is unsigned in format 2
        wrong.append(written(IndexBuilder(), 0, blocks)[0])

    for data in wrong:
        with pytest.raises(DatasetError, match=r"x.parquet: is not an index .*: its block table has a negative number"):
            read(data)


@pytest.mark.parametrize("metadata", [None, {"shardkit": "[" * 100_000}, {"shardkit": "7"}])
def test_a_parquet_file_of_somebody_else_is_no_index(metadata):
    file = io.BytesIO()
    pq.write_table(pa.table({"__key__": ["a"]}).replace_schema_metadata(metadata), file)

    with pytest.raises(DatasetError, match="is not an index of shardkit"):
        read(file.getvalue())


def test_an_index_is_known_by_its_name_where_no_manifest_lists_it(tmp_path):
    storage, folder = LocalStorage(), str(tmp_path)
    entry = publish_index(storage, folder, "x.tar", one_sample().table(), facts(1, ["txt"]), NO_BLOCKS)
    name = entry.index_url.removeprefix("__index__/")
    index, file = read_named_index(storage, folder, name)

    assert (index.facts, index.sample_keys(), file) == (facts(1, ["txt"]), ["a"], entry.index)
    other = name.replace("x.", "y.")
    (tmp_path / "__index__" / name).rename(tmp_path / "__index__" / other)
    with pytest.raises(DatasetError, match=f"{other}: does not match its name"):
        read_named_index(storage, folder, other)
    with pytest.raises(FileNotFoundError):
        read_named_index(storage, folder, name)
    (tmp_path / "__index__" / name).write_bytes((tmp_path / "__index__" / other).read_bytes()[:-1])
    with pytest.raises(DatasetError, match=f"{name}: is not an index of shardkit"):
        read_named_index(storage, folder, name)


@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 10**9))
def test_blocks_have_at_least_one_sample_and_are_about_as_large_as_asked_for(count, mean, block_bytes):
    chosen = choose_block_samples(count, count * mean, block_bytes)

    assert 1 <= chosen <= MAX_BLOCK_SAMPLES
    if count and 1 < chosen < MAX_BLOCK_SAMPLES:
        assert abs(chosen * mean - block_bytes) <= mean / 2 + 1


@pytest.mark.parametrize("moment", ["when it is opened", "when its rows are read"])
@pytest.mark.parametrize("error", [AccessError, MissingFileError, StorageError])
def test_what_the_storage_says_is_said_as_it_is(moment, error):
    fails = moment == "when it is opened"

    data, described = encode_index(one_sample().table(), facts(1, ("txt",)), NO_BLOCKS)

    def read_part(offset, size):
        if fails:
            raise error("a.parquet: is not to be had")
        return data[offset : offset + size]

    def read():
        nonlocal fails
        index = ShardIndex(lambda *, fresh: CheckedParquet(read_part, len(data), described), "a.parquet")  # noqa: ARG005
        fails = True
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
    data, _ = encode_index(table, facts(3, ("txt",)), NO_BLOCKS)

    with pytest.raises(DatasetError, match=r"a\.parquet: is damaged \(a sample .*\); make it again"):
        ShardIndex.from_bytes(data, "a.parquet").rows()
