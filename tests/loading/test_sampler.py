"""A stock DataLoader has the plan's order with any number of workers, and all ranks have the same number of batches."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import DataLoader

from shardkit.errors import ArgumentError
from shardkit.loading.loader import ShardLoader
from shardkit.loading.sampler import ShardSampler
from shardkit.packing.job import pack
from shardkit.reading.dataset import ShardDataset

COUNT = 151


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "digits"
    samples = [{"__key__": f"{i:04d}", "cls": i} for i in range(COUNT)]
    pack(samples, folder, shard_samples=40, block_bytes=3000, shuffle=False, progress=False, columns={"label": "cls"})
    return ShardDataset(folder, fields={"label": "cls"})


def epochs_of(sampler, count=2):
    return [list(sampler) for _ in range(count)]


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # if there are only two processors
@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_the_order_is_the_same_for_any_number_of_workers(num_workers, digits):
    loader = DataLoader(digits, batch_sampler=ShardSampler(digits, 16, seed=3), num_workers=num_workers)
    expected = epochs_of(ShardSampler(digits, 16, seed=3))

    assert len(loader) == len(expected[0]) == 10
    assert [labels(loader), labels(loader)] == expected
    assert expected[0] != expected[1]


@given(
    count=st.integers(0, COUNT),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_ranks_share_an_epoch_exactly_and_have_equally_many_batches(
    digits, count, batch_size, world_size, drop_last, shuffle, seed
):
    dataset = digits.subset(range(COUNT - count, COUNT))
    ranks = [
        ShardSampler(
            dataset, batch_size, seed=seed, drop_last=drop_last, shuffle=shuffle, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    if 0 < count < world_size and not drop_last:
        with pytest.raises(ArgumentError, match=rf"has {count} samples, fewer than the {world_size} ranks"):
            list(ranks[0])
        return
    found = [list(rank) for rank in ranks]
    seen = Counter(number for batches in found for batch in batches for number in batch)

    assert {len(batches) for batches in found} == {len(ranks[0])}
    assert all(batch for batches in found for batch in batches)
    assert set(seen.values()) <= {1}
    if drop_last:
        assert len(seen) == count // (batch_size * world_size) * batch_size * world_size
        assert {len(batch) for batches in found for batch in batches} <= {batch_size}
    else:
        assert sorted(seen) == list(range(count))
        assert all(len(batch) == batch_size for batches in found for batch in batches[:-1])


def test_fewer_samples_than_ranks_are_an_error_and_none_are_none(digits):
    three = digits.subset([1, 2, 3])
    with pytest.raises(
        ArgumentError, match="has 3 samples, fewer than the 4 ranks, and no rank may get an empty batch"
    ):
        list(ShardSampler(three, 2, rank=0, world_size=4))

    assert list(ShardSampler(three, 2, rank=0, world_size=4, drop_last=True)) == []
    assert list(ShardSampler(digits.subset([]), 2, rank=0, world_size=4)) == []
    assert [len(list(ShardSampler(three, 2, rank=rank, world_size=3))) for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_the_order_of_the_loader(world_size, digits):
    for rank in range(world_size):
        options = {"seed": 5, "rank": rank, "world_size": world_size, "lanes": 4}
        ours = ShardLoader(digits, 8, num_workers=1, **options)

        assert labels(ours) == list(ShardSampler(digits, 8, **options))


def test_long_epochs_are_planned_in_parts(digits, monkeypatch):
    whole = list(ShardSampler(digits, 4))
    monkeypatch.setattr("shardkit.loading.sampler._AT_A_TIME", 10)

    assert list(ShardSampler(digits, 4)) == whole


def test_every_iteration_is_the_next_epoch_and_an_epoch_can_be_set(digits):
    sampler = ShardSampler(digits, 16, seed=1)
    first, second, third = epochs_of(sampler, 3)
    sampler.set_epoch(np.int64(1))
    iter(sampler)  # a DataLoader with workers creates one iterator more than it uses

    assert epochs_of(sampler) == [second, third]
    assert first not in (second, third)
    assert list(ShardSampler(digits, 16, seed=2)) != first


def test_without_shuffling_it_is_the_order_of_the_dataset(digits):
    sampler = ShardSampler(digits, 40, shuffle=False)

    assert [number for batch in sampler for number in batch] == list(range(COUNT))
    assert [len(batch) for batch in sampler] == [40, 40, 40, 31]


def test_ranks_are_found_late_where_launchers_put_them(digits, monkeypatch):
    sampler = ShardSampler(digits, 10)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second_of_two = list(sampler)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    sampler.set_epoch(0)

    assert second_of_two == list(ShardSampler(digits, 10, rank=1, world_size=2))
    assert list(sampler) == list(ShardSampler(digits, 10, rank=0, world_size=3))


def test_arguments_that_cannot_be_are_errors(digits, monkeypatch):
    for options, problem in [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"lanes": 0}, "lanes must be at least 1"),
        ({"rank": 1}, "give both or neither"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, 2\)"),
        ({"dataset": [1, 2]}, "dataset is list, expected ShardDataset"),
    ]:
        with pytest.raises(ArgumentError, match=problem):
            ShardSampler(**{"dataset": digits, "batch_size": 4, **options})
    with pytest.raises(ArgumentError, match="epoch must be at least 0"):
        ShardSampler(digits, 4).set_epoch(-1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ArgumentError, match="give both or neither"):
        ShardSampler(digits, 4)


def test_as_sampler_instead_of_batch_sampler_it_is_an_error_that_says_so(digits):
    with pytest.raises(ArgumentError, match="passed to a DataLoader as batch_sampler="):
        next(iter(DataLoader(digits, sampler=ShardSampler(digits, 4))))


def test_it_can_be_pickled(digits):
    sampler = ShardSampler(digits, 4)
    list(sampler)

    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
