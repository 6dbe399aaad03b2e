"""Shards are few, full and equal, and splits never change; all of this is decided from sizes and keys alone."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError
from shardkit.hashing import hash_keys
from shardkit.packing.plan import assign_splits, check_splits, cut, plan_shards


@st.composite
def samples_and_capacity(draw):
    sizes = np.array(draw(st.lists(st.integers(1, 50), min_size=1, max_size=60)))
    return sizes, draw(st.integers(int(sizes.max()), 200))


def shard_sizes(sizes, starts):
    return [int(sizes[a:b].sum()) for a, b in pairwise(starts)]


def fewest(sizes, capacity, most):
    """Return the least number of shards, found by filling each shard as far as possible."""
    shards, size, count = 0, capacity, most
    for sample in sizes.tolist():
        if size + sample > capacity or count == most:
            shards, size, count = shards + 1, 0, 0
        size, count = size + sample, count + 1
    return shards


@given(samples_and_capacity(), st.none() | st.integers(1, 20))
def test_every_sample_is_in_one_of_the_fewest_shards_that_hold_them(given_samples, shard_samples):
    sizes, capacity = given_samples
    starts = cut(sizes, capacity=capacity, shard_samples=shard_samples).tolist()
    counts = np.diff(starts)

    assert starts[0] == 0
    assert starts[-1] == len(sizes)
    assert counts.min() >= 1
    assert counts.max() <= (shard_samples or len(sizes))
    assert max(shard_sizes(sizes, starts)) <= capacity
    assert len(counts) == fewest(sizes, capacity, shard_samples or len(sizes))


@given(samples_and_capacity())
def test_no_shard_is_smaller_than_the_mean_by_more_than_one_sample(given_samples):
    sizes, capacity = given_samples
    shards = shard_sizes(sizes, cut(sizes, capacity=capacity, shard_samples=None).tolist())

    assert min(shards) >= sum(shards) / len(shards) - sizes.max()


@given(st.integers(1, 500), st.integers(1, 40))
def test_equal_samples_make_shards_that_differ_by_one_sample_at_most(samples, shard_samples):
    sizes = np.full(samples, 1024)
    by_number = np.diff(cut(sizes, capacity=1 << 40, shard_samples=shard_samples))
    by_bytes = np.diff(cut(sizes, capacity=1024 * shard_samples + 1023, shard_samples=None))

    assert by_number.max() - by_number.min() <= 1
    assert by_bytes.max() - by_bytes.min() <= 1
    assert len(by_number) == len(by_bytes) == -(-samples // shard_samples)


def test_what_holds_no_samples_has_no_shards():
    assert cut(np.zeros(0, dtype=np.int64), capacity=10, shard_samples=None).tolist() == [0]


def test_a_plan_has_every_position_once_and_only_the_seed_decides_their_order():
    positions = np.arange(1000, 2000)
    sizes = np.full(2000, 512)

    def order(seed):
        return plan_shards(positions, sizes, capacity=51_200, shard_samples=None, seed=seed).order.tolist()

    assert sorted(order(0)) == positions.tolist()
    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(20)}) == 20
    assert order(None) == positions.tolist()


def test_an_order_has_no_memory_of_the_source_order():
    """Neighbours in the source are as far apart as in a random order: a third of the length on average."""
    order = plan_shards(np.arange(10_000), np.full(10_000, 512), capacity=1 << 40, shard_samples=None, seed=0).order
    place = np.empty(10_000)
    place[order] = np.arange(10_000)

    assert abs(np.abs(np.diff(place)).mean() / 10_000 - 1 / 3) < 0.02
    assert abs(np.corrcoef(place, np.arange(10_000))[0, 1]) < 0.03


def test_a_million_samples_are_planned():
    sizes = np.arange(1_000_000) % 977 + 512
    plan = plan_shards(np.arange(1_000_000), sizes, capacity=10_000, shard_samples=None, seed=1)

    assert len(plan) >= sizes.sum() / 10_000
    assert np.bincount(plan.order).max() == 1
    assert max(int(sizes[plan.positions(i)].sum()) for i in range(len(plan))) <= 10_000


def test_splits_have_their_shares():
    hashes = hash_keys(f"{i:08d}" for i in range(20_000))
    parts = assign_splits(hashes, {"train": 0.8, "val": 0.15, "test": 0.05}, None, list)

    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(20_000))
    for name, share in {"train": 0.8, "val": 0.15, "test": 0.05}.items():
        assert abs(len(parts[name]) / 20_000 - share) < 0.01


def test_a_sample_stays_in_its_split_when_data_is_added_or_comes_in_another_order():
    keys = [f"a/{i}" for i in range(500)]
    grown = [f"b/{i}" for i in range(300)] + keys[::-1]

    def split_of(keys):
        parts = assign_splits(hash_keys(keys), {"train": 0.7, "val": 0.3}, None, lambda: keys)
        return {keys[position]: name for name, positions in parts.items() for position in positions}

    before, after = split_of(keys), split_of(grown)

    assert {key: after[key] for key in keys} == before


def test_what_has_the_same_group_is_in_the_same_split():
    keys = [f"patient{i % 40}/{i}" for i in range(1000)]
    parts = assign_splits(hash_keys(keys), {"a": 0.5, "b": 0.5}, lambda key: key.split("/")[0], lambda: keys)
    groups = [{keys[p].split("/")[0] for p in positions} for positions in parts.values()]

    assert len(groups[0]) + len(groups[1]) == 40
    assert not groups[0] & groups[1]
    assert min(map(len, groups)) > 5


def test_the_assignment_is_pinned():
    """These samples always stay in val: a change here moves samples between splits in every user's next pack."""
    parts = assign_splits(hash_keys(map(str, range(100))), {"train": 0.9, "val": 0.1}, None, list)

    assert parts["val"].tolist() == [6, 37, 41, 48, 50, 54, 68, 70, 82, 93, 97, 99]


@pytest.mark.parametrize(
    "splits", [{}, {"train": 0.5}, {"train": 1.2, "val": -0.2}, {"train": 1.0, "val": 0.0}, {"train": float("nan")}]
)
def test_shares_that_are_no_shares_are_refused(splits):
    with pytest.raises(ArgumentError, match=r"expected positive shares that add up to 1, such as 0\.9 for train"):
        check_splits(splits)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_a_split_needs_the_name_of_a_folder(name):
    with pytest.raises(ArgumentError, match="cannot be the name of a folder and its shards"):
        check_splits({name: 1.0})
