"""A condition selects the rows that satisfy it, even in shards whose columns are missing or null."""

from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError
from shardkit.reading.filters import Filter

TYPES = {"label": pa.int64(), "width": pa.float64(), "__key__": pa.string()}
OPERATORS = {
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
collections = st.lists(st.integers(-2, 6), max_size=3).flatmap(lambda some: st.sampled_from([some, (*some,), {*some}]))
conditions = st.sampled_from(sorted(OPERATORS)).flatmap(
    lambda sign: st.tuples(st.just("label"), st.just(sign), collections if sign.endswith("in") else st.integers(-2, 6))
)


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


@pytest.mark.parametrize("nothing", [[], (), set(), frozenset(), range(0), np.array([]), {}.keys(), pa.array([])])
@pytest.mark.parametrize("column", ["label", "width", "name", "day", "is_good", "__key__"])
def test_nothing_is_in_an_empty_collection_and_all_is_not(column, nothing):
    types = {**TYPES, "name": pa.string(), "day": pa.timestamp("us"), "is_good": pa.bool_()}
    values = {"day": [datetime(2026, 1, 1), None], "is_good": [True, None], "label": [1, None], "width": [1.5, None]}  # noqa: DTZ001
    rows = pa.table({column: pa.array(values.get(column, ["a", None]), type=types[column])})

    assert Filter([(column, "in", nothing)], types).select(rows).tolist() == []
    assert Filter([(column, "not in", nothing)], types).select(rows).tolist() == [0]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ([("label", "in", 3)], "'int' object is not iterable"),
        ([("name", "in", "abc")], "'abc' is not a list of values"),
        ([("label", "~", 3)], '"~" is not a valid operator in predicates'),
        ([("label", "==")], "not enough values"),
        ([], "index out of range"),
        ([[]], "index out of range"),
        ("label", "not enough values"),
        (3, "not subscriptable"),
    ],
)
def test_what_is_no_condition_is_an_error_that_shows_one(where, problem):
    with pytest.raises(
        ArgumentError, match=rf"where is .*{problem}.*expected an expression.*\[\(\"label\", \"==\", 3\)\]"
    ):
        Filter(where, TYPES)


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
