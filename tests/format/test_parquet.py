"""A Parquet file is read as it was written, or refused before it is parsed, by its checksums and bounds."""

import datetime as dt
import hashlib
import io
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from shardkit.format import parquet
from shardkit.format.parquet import (
    CHUNKS,
    MAX_ROWS_BYTES,
    CheckedParquet,
    FileFacts,
    ParquetError,
    _pages,
    choose_group_rows,
    facts_of,
    write_parquet,
)

MIB = 1 << 20


LONG = dt.timedelta(days=100_000)  # more than 106 million days do not fit into Arrow's 64 bits
leaves = st.sampled_from(
    [
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.uint32(), st.integers(0, 2**32 - 1)),
        (pa.float64(), st.floats(allow_nan=False)),
        (pa.bool_(), st.booleans()),
        (pa.string(), st.text(max_size=5)),
        (pa.binary(), st.binary(max_size=5)),
        (pa.date32(), st.dates()),
        (pa.timestamp("us"), st.datetimes()),
        (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
        (pa.duration("us"), st.timedeltas(-LONG, LONG)),
        (pa.decimal128(9, 2), st.decimals(-999, 999, places=2)),
        (pa.null(), st.none()),
    ]
)


def deeper(inner):
    """Return a strategy for lists and structs of given values."""

    def of_list(one):
        return pa.list_(one[0]), st.lists(st.none() | one[1], max_size=3)

    def of_struct(ones):
        kind = pa.struct([(f"f{i}", one[0]) for i, one in enumerate(ones)])
        return kind, st.fixed_dictionaries({f"f{i}": st.none() | one[1] for i, one in enumerate(ones)})

    return inner.map(of_list) | st.lists(inner, min_size=1, max_size=2).map(of_struct)


types = st.recursive(leaves, deeper, max_leaves=3)


@st.composite
def tables(draw):
    """Return a table of up to 3 columns and 20 rows."""
    columns = draw(st.lists(types, min_size=1, max_size=3))
    count = draw(st.integers(0, 20))
    arrays = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind) for kind, values in columns
    ]
    return pa.table(arrays, names=[f"c{i}" for i in range(len(arrays))])


def written(table, group_rows=4096, metadata=None, **options):
    """Return a file's bytes, and the facts that a manifest records about it."""
    file = io.BytesIO()
    groups = (table.slice(start, group_rows) for start in range(0, len(table), group_rows))
    facts = write_parquet(file, groups, table.schema, metadata or {}, group_rows=group_rows, **options)
    return file.getvalue(), facts


def opened(data, facts=None):
    return CheckedParquet(lambda offset, size: data[offset : offset + size], len(data), facts)


def all_rows(file):
    """Return all rows of a file as a list of dicts, group by group."""
    return [row for group in range(file.num_groups) for row in file.read(file.schema.names, group).to_pylist()]


@given(table=tables(), group_rows=st.integers(1, 9))
def test_what_is_read_is_what_was_written_by_us_and_by_others(table, group_rows):
    data, facts = written(table, group_rows, {"said": "ä"})

    for told in (facts, None):
        file = opened(data, told)
        file.check_groups(len(table), group_rows)

        assert file.schema.remove_metadata().equals(table.schema)  # except for the name of list items
        assert all_rows(file) == table.to_pylist()
        assert file.metadata[b"said"] == "ä".encode()
        for group in range(file.num_groups):
            assert len(file.read([], group)) == len(file.read(["c0"], group))
    assert pq.read_table(io.BytesIO(data)).to_pylist() == table.to_pylist()


@given(table=tables(), group_rows=st.integers(1, 9))
def test_what_a_manifest_says_of_a_file_is_true(table, group_rows):
    data, facts = written(table, group_rows)
    footer = data[-facts.footer_size :]

    assert facts == facts_of(data, group_rows)
    assert facts == FileFacts(len(data), hashlib.sha256(data).hexdigest(), len(footer), crc32(footer), group_rows)
    assert int.from_bytes(footer[-8:-4], "little") + 8 == len(footer)


