"""Random numbers never change, and have the right distributions."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError
from shardkit.hashing import derive, mix64
from shardkit.transforms.rng import Rng


def drawn(rng):
    return [rng.bits(), rng.random(), rng.uniform(-1, 1), rng.integers(-5, 5), rng.choice("abc"), rng.permutation(5)]


def test_the_numbers_are_those_of_the_specification():
    rng = Rng(0)

    assert [rng.bits() for _ in range(40)] == [mix64(mix64(count)) for count in range(40)]
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
