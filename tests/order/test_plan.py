"""Every sample comes once in an epoch, in an order that any rank can compute at any position."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardkit.order
from shardkit.errors import ArgumentError
from shardkit.hashing import Permutation, derive, mix64
from shardkit.order.plan import LANES, Batches, OrderPlan, default_lanes

RUNS = st.lists(st.integers(0, 60), max_size=12)
BLOCK = st.integers(1, 20)
NUMBER = st.integers(-(2**63), 2**64 - 1)
MANY_LANES = st.integers(1, 40)


def plan_of(runs, block_samples=4, *, seed=0, epoch=0, lanes=3, shuffle=True):
    return OrderPlan(runs, block_samples, seed=seed, epoch=epoch, lanes=lanes, shuffle=shuffle)


def whole(plan):
    return plan.samples_at(np.arange(plan.num_samples)).tolist()


def blocks_of(runs, block_samples):
    """Return the blocks, as lists of samples."""
    ends = list(itertools.accumulate(runs, initial=0))
    return [
        list(range(i, min(i + block_samples, end)))
        for start, end in itertools.pairwise(ends)
        for i in range(start, end, block_samples)
    ]


def permuted(n, key, x):
    """Return where a keyed permutation of range(n) puts x, as the docstring of shardkit.order defines it."""
    half = max(1, -(-(n - 1).bit_length() // 2))
    while True:
        left, right = x >> half, x % 2**half
        for r in (1, 2, 3, 4):
            left, right = right, left ^ mix64(right ^ mix64(key ^ r)) % 2**half
        x = left << half | right
        if x < n:
            return x


def specified(runs, block_samples, seed, epoch, lanes):
    """Return the order of an epoch as the docstring of shardkit.order defines it, in plain Python."""
    blocks = blocks_of(runs, block_samples)
    line = [None] * len(blocks)
    for number, block in enumerate(blocks):
        line[permuted(len(blocks), derive(seed, epoch, 1), number)] = block
    line = [sample for block in line for sample in block]
    num_samples = len(line)
    window = -(-num_samples // max(1, len(blocks))) or 1
    order = [None] * num_samples
    for lane in range(lanes):
        length = (num_samples - lane + lanes - 1) // lanes
        samples, line = line[:length], line[length:]
        first = derive(seed, epoch, 3, lane) % window
        cuts = [0, *range(first, length, window), length]
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            hashes = [derive(seed, epoch, 2, lane, number, i) for i in range(high - low)]
            mixed = sorted(range(high - low), key=hashes.__getitem__)
            for i, picked in enumerate(mixed):
                order[(low + i) * lanes + lane] = samples[low + picked]
    return order


@given(runs=RUNS, block_samples=BLOCK, seed=NUMBER, epoch=st.integers(0, 9), lanes=MANY_LANES)
@example(runs=[], block_samples=1, seed=0, epoch=0, lanes=1)
@example(runs=[0, 0], block_samples=4, seed=0, epoch=0, lanes=7)
@example(runs=[1], block_samples=16, seed=0, epoch=0, lanes=1)
@example(runs=[1], block_samples=16, seed=0, epoch=0, lanes=5)
@example(runs=[100], block_samples=1, seed=0, epoch=0, lanes=1)
@example(runs=[0, 3, 0, 0, 5, 0], block_samples=2, seed=0, epoch=0, lanes=2)
def test_the_order_is_a_permutation_and_the_one_that_the_readme_specifies(runs, block_samples, seed, epoch, lanes):
    order = whole(plan_of(runs, block_samples, seed=seed, epoch=epoch, lanes=lanes))

    assert sorted(order) == list(range(sum(runs)))
    assert order == specified(runs, block_samples, seed, epoch, lanes)


@given(runs=RUNS, block_samples=BLOCK, lanes=MANY_LANES, data=st.data())
def test_any_positions_are_known_without_those_before_them(runs, block_samples, lanes, data):
    plan = plan_of(runs, block_samples, lanes=lanes)
    order = whole(plan)
    positions = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=20)) if order else []

    assert plan.samples_at(positions).tolist() == [order[p] for p in positions]
    assert [int(plan.samples_at([p])[0]) for p in positions] == [order[p] for p in positions]


@given(runs=RUNS, block_samples=BLOCK, lanes=MANY_LANES, shuffle=st.booleans(), data=st.data())
def test_it_is_known_when_a_sample_comes(runs, block_samples, lanes, shuffle, data):
    plan = plan_of(runs, block_samples, lanes=lanes, shuffle=shuffle)
    order = whole(plan)
    samples = data.draw(st.lists(st.sampled_from(order), max_size=20)) if order else []

    assert plan.positions_of(order).tolist() == list(range(len(order)))
    assert plan.positions_of(samples).tolist() == [order.index(sample) for sample in samples]


@given(runs=RUNS, block_samples=BLOCK, lanes=MANY_LANES)
def test_it_is_known_how_much_the_ends_of_lanes_cost(runs, block_samples, lanes):
    plan = plan_of(runs, block_samples, lanes=lanes)
    found = plan.locate(np.arange(plan.num_samples))
    blocks = blocks_of(runs, block_samples)
    block_of = {sample: i for i, block in enumerate(blocks) for sample in block}
    read = {(lane, block_of[sample]) for lane, sample in zip(found.lanes.tolist(), found.samples.tolist(), strict=True)}

    assert sum(len(blocks[block]) for _, block in read) == plan.num_samples + plan.cut_samples()


def test_many_positions_are_known_as_few_are():
    plan = plan_of([100_000, 7, 200_001], 1000, lanes=60)
    positions = np.arange(plan.num_samples)
    at_once = plan.locate(positions)
    in_parts = [plan.locate(part) for part in np.array_split(positions, 17)]

    assert (np.sort(at_once.samples) == positions).all()
    for name in at_once._fields:
        assert (getattr(at_once, name) == np.concatenate([getattr(part, name) for part in in_parts])).all()


@given(runs=RUNS, block_samples=BLOCK, lanes=MANY_LANES)
def test_without_shuffle_the_order_is_the_datasets(runs, block_samples, lanes):
    plan = plan_of(runs, block_samples, lanes=lanes, shuffle=False)

    assert plan.lanes == 1
    assert whole(plan) == list(range(sum(runs)))


@given(runs=RUNS, block_samples=BLOCK, lanes=MANY_LANES, shuffle=st.booleans())
def test_after_release_no_sample_of_the_block_comes_in_the_lane(runs, block_samples, lanes, shuffle):
    plan = plan_of(runs, block_samples, lanes=lanes, shuffle=shuffle)
    block_of = {sample: i for i, block in enumerate(blocks_of(runs, block_samples)) for sample in block}
    found = plan.locate(np.arange(plan.num_samples))
    places = {}
    for position, (sample, lane, release) in enumerate(zip(*(part.tolist() for part in found), strict=True)):
        places.setdefault((lane, block_of[sample]), []).append((position, release))

    window = -(-plan.num_samples // max(1, plan.num_blocks))
    for (lane, _), seen in places.items():
        assert len({release for _, release in seen}) == 1
        last, release = seen[-1]
        assert lane == last % plan.lanes
        assert last < release <= last + window * plan.lanes
    assert len(places) <= plan.num_blocks + plan.lanes - 1


def test_a_lane_has_about_two_blocks_open():
    plan = plan_of(np.arange(300, 400), 16, lanes=60)
    found = plan.locate(np.arange(plan.num_samples))
    blocks = np.repeat(np.arange(plan.num_blocks), [len(b) for b in blocks_of(range(300, 400), 16)])[found.samples]
    firsts = np.unique(found.lanes * plan.num_blocks + blocks, return_index=True)[1]
    at = np.linspace(0, plan.num_samples, 50).astype(int)[1:-1]
    held = [((firsts <= p) & (found.release[firsts] > p)).sum() for p in at]

    assert np.mean(held) < 2.2 * plan.lanes
    assert max(held) < 2.5 * plan.lanes


@given(
    runs=RUNS,
    lanes=MANY_LANES,
    world_sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    global_batch=st.integers(1, 50),
)
def test_global_batches_are_the_same_for_every_world_size(runs, lanes, world_sizes, global_batch):
    plan = plan_of(runs, lanes=lanes)
    for start in range(0, plan.num_samples, global_batch):
        stop = min(start + global_batch, plan.num_samples)
        for world_size in world_sizes:
            dealt = [plan.deal(start, stop, rank, world_size).tolist() for rank in range(world_size)]

            assert sorted(itertools.chain(*dealt)) == list(range(start, stop))
            assert all(positions == sorted(positions) for positions in dealt)
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(lanes=MANY_LANES, world_size=st.integers(1, 20), start=st.integers(0, 100), size=st.integers(0, 100))
@example(lanes=4, world_size=5, start=3, size=7)
def test_ranks_get_what_the_readme_says(lanes, world_size, start, size):
    plan = plan_of([200], lanes=lanes)
    dealt = [plan.deal(start, start + size, rank, world_size).tolist() for rank in range(world_size)]
    positions = range(start, start + size)
    by_lane = sorted(positions, key=lambda p: (p % lanes, p // lanes))

    for rank, own in enumerate(dealt):
        if lanes % world_size == 0:
            assert own == [p for p in positions if p % lanes % world_size == rank]
        else:
            assert own == sorted(by_lane[size * rank // world_size : size * (rank + 1) // world_size])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60])
def test_a_world_size_that_divides_the_lanes_gives_each_rank_lanes_of_its_own(world_size):
    plan = plan_of([10_000], lanes=60)
    lanes = [
        {int(p) % 60 for start in range(0, 10_000, 100) for p in plan.deal(start, start + 100, rank, world_size)}
        for rank in range(world_size)
    ]

    assert sum(map(len, lanes)) == len(set().union(*lanes)) == 60


def test_other_world_sizes_give_each_rank_neighbouring_lanes():
    plan = plan_of([10_000], lanes=60)

    lanes = [{int(p) % 60 for p in plan.deal(0, 600, rank, 7)} for rank in range(7)]
    assert [max(own) - min(own) + 1 for own in lanes] == [len(own) for own in lanes]
    assert sum(map(len, lanes)) == 60 + 6


@given(
    runs=RUNS,
    lanes=MANY_LANES,
    schedule=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6),
    drop_last=st.booleans(),
)
def test_any_changes_of_ranks_and_batch_size_use_every_sample_once(runs, lanes, schedule, drop_last):
    plan = plan_of(runs, lanes=lanes)
    order = whole(plan)
    position, used = 0, []
    for step, (world_size, batch_size, num_batches) in enumerate(schedule):
        batches = Batches(plan.num_samples, batch_size, world_size, drop_last)
        last = step == len(schedule) - 1
        starved = batches.leaves_ranks_empty(position)
        counted = batches.count(position)
        taken = [[] for _ in range(world_size)]
        for _ in range(counted if last else min(num_batches, counted)):
            stop = batches.stop(position)
            for rank, mine in enumerate(taken):
                mine.append(plan.samples_at(plan.deal(position, stop, rank, world_size)).tolist())
            position = stop
        used += [sample for rank in taken for batch in rank for sample in batch]

        assert sorted(used) == sorted(order[:position])
        assert len({len(mine) for mine in taken}) == 1
        assert starved or all(batch for mine in taken for batch in mine)
        assert all(len(batch) <= batch_size + 1 for mine in taken for batch in mine)
    assert batches.stop(position) is None
    assert batches.count(position) == 0
    if drop_last:
        assert len(order) - position < batch_size * world_size
    else:
        assert sorted(used) == list(range(len(order)))


@given(num_samples=st.integers(0, 200), batch_size=st.integers(1, 9), world_size=st.integers(1, 9))
def test_only_a_rest_of_fewer_samples_than_ranks_joins_the_batch_before(num_samples, batch_size, world_size):
    batches = Batches(num_samples, batch_size, world_size, drop_last=False)
    stops = [0]
    while (stop := batches.stop(stops[-1])) is not None:
        stops.append(stop)
    *full, last = np.diff(stops).tolist() or [0]

    assert stops[-1] == num_samples
    assert set(full) <= {batch_size * world_size}
    assert last < (batch_size + 1) * world_size
    assert last >= world_size or not full
    assert [batches.count(position) for position in stops] == list(range(len(stops) - 1, -1, -1))
    assert batches.leaves_ranks_empty(0) == (0 < num_samples < world_size)


def test_a_rest_is_dropped_only_if_asked():
    assert Batches(10, 2, 2, drop_last=True).count() == 2
    assert Batches(10, 2, 2, drop_last=False).count() == 3
    assert Batches(9, 2, 2, drop_last=False).count() == 2
    assert Batches(9, 2, 2, drop_last=False).stop(4) == 9
    assert Batches(9, 2, 2, drop_last=True).stop(8) is None
    assert not Batches(9, 2, 2, drop_last=True).leaves_ranks_empty(8)
    assert Batches(9, 2, 2, drop_last=False).leaves_ranks_empty(8)


def test_seeds_and_epochs_do_not_alias():
    orders = {tuple(whole(plan_of([40], 1, seed=s, epoch=e))) for s in range(12) for e in range(12)}

    assert len(orders) == 144


def test_epochs_have_nothing_in_common():
    first, second = (np.argsort(whole(plan_of([20_000], 4, epoch=epoch, lanes=60))) for epoch in (0, 1))

    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_runs_may_be_blocks_of_which_a_selection_leaves_little():
    # 1,000 blocks of 64 samples, with 1 or 2 selected in each: windows are small too, so few blocks are open at once.
    runs = np.arange(1000) % 2 + 1
    plan = plan_of(runs, 64, lanes=10)
    found = plan.locate(np.arange(plan.num_samples))

    assert sorted(found.samples.tolist()) == list(range(1500))
    assert (found.release - np.arange(1500)).max() <= 4 * 10


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "lanes"),
    [
        *[(0, 1e6, 1), (1, 1e6, 1), (7, 1e6, 6), (59, 1e6, 30), (60, 1e6, 60), (239, 1e6, 120)],
        *[(10**6, 1e6, 240), (10**6, 1_066_667, 120), (10**6, 4e6, 60), (10**6, 1e9, 1), (10**6, 1, 3840)],
    ],
)
def test_lanes_follow_from_the_dataset_alone(num_blocks, block_bytes, lanes):
    assert default_lanes(num_blocks, block_bytes) == lanes


def test_lanes_are_numbers_that_many_world_sizes_divide():
    assert [n for n in LANES if n < 60] == [n for n in range(1, 60) if 60 % n == 0]
    assert [n for n in LANES if n >= 60] == [60 << i for i in range(7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": [3, -1]}, "run_samples must be"),
        ({"runs": [[3]]}, "run_samples must be"),
        ({"runs": [3], "block_samples": 0}, "block_samples must be at least 1, got 0"),
        ({"runs": [3], "lanes": 0}, "lanes must be at least 1, got 0"),
        ({"runs": [3], "seed": 0.5}, "seed must be a whole number"),
        ({"runs": [3], "epoch": "1"}, "epoch must be a whole number"),
    ],
)
def test_what_is_no_plan_is_an_error(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        plan_of(**arguments)


@pytest.mark.parametrize("position", [-1, 9])
def test_a_position_beyond_the_epoch_is_an_error(position):
    with pytest.raises(ArgumentError, match=r"positions must be in \[0, 9\)"):
        plan_of([5, 4]).samples_at([0, position])
    with pytest.raises(ArgumentError, match=r"samples must be in \[0, 9\)"):
        plan_of([5, 4]).positions_of([0, position])


VECTORS = json.loads(shardkit.order.__doc__.partition("Test vectors, as JSON::\n")[2])


def test_the_hash_is_that_of_the_test_vectors():
    assert [f"{mix64(x):#x}" for x in (0, 1, 2**64 - 1)] == VECTORS["mix64 of 0, 1, 2^64-1"]
    assert [f"{derive(*parts):#x}" for parts in ((), (0,), (1, 0), (0, 1))] == VECTORS["derive() (0) (1,0) (0,1)"]


def test_the_permutation_is_that_of_the_test_vectors():
    places = Permutation(10, key=derive(1, 2)).forward(np.arange(10)).tolist()

    assert places == VECTORS["permutation of 10, key derive(1,2)"]


def test_whole_plans_are_those_of_the_test_vectors():
    assert whole(plan_of([5, 4], 2, seed=0, epoch=0, lanes=2)) == VECTORS["plan [5,4] block 2 seed 0 epoch 0 lanes 2"]
    assert (
        whole(plan_of([9, 0, 3, 12], 4, seed=7, epoch=3, lanes=3))
        == VECTORS["plan [9,0,3,12] block 4 seed 7 epoch 3 lanes 3"]
    )
