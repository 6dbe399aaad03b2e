"""Random choices never change, and are fair enough."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import hashing
from shardkit.hashing import Permutation, derive, hash_key, hash_keys, mix64, mix64_array, shuffled

UINT64 = st.integers(0, (1 << 64) - 1)


def test_the_numbers_are_those_of_splitmix64():
    # Its first outputs from the state 1234567, as given by Rosetta Code and Java's SplittableRandom.
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % (1 << 64) for i in range(5)]

    assert [mix64(state) for state in states] == [
        *[6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
    ]


@given(numbers=st.lists(UINT64, max_size=20))
def test_arrays_are_mixed_as_numbers_are(numbers):
    assert mix64_array(np.array(numbers, dtype=np.uint64)).tolist() == [mix64(number) for number in numbers]


@given(a=st.lists(UINT64, max_size=3), b=st.lists(UINT64, max_size=3))
def test_other_parts_are_another_key(a, b):
    assert (derive(*a) == derive(*b)) == (a == b)


def test_keys_are_hashed_by_blake2b():
    keys = ["", "a/0001", "ä", "\udce4"]

    expected = [hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys]
    assert hash_keys(keys).tolist() == [int.from_bytes(digest, "little") for digest in expected]
    assert hash_keys([]).dtype == np.uint64
    assert hash_key("a/0001") == 0xB666E45E594DC87E


@given(n=st.integers(0, 300), key=UINT64)
def test_every_element_comes_once(n, key):
    assert sorted(shuffled(n, key=key).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_many_elements_come_once(n):
    assert (np.sort(shuffled(n, key=7)) == np.arange(n)).all()


def test_any_position_is_known_without_the_others():
    n = 10**12
    positions = np.array([0, 1, n // 2, n - 1])
    places = Permutation(n, key=3).forward(positions)

    assert ((places >= 0) & (places < n)).all()
    assert places.tolist() == [int(Permutation(n, key=3).forward(np.array([p]))[0]) for p in positions]


def test_the_chunks_that_it_is_made_in_do_not_matter(monkeypatch):
    in_one = shuffled(1000, key=5).tolist()
    monkeypatch.setattr(hashing, "_CHUNK", 7)

    assert shuffled(1000, key=5).tolist() == in_one


def test_an_order_is_pinned():
    assert shuffled(10, key=derive(1, 2)).tolist() == [2, 4, 5, 6, 8, 0, 7, 9, 3, 1]


def test_every_element_comes_to_every_place_about_equally_often():
    counts = np.zeros((100, 100), dtype=np.int64)
    for key in range(10_000):
        counts[np.arange(100), shuffled(100, key=derive(key))] += 1

    assert counts.min() > 50  # 100 expected, with a standard deviation of 10
    assert counts.max() < 150
