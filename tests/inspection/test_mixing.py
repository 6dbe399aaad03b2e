"""The figures of how well an order mixes are correct."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.filters import _shuffle

from shardkit.hashing import derive, mix64
from shardkit.inspection.mixing import (
    Course,
    Layout,
    _through_buffer,
    count_held,
    count_mates,
    follow_buffer,
    follow_permutation,
    follow_plan,
    measure,
    read_amplification,
    spread_run,
)
from shardkit.order.plan import Batches, OrderPlan

RUNS = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)


def layout_of(counts, block_samples=16):
    return Layout(np.array(counts, dtype=np.int64), block_samples)


def plan_of(layout, lanes, **options):
    return OrderPlan(layout.counts, layout.block_samples, seed=0, epoch=0, lanes=lanes, **options)


IMAGES = layout_of(np.random.default_rng(0).integers(384, 641, 256))  # 131 000 samples


class Draws:
    """A stand-in for Python's random generator in webdataset's buffer, which returns our numbers."""

    def __init__(self, key):
        self._numbers = (mix64(key ^ i) >> 11 for i in itertools.count())

    def randint(self, low, high):
        return low + int(next(self._numbers) * 2.0**-53 * (high - low + 1))


@pytest.mark.parametrize("buffer_samples", [1, 2, 99, 100, 101, 1000])
@pytest.mark.parametrize("num_samples", [0, 1, 150, 2999])
def test_the_buffer_is_webdatasets(num_samples, buffer_samples):
    theirs = list(_shuffle(iter(range(num_samples)), bufsize=buffer_samples, rng=Draws(7)))

    assert _through_buffer(np.arange(num_samples), buffer_samples, 7).tolist() == theirs


@given(counts=RUNS, block_samples=st.integers(1, 20))
def test_a_layout_knows_which_samples_lie_together(counts, block_samples):
    layout = layout_of(counts, block_samples)
    shards = [shard for shard, n in enumerate(counts) for _ in range(n)]
    blocks = [(shard, i // block_samples) for shard, n in enumerate(counts) for i in range(n)]
    numbers = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
    samples = np.arange(sum(counts))

    assert layout.shards_of(samples).tolist() == shards
    assert layout.blocks_of(samples).tolist() == [numbers[block] for block in blocks]
    assert layout.block_sizes(np.arange(len(numbers))).tolist() == [blocks.count(block) for block in numbers]
    assert layout.num_blocks == len(numbers)
    for groups, probability in ((shards, layout.same_shard), (blocks, layout.same_block)):
        pairs = [a == b for a, b in itertools.permutations(groups, 2)]
        assert probability == pytest.approx(np.mean(pairs) if pairs else 0)


@given(counts=RUNS, block_samples=st.integers(1, 20), limit=st.integers(1, 300))
def test_some_samples_are_whole_blocks(counts, block_samples, limit):
    layout = layout_of(counts, block_samples)
    samples = layout.some_samples(limit)
    blocks, sizes = np.unique(layout.blocks_of(samples), return_counts=True)

    assert len(set(samples.tolist())) == len(samples) > 0
    assert (sizes == layout.block_sizes(blocks)).all()


@given(groups=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=9))
def test_mates_are_counted(groups):
    counted = [batch.count(group) for batch in groups for group in batch]

    assert count_mates(np.array(groups)) == pytest.approx(np.mean(counted))


def test_a_random_permutation_is_the_measure_of_all():
    mixing = measure(follow_permutation(IMAGES, 256, key=1), IMAGES, 256, 0)

    assert mixing.effective_batch_by_shard == pytest.approx(1, abs=0.01)
    assert mixing.effective_batch_by_block == pytest.approx(1, abs=0.01)
    assert mixing.dispersion_by_shard == pytest.approx(1, abs=0.01)
    assert mixing.dispersion_by_block == pytest.approx(0.96, abs=0.01)  # blocks of 16 samples; the bias is 1/32 or more


def test_what_comes_shard_by_shard_is_not_mixed():
    layout = layout_of([64] * 100)
    mixing = measure(follow_plan(plan_of(layout, 1, shuffle=False), layout, 32), layout, 32, 0)

    assert mixing.effective_batch_by_shard == pytest.approx((1 + 31 * 63 / 6399 / 10) / (1 + 31 / 10))
    assert mixing.dispersion_by_shard == pytest.approx(0.01, rel=0.01)
    assert mixing.dispersion_by_block == pytest.approx(0.0025, rel=0.01)


def test_samples_that_lie_alone_have_nothing_to_be_spread():
    layout = layout_of([1] * 50, 1)
    mixing = measure(follow_permutation(layout, 5, key=1), layout, 5, 0)

    assert (mixing.dispersion_by_shard, mixing.effective_batch_by_shard) == (1, 1)


def test_a_loaders_order_mixes_images_as_promised_and_a_buffer_does_not():
    plan = plan_of(IMAGES, 240)
    ours = measure(follow_plan(plan, IMAGES, 256), IMAGES, 256, count_held(plan, IMAGES))
    theirs = measure(follow_buffer(IMAGES, 256, key=1), IMAGES, 256, 8000)

    assert ours.effective_batch_by_shard > 0.98
    assert ours.dispersion_by_shard > 0.95
    assert ours.held_samples * 60_000 < 512_000_000
    assert theirs.effective_batch_by_shard == pytest.approx(0.16, abs=0.02)
    assert theirs.dispersion_by_shard == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("world_size", [1, 4])
def test_some_samples_say_about_what_all_say(world_size):
    plan, size = plan_of(IMAGES, 60), 64 * world_size

    def figures(limit):
        courses = (
            follow_plan(plan, IMAGES, size, limit=limit),
            follow_permutation(IMAGES, size, key=1, limit=limit),
            follow_buffer(IMAGES, 64, key=1, world_size=world_size, limit=limit),
        )
        return np.array([list(vars(measure(course, IMAGES, size, 0)).values()) for course in courses])

    # The few simulated shards include the beginning and the end of a buffer, which mix less.
    assert figures(1 << 15) == pytest.approx(figures(1 << 18), abs=0.06)


@given(
    counts=RUNS,
    block_samples=st.integers(1, 9),
    lanes=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
)
def test_the_bytes_that_ranks_read_are_counted(counts, block_samples, lanes, batch_size, world_size):
    layout = layout_of(counts, block_samples)
    plan = plan_of(layout, lanes)
    batches = Batches(plan.num_samples, batch_size, world_size, drop_last=False)
    read, start = set(), 0
    while (stop := batches.stop(start)) is not None:
        for rank in range(world_size):
            found = plan.locate(plan.deal(start, stop, rank, world_size))
            blocks = layout.blocks_of(found.samples).tolist()
            read |= {(rank, *piece) for piece in zip(found.lanes.tolist(), blocks, strict=True)}
        start = stop
    counted = layout.block_sizes(np.array([block for _, _, block in read])).sum() / plan.num_samples

    assert read_amplification(plan, layout, batch_size, world_size) == pytest.approx(counted)


@pytest.mark.parametrize("world_size", [7, 32, 64])
def test_the_bytes_that_ranks_read_are_estimated_from_some_of_the_epoch(world_size):
    plan = plan_of(IMAGES, 240)
    whole, some = (read_amplification(plan, IMAGES, 256, world_size, limit=limit) for limit in (1 << 18, 1 << 15))

    assert 1.1 < whole < 1.3
    assert some == pytest.approx(whole, rel=0.015)


@pytest.mark.parametrize("block_samples", [1, 16, 488])
@pytest.mark.parametrize("lanes", [1, 15, 60])
def test_neighbours_are_spread_from_the_length_that_is_said(block_samples, lanes):
    layout = layout_of([4096, 4000, 96], block_samples)
    plan = plan_of(layout, lanes)
    positions = plan.positions_of(np.arange(8192))

    def spread(length):
        runs = positions[: 8192 // length * length].reshape(-1, length)
        return runs.var(axis=1, ddof=1).mean() ** 0.5 / (8192 / 12**0.5)

    length = spread_run(plan)

    assert length == next(2**n for n in range(1, 13) if spread(2**n) >= 0.97 or 2**n == 4096)
    assert length == 2 or block_samples > 1


def test_the_samples_that_are_held_are_counted():
    layout = layout_of(np.random.default_rng(1).integers(40, 80, 60), 8)
    plan = plan_of(layout, 20)
    found = plan.locate(np.arange(plan.num_samples))
    pieces, firsts = np.unique(found.lanes * layout.num_blocks + layout.blocks_of(found.samples), return_index=True)
    sizes, lasts = layout.block_sizes(pieces % layout.num_blocks), found.release[firsts]
    moments = [i * plan.num_samples // 8 for i in range(8)]

    assert count_held(plan, layout) == max(sizes[(firsts <= m) & (lasts > m)].sum() for m in moments)


def test_a_course_is_that_of_the_order():
    layout = layout_of([30, 30], 4)
    plan = plan_of(layout, 5)
    course = follow_plan(plan, layout, 7)

    assert isinstance(course, Course)
    assert course.batches.tolist() == plan.samples_at(np.arange(56)).reshape(8, 7).tolist()
    assert (plan.samples_at(course.positions.astype(int)) == course.samples).all()


def test_shards_that_stand_for_many_are_all_over_the_epoch():
    course = follow_buffer(IMAGES, 64, key=derive(1), limit=1 << 15)
    thirds = np.histogram(course.positions, 3, range=(0, IMAGES.num_samples))[0]

    assert len(course.samples) < 40_000
    assert thirds.min() > 0.8 * thirds.mean()


@pytest.mark.parametrize("world_size", [1, 3])
def test_part_of_a_large_shard_stands_for_all_of_it(world_size):
    large = layout_of([30_000] * 24)
    whole, part = (
        follow_buffer(large, 64, key=5, world_size=world_size, buffer_samples=50, limit=limit)
        for limit in (1 << 17, 1 << 12)
    )
    figures = [list(vars(measure(course, large, 64 * world_size, 0)).values()) for course in (whole, part)]

    assert len(part.samples) < len(whole.samples) / 4
    assert figures[1] == pytest.approx(figures[0], abs=0.06)


@pytest.mark.parametrize("counts", [[1 << 50, 6], [1 << 50] * 40])
def test_a_shard_of_any_size_is_measured_in_little_memory(counts):
    layout = layout_of(counts, 2)
    plan = plan_of(layout, 60)
    limit = 1 << 12
    courses = (
        follow_plan(plan, layout, 4, limit=limit),
        follow_buffer(layout, 4, key=1, limit=limit),
        follow_permutation(layout, 4, key=1, limit=limit),
    )

    assert max(course.samples.size + course.batches.size for course in courses) < 200_000
    for course in courses:
        assert 0 <= course.samples.min() <= course.samples.max() < course.layout.num_samples
        assert 0 < measure(course, layout, 4, 0).effective_batch_by_shard <= 2


def test_every_sample_comes_once_out_of_the_buffers():
    layout = layout_of([300, 0, 500, 200, 7])
    course = follow_buffer(layout, 16, key=derive(3), world_size=2, buffer_samples=50)

    assert sorted(course.positions.tolist()) == list(range(1007))
