"""A condition selects the rows that satisfy it, also of shards whose columns are missing or null."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError
from shardkit.reading.filters import Filter

TYPES = {"label": pa.int64(), "width": pa.float64(), "__key__": pa.string()}
OPERATORS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
conditions = st.tuples(st.just("label"), st.sampled_from(sorted(OPERATORS)), st.integers(-2, 6))


@given(
    labels=st.lists(st.none() | st.integers(-3, 7), max_size=20),
    where=st.lists(st.lists(conditions, min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_rows_are_selected_as_python_would(labels, where):
    rows = pa.table({"label": pa.array(labels, type=pa.int64())})
    expected = [
        i
        for i, label in enumerate(labels)
        if label is not None and any(all(OPERATORS[op](label, value) for _, op, value in every) for every in where)
    ]

    assert Filter(where, TYPES).select(rows).tolist() == expected
    assert Filter(where[0], TYPES).select(rows).tolist() == Filter([where[0]], TYPES).select(rows).tolist()


@pytest.mark.parametrize("missing", [{}, {"label": pa.nulls(3)}])
def test_a_column_that_a_shard_does_not_have_is_null_there(missing):
    rows = pa.table({"__key__": ["a", "b", "c"], **missing})

    assert Filter([("label", "==", 3)], TYPES).select(rows).tolist() == []
    assert Filter(pc.field("label").is_null(), TYPES).select(rows).tolist() == [0, 1, 2]
    assert Filter(pc.field("label").is_null() & (pc.field("__key__") > "a"), TYPES).select(rows).tolist() == [1, 2]


def test_a_column_that_is_null_throughout_a_shard_has_the_type_that_it_has_elsewhere():
    starts = Filter(pc.starts_with(pc.field("__key__"), "a"), TYPES)

    assert starts.select(pa.table({"__key__": pa.nulls(3)})).tolist() == []
    assert starts.select(pa.table({"__key__": ["b", "ab"]})).tolist() == [1]


def test_only_the_columns_that_it_is_about_are_needed():
    assert Filter([("label", "==", 3)], TYPES).needed == ["label"]
    assert Filter((pc.field("width") > 2) | (pc.field("__key__") == "a"), TYPES).needed == ["width", "__key__"]
    assert len(Filter(pc.scalar(True), TYPES).needed) == 1


def test_another_type_in_a_shard_than_the_manifest_says_is_an_error():
    condition = Filter([("label", "==", 3)], TYPES)

    with pytest.raises(ArgumentError, match=r"no kernel matching.*the index has the columns label, width, __key__"):
        condition.select(pa.table({"label": [["a"], ["b"]]}))
    assert condition.select(pa.table({"label": pa.array([1, 3], type=pa.int8())})).tolist() == [1]
