"""Transforms are called as they ask to be, and their random numbers are fixed for ever."""

import math
import pickle
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs import Decoder
from shardkit.errors import ArgumentError, SampleError
from shardkit.hashing import derive, mix64
from shardkit.sample import FieldSelection
from shardkit.transforms import Rng, Transform, decode_fields

SAMPLE = {"__key__": "a/1", "__url__": "x.tar", "txt": "abc", "cls": 7, "seg": None}


def shifted(value, rng):
    return value + rng.integers(0, 1000)


def drawn(rng):
    return [rng.bits(), rng.random(), rng.uniform(-1, 1), rng.integers(-5, 5), rng.choice("abc"), rng.permutation(5)]


def test_the_numbers_are_those_of_the_specification():
    rng = Rng(0)

    assert [rng.bits() for _ in range(3)] == [mix64(mix64(0)), mix64(mix64(1)), mix64(mix64(2))]
    assert [hex(Rng(key).bits()) for key in (0, 1, derive(7, 3))] == [
        "0xa706dd2f4d197e6f",
        "0x8b4fda8c892b50e",
        "0xda7f9e11057fb266",
    ]
    assert drawn(Rng(7)) == [
        7259628554680249319,
        0.46519245062848724,
        -0.7844485345999186,
        4,
        "a",
        [4, 1, 3, 0, 2],
    ]
    assert Rng(7).normal(10, 2) == pytest.approx(8.047395990647354, rel=1e-14)


def test_equal_keys_draw_equal_numbers_and_other_keys_others():
    assert drawn(Rng(5)) == drawn(Rng(5)) == drawn(Rng(5 + (1 << 64))) == drawn(Rng(5 - (1 << 64)))
    assert len({Rng(key).bits() for key in range(10_000)}) == 10_000


def test_numbers_are_as_they_should_be_spread():
    rng = Rng(derive(1, 2))
    n = 20_000
    uniform = [rng.random() for _ in range(n)]
    normal = [rng.normal(3, 2) for _ in range(n)]
    dice = Counter(rng.integers(1, 7) for _ in range(n))
    orders = Counter(tuple(rng.permutation(3)) for _ in range(n))

    assert 0 <= min(uniform) < 0.001
    assert 0.999 < max(uniform) < 1
    assert math.isclose(sum(uniform) / n, 0.5, abs_tol=0.01)
    assert math.isclose(np.mean(normal), 3, abs_tol=0.05)
    assert math.isclose(np.std(normal), 2, abs_tol=0.05)
    assert sorted(dice) == [1, 2, 3, 4, 5, 6]
    assert max(dice.values()) - min(dice.values()) < 0.03 * n
    assert len(orders) == 6
    assert max(orders.values()) - min(orders.values()) < 0.03 * n


@given(st.integers(), st.lists(st.integers(), max_size=20))
def test_shuffling_keeps_what_there_is(key, values):
    shuffled = list(values)
    Rng(key).shuffle(shuffled)

    assert sorted(shuffled) == sorted(values)
    assert sorted(Rng(key).permutation(len(values))) == list(range(len(values)))


@given(st.integers(), st.integers(-(1 << 70), 1 << 70), st.integers(1, 1 << 64))
def test_whole_numbers_stay_in_their_range(key, low, size):
    assert low <= Rng(key).integers(low, low + size) < low + size


@pytest.mark.parametrize(("low", "high"), [(0, 0), (3, 2), (0, 2**64 + 1), (0.5, 3)])
def test_a_range_without_whole_numbers_or_with_too_many_is_an_error(low, high):
    with pytest.raises(ArgumentError, match=r"expected low < high, at most 2\*\*64 apart|must be a whole number"):
        Rng(0).integers(low, high)
    with pytest.raises(ArgumentError, match="values is empty"):
        Rng(0).choice(np.zeros(0))


def test_nothing_to_call_is_false_and_gives_the_sample_back():
    transform = Transform.parse(None)

    assert not transform
    assert not transform.needs_rng
    assert not Transform.parse({})
    assert transform(dict(SAMPLE)) == SAMPLE


class Turn:
    """A function with a state, as libraries have them."""

    def __call__(self, value, rng=None):
        return (value, rng)

    def method(self, value, *, rng):
        return (value, rng)