@given(table=tables(), group_rows=st.integers(1, 9), data=st.data())
def test_a_flipped_bit_is_an_error_if_what_has_it_is_read_and_else_changes_nothing(table, group_rows, data):
    whole, facts = written(table, group_rows)
    at = data.draw(st.integers(0, 8 * len(whole) - 1), label="bit")
    damaged = bytearray(whole)
    damaged[at // 8] ^= 1 << at % 8
    read_bytes = set()

    def read(offset, size):
        read_bytes.update(range(offset, offset + size))
        return bytes(damaged[offset : offset + size])

    try:
        found = all_rows(CheckedParquet(read, len(damaged), facts))
    except ParquetError as error:
        assert at // 8 in read_bytes
        assert "has the CRC-32" in str(error)  # noqa: PT017 - nothing was parsed
    else:
        assert at // 8 not in read_bytes
        assert found == table.to_pylist()


def test_every_checksum_is_compared():
    """Each checksum in the footer is made wrong, in an otherwise valid footer: only its column and group are lost."""
    table = pa.table({"a": [1, 2, 3, 4], "b": [["x"], [], None, ["y", "z"]], "c": [{"d": 1, "e": "f"}] * 4})
    data, facts = written(table, 2)
    file = opened(data, facts)
    digits = file.metadata[CHUNKS]
    leaves_of = {"a": 1, "b": 1, "c": 2}

    assert len(digits) == 28 * 2 * sum(leaves_of.values())
    for number in range(len(digits) // 28):
        wrong = bytearray(data)
        at = data.index(digits) + 28 * number + 20
        wrong[at] = ord("0") if wrong[at] != ord("0") else ord("1")
        lying = opened(bytes(wrong), facts_of(bytes(wrong), 2))
        refused = []
        for group in range(2):
            for name in table.column_names:
                try:
                    lying.read([name], group)
                except ParquetError as error:
                    assert "has the CRC-32" in str(error)  # noqa: PT017 - the refused ones are compared below
                    refused.append((group, name))
        names = [name for name, count in leaves_of.items() for _ in range(count)]
        assert refused == [(number // len(names), names[number % len(names)])]


def test_only_the_footer_is_read_first_and_then_the_columns_that_are_wanted():
    table = pa.table({name: [f"{name}{i}" * 50 for i in range(100)] for name in "abc"})
    data, facts = written(table, 50)
    seen = []

    def read(offset, size):
        seen.append((offset, size))
        return data[offset : offset + size]

    file = CheckedParquet(read, len(data), facts)
    assert seen == [(len(data) - facts.footer_size, facts.footer_size)]
    seen.clear()

    assert file.read(["b"], 1).to_pylist() == table.select(["b"]).slice(50).to_pylist()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 7}, "bytes, expected 7"),
        ({"footer_crc32": 0}, "its footer has the CRC-32 .*, expected 00000000"),
        ({"footer_size": 0}, "its footer has 0 bytes"),
        ({"footer_size": 33_000_000}, "its footer has 33,000,000 bytes, expected at most 32,000,000"),
    ],
)
def test_facts_of_another_file_are_an_error(change, message):
    data, facts = written(pa.table({"a": [1]}))
    wrong = FileFacts(**{name: getattr(facts, name) for name in FileFacts.__slots__} | change)

    with pytest.raises(ParquetError, match=message):
        opened(data, wrong)


def test_a_file_without_checksums_is_read_only_where_no_manifest_promises_them():
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), file)
    data = file.getvalue()

    assert all_rows(opened(data)) == [{"a": 1}, {"a": 2}]
    with pytest.raises(ParquetError, match="its footer has no checksums of its column chunks"):
        opened(data, facts_of(data, 4096))


@pytest.mark.parametrize("count", [0, 2, 3])
def test_other_checksums_than_there_are_column_chunks_are_refused(count):
    table = pa.table({"a": [1]}).replace_schema_metadata({CHUNKS: b"0" * 28 * count})
    file = io.BytesIO()
    pq.write_table(table, file)

    with pytest.raises(ParquetError, match=f"its footer has the places of {count} column chunks, which are not all"):
        opened(file.getvalue())


@pytest.mark.parametrize(
    "place", ["ffffffffffff00000010", "00000000000000000000", "000000000004ffffffff", "00000000000000000004"]
)
def test_column_chunks_that_are_not_where_the_footer_says_are_an_error(place):
    data, _ = written(pa.table({"a": [1, 2, 3]}))
    digits = opened(data).metadata[CHUNKS]
    offset, size = int(place[:12], 16), int(place[12:], 16)
    lie = place.encode() + b"%08x" % crc32(data[offset : offset + size])
    wrong = data.replace(digits, lie)

    with pytest.raises((ParquetError, OSError, pa.ArrowException)):
        opened(wrong, facts_of(wrong, 4096)).read(["a"], 0)


@pytest.mark.parametrize(
    ("rows", "group_rows", "is_right"),
    [(5, 2, True), (5, 3, False), (4, 2, False), (6, 2, False), (7, 2, False), (0, 2, False), (5, 5, False)],
)
def test_rows_that_are_not_in_groups_as_they_should_be_are_refused(rows, group_rows, is_right):
    data, facts = written(pa.table({"a": [1, 2, 3, 4, 5]}), 2)
    file = opened(data, facts)

    if is_right:
        file.check_groups(rows, group_rows)
    else:
        with pytest.raises(ParquetError, match="it has 5 rows in 3 groups"):
            file.check_groups(rows, group_rows)


def test_a_file_without_rows_has_no_groups():
    data, facts = written(pa.table({"a": pa.array([], pa.string())}))
    file = opened(data, facts)
    file.check_groups(0, 4096)

    assert (file.num_groups, file.schema.names) == (0, ["a"])
    with pytest.raises(ParquetError, match="it has no rows, expected 1"):
        file.check_groups(1, 4096)


def test_two_columns_of_one_name_are_refused():
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    file = io.BytesIO()
    pq.write_table(table, file)

    with pytest.raises(ParquetError, match="it has two columns with the same name"):
        opened(file.getvalue())


@given(rows=st.integers(0, 10**10), row_bytes=st.integers(1, 10**6))
def test_groups_are_few_rows_not_too_many_and_never_too_large(rows, row_bytes):
    chosen = choose_group_rows(rows, rows * row_bytes)

    assert 1 <= chosen <= 65_536
    assert chosen & (chosen - 1) == 0
    assert chosen == 1 or chosen * row_bytes <= MAX_ROWS_BYTES // 4
    if chosen < 65_536 and chosen * 2 * row_bytes <= MAX_ROWS_BYTES // 4:
        assert rows <= 1024 * chosen