@pytest.mark.parametrize("function", [shifted, partial(shifted), Turn(), Turn().method])
def test_a_function_with_a_parameter_rng_is_given_one(function):
    of_field, of_sample = Transform.parse({"cls": function}), Transform.parse(function)
    rng = Rng(3)

    assert of_field.needs_rng
    assert of_sample.needs_rng
    assert of_field(dict(SAMPLE), rng)["cls"] in (7 + Rng(3).integers(0, 1000), (7, rng))


@pytest.mark.parametrize("function", [len, str, dict, int, partial(shifted, rng=Rng(1)), lambda **rng: rng])
def test_other_functions_are_not(function):
    assert not Transform.parse(function).needs_rng
    assert not Transform.parse({"cls": function}).needs_rng


def test_a_function_of_the_sample_may_return_anything():
    assert Transform.parse(lambda sample: (sample["cls"], 1))(dict(SAMPLE)) == (7, 1)


def test_functions_of_fields_leave_none_and_the_others_alone():
    transform = Transform.parse({"txt": str.upper, "seg": len, "cls": shifted})

    assert transform(dict(SAMPLE), Rng(0)) == {**SAMPLE, "txt": "ABC", "cls": shifted(7, Rng(0))}


def test_a_field_that_is_missing_is_an_error_that_names_it():
    with pytest.raises(
        SampleError, match=r"sample 'a/1' of shard x.tar: has no field 'jpg', which augment names"
    ) as error:
        Transform.parse({"cls": abs, "jpg": len}, name="augment")(dict(SAMPLE))

    assert (error.value.key, error.value.url, error.value.field) == ("a/1", "x.tar", "jpg")


def test_what_a_function_raises_is_raised_with_a_note_of_where():
    with pytest.raises(TypeError) as of_field:
        Transform.parse({"cls": len})(dict(SAMPLE))
    with pytest.raises(KeyError) as of_sample:
        Transform.parse(lambda sample: sample["jpg"])({"__key__": "b"})

    assert of_field.value.__notes__ == [
        "This was raised by transform= for field 'cls' of sample 'a/1' of shard x.tar",
    ]
    assert of_sample.value.__notes__ == ["This was raised by transform= for sample 'b'"]


@pytest.mark.parametrize("transform", [3, "flip", {"cls": 3}, ["flip"]])
def test_what_cannot_be_called_is_an_error_at_once(transform):
    with pytest.raises(ArgumentError, match=r"augment is .*, expected a function, or a mapping of names to functions"):
        Transform.parse(transform, name="augment")


def test_a_transform_goes_into_other_processes():
    transform = pickle.loads(pickle.dumps(Transform.parse({"cls": abs, "txt": len})))

    assert transform(dict(SAMPLE)) == {**SAMPLE, "txt": 3}


def test_index_columns_come_beside_the_fields_undecoded():
    raw = {"__key__": "a", "cls": memoryview(b"7"), "__columns__": {"cls": 8, "width": None}}
    selection = FieldSelection.parse({"label": "cls"})

    assert decode_fields(dict(raw), selection, Decoder()) == {"__key__": "a", "label": 7, "cls": 8, "width": None}
    assert decode_fields(dict(raw), selection, None) == {"__key__": "a", "label": b"7", "cls": 8, "width": None}
    assert type(decode_fields(dict(raw), selection, None)["label"]) is bytes
    del raw["__columns__"]["cls"]
    assert decode_fields(dict(raw), FieldSelection.parse(None), Decoder()) == {"__key__": "a", "cls": 7, "width": None}
    assert decode_fields(dict(raw), FieldSelection.parse(None), None) == {"__key__": "a", "cls": b"7", "width": None}


def test_fields_are_decoded_by_their_own_names_and_only_those_picked():
    raw = {"__key__": "a", "__url__": "x.tar", "cls": b"7", "json": b"{", "png": b"...", "txt": b"t"}
    selection = FieldSelection.parse({"label": "index;cls", "caption": "txt", "mask": "seg.png?"})

    decoded = {"__key__": "a", "__url__": "x.tar", "label": 7, "caption": "t", "mask": None}
    assert decode_fields(raw, selection, Decoder()) == decoded
    assert decode_fields(raw, selection, None) == {**decoded, "label": b"7", "caption": b"t"}
    assert decode_fields({"cls": b"1"}, FieldSelection.parse(None), Decoder()) == {"cls": 1}
    with pytest.raises(SampleError, match="has no field jpg"):
        decode_fields(raw, FieldSelection.parse(["jpg"]), Decoder())