BOMB = """
import resource, sys
import pyarrow as pa, pyarrow.parquet as pq
from shardkit.format.parquet import CheckedParquet, ParquetError
data = open(sys.argv[1], "rb").read()
CheckedParquet(lambda o, n: data[o:o + n], len(data), None).schema
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    file = CheckedParquet(lambda o, n: data[o:o + n], len(data), None)
    print(sum(file.read(file.schema.names, g).nbytes for g in range(file.num_groups)))
except ParquetError as error:
    print("refused", error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def same_text():
    return pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), ["x" * 1_000_000])


def shared_text():
    return pa.array(["x" * 1_000_000] * 500)


def zeros():
    return pa.array([bytes(1_000_000)] * 300)


def long_list():
    items = pa.array(np.zeros(40_000_000, np.int8))
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)


# Columns whose files are small but that take gigabytes in memory, with the options to write them.
BOMBS = {
    "equal texts by a dictionary": (same_text, {"use_dictionary": True}),
    "texts by what they share": (
        shared_text,
        {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}},
    ),
    "zeros that shrink": (zeros, {"use_dictionary": False}),
    "a long list": (long_list, {"use_dictionary": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_columns_that_would_take_gigabytes_are_refused_in_little_memory(kind, tmp_path):
    column, options = BOMBS[kind]
    path = tmp_path / "bomb.parquet"
    table = pa.table({"a": column()})
    pq.write_table(table, path, compression="zstd", row_group_size=65_536, store_schema=False, **options)
    del table
    pa.default_memory_pool().release_unused()  # otherwise this process would keep the memory, and forks would be slow
    done = subprocess.run([sys.executable, "-c", BOMB, path], capture_output=True, text=True, check=True)
    said, grown = done.stdout.splitlines()

    assert path.stat().st_size < 4 * MIB
    assert said.startswith("refused")
    assert int(grown) * 1024 < 3 * MAX_ROWS_BYTES


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.dictionary(pa.int8(), pa.string()))]
)
def test_a_column_of_values_in_a_dictionary_is_refused(kind):
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1], "b": pa.array([None], kind)}), file)

    with pytest.raises(ParquetError, match="column 'b' has values in a dictionary"):
        opened(file.getvalue())


def page_bytes(table, **options):
    """Return the bytes of the first column chunk of a table's file."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", write_page_checksum=True, **options)
    column = pq.read_metadata(file).row_group(0).column(0)
    starts = [start for start in (column.dictionary_page_offset, column.data_page_offset) if start is not None]
    return file.getvalue()[min(starts) : min(starts) + column.total_compressed_size], column.num_values


PAGES = [
    {"use_dictionary": False},
    {"use_dictionary": True},
    {"use_dictionary": False, "data_page_version": "2.0"},
    {"use_dictionary": True, "data_page_version": "2.0", "data_page_size": 100},
]


@pytest.mark.parametrize("options", PAGES)
@pytest.mark.parametrize("values", [[1, 2, 3], ["a", None, "bc"] * 50, [[1], [], None, [2, 3]]])
def test_page_headers_say_how_many_values_there_are(options, values):
    data, count = page_bytes(pa.table({"a": values}), **options)

    assert sum(page.values for page in _pages(data)) == count


@pytest.mark.parametrize("options", PAGES)
def test_pages_that_are_cut_anywhere_are_an_error_or_whole_pages(options):
    data, count = page_bytes(pa.table({"a": ["a", None, "bc"] * 50}), **options)
    ends = set()
    for cut in range(len(data)):
        try:
            values = sum(page.values for page in _pages(data[:cut]))
        except ParquetError:
            continue
        ends.add(cut)

        assert values < count or cut == len(data)
    assert 0 in ends
    assert len(ends) <= len(list(_pages(data)))


@given(data=st.binary(max_size=200))
def test_what_is_no_page_header_is_an_error_of_ours(data):
    try:
        pages = list(_pages(data))
    except ParquetError:
        return
    assert all(page.size >= 0 and page.values >= 0 for page in pages)


@given(options=st.sampled_from(PAGES), data=st.data())
def test_damaged_pages_are_an_error_of_ours_or_bounded(options, data):
    whole, _ = page_bytes(pa.table({"a": ["a", None, "bc"] * 5}), **options)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pages = list(_pages(bytes(damaged)))
    except ParquetError:
        return
    assert all(page.size >= 0 and page.values >= 0 for page in pages)


def test_a_struct_without_an_end_is_no_page_header():
    for data in (b"\x1c" * 10_000, b"\x15" + b"\xff" * 100, b"\x18\xff\xff\xff\xff\x0f", b"\x1d\x00"):
        with pytest.raises(ParquetError, match="a column has no valid page header at byte 0"):
            list(_pages(data))


def test_a_footer_larger_than_readers_accept_is_not_written(monkeypatch):
    monkeypatch.setattr(parquet, "MAX_FOOTER_BYTES", 1000)

    with pytest.raises(ParquetError, match="its footer would have"):
        written(pa.table({f"column {i}": [1] for i in range(20)}))
