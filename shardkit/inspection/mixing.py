"""Measure how well an order mixes a dataset: an order plan, webdataset's buffer, or a uniform permutation.

Only the numbers of samples are needed, no data. In a large dataset, only some batches, shards and blocks are measured,
spread over the whole epoch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardkit.hashing import Permutation, derive, mix64_array, shuffled
from shardkit.order.plan import Batches, IntArray, OrderPlan, prefix_sums

CORRELATION = 0.1
"""The assumed similarity of two samples of one shard or block (intraclass correlation)."""

BUFFER_SAMPLES = 1000
BUFFER_WORKERS = 8
_BUFFER_INITIAL = 100  # by default, webdataset's shuffle() yields samples as soon as it holds this many

LIMIT = 1 << 20
"""Up to this number, all samples are measured; of more samples, about this number."""

# If not all samples are measured:
_PART_OF_LIMIT = 4  # in the simulation of a buffer, a shard has at most the limit divided by this, ...
_BUFFERS_A_SHARD = 4  # ... or this many times the buffer's size, if that is more
_STRETCHES = 16  # the number of stretches of consecutive batches
_SHARDS = 256
_MOMENTS = 8  # the number of moments in the epoch at which open blocks are counted

_RUN_SAMPLES = 1 << 16  # the samples measured for each length of runs of neighbours
_SPREAD = 0.97  # this fraction of a random order's standard deviation: hardly any run misses a quarter of the epoch


@dataclass(frozen=True)
class Layout:
    """How samples are grouped into shards and blocks.

    Attributes:
        counts: The number of samples in each shard: int64.
        block_samples: The number of samples in a block; the last block of a shard may have fewer.
    """

    counts: IntArray
    block_samples: int

    @cached_property
    def num_samples(self) -> int:
        """The number of samples."""
        return int(self.counts.sum())

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return int(self._first_block[-1])

    @cached_property
    def _first_sample(self) -> IntArray:
        return prefix_sums(self.counts)

    @cached_property
    def _first_block(self) -> IntArray:
        return prefix_sums(-(-self.counts // self.block_samples))

    def shards_of(self, samples: IntArray) -> IntArray:
        """Return the shards that samples are in."""
        return np.searchsorted(self._first_sample, samples, side="right") - 1

    def blocks_of(self, samples: IntArray) -> IntArray:
        """Return the blocks that samples are in, numbered over the whole dataset."""
        shards = self.shards_of(samples)
        blocks: IntArray = self._first_block[shards] + (samples - self._first_sample[shards]) // self.block_samples
        return blocks

    def block_sizes(self, blocks: IntArray) -> IntArray:
        """Return the number of samples in each of some blocks."""
        shards = np.searchsorted(self._first_block, blocks, side="right") - 1
        before = (blocks - self._first_block[shards]) * self.block_samples
        return np.minimum(self.block_samples, self.counts[shards] - before)

    def some_samples(self, limit: int) -> IntArray:
        """Return all samples, or those of some blocks of some shards if there are more than a limit."""
        if self.num_samples <= limit:
            return np.arange(self.num_samples)
        shards = np.flatnonzero(self.counts)
        shards = shards[_spread(len(shards), _SHARDS)]
        num_blocks = -(-self.counts[shards] // self.block_samples)
        most = max(2, limit // len(shards) // self.block_samples)
        chosen = [first + _spread(n, most) for first, n in zip(self._first_block[shards], num_blocks, strict=True)]
        numbers = np.repeat(shards, list(map(len, chosen)))
        blocks = np.concatenate(chosen)
        sizes = self.block_sizes(blocks)
        starts = self._first_sample[numbers] + (blocks - self._first_block[numbers]) * self.block_samples
        return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())

    @cached_property
    def same_shard(self) -> float:
        """The probability that two random samples are from the same shard."""
        return self._probability(float((self.counts * (self.counts - 1.0)).sum()))

    @cached_property
    def same_block(self) -> float:
        """The probability that two random samples are from the same block."""
        full, rest = np.divmod(self.counts, self.block_samples)
        return self._probability(
            float(full.sum()) * self.block_samples * (self.block_samples - 1) + float((rest * (rest - 1)).sum())
        )

    def _probability(self, pairs: float) -> float:
        return pairs / max(1, self.num_samples * (self.num_samples - 1))


@dataclass(frozen=True)
class Mixing:
    """How well an order mixes.

    Attributes:
        effective_batch_by_shard: The effective size of a batch if the samples of a shard are slightly similar, as a
            fraction of the effective size of a random batch.
        effective_batch_by_block: The same for the samples of a block.
        dispersion_by_shard: How far a shard's samples are spread over the epoch: the average standard deviation of
            their positions, as a fraction of that of all positions.
        dispersion_by_block: The same for a block's samples.
        held_samples: How many samples are in memory at once, on all ranks together.
    """

    effective_batch_by_shard: float
    effective_batch_by_block: float
    dispersion_by_shard: float
    dispersion_by_block: float
    held_samples: int


@dataclass(frozen=True)
class Course:
    """The part of an order that is measured.

    Attributes:
        layout: The layout that numbers its samples: that of the dataset, or of some of its shards.
        batches: The samples of some batches: int64, (batches, samples of a batch).
        samples: Some samples, in whole blocks, ascending: int64.
        positions: The positions of these samples in the epoch: float64.
    """

    layout: Layout
    batches: IntArray
    samples: IntArray
    positions: npt.NDArray[np.float64]


def follow_plan(plan: OrderPlan, layout: Layout, batch_size: int, *, limit: int = LIMIT) -> Course:
    """Return the part of an order plan that is measured, for global batches of a given size."""
    batches = _some_batches(layout.num_samples, batch_size, limit)
    samples = layout.some_samples(limit)
    found = plan.samples_at(batches.ravel()).reshape(batches.shape)
    return Course(layout, found, samples, plan.positions_of(samples).astype(np.float64))


def follow_permutation(layout: Layout, batch_size: int, *, key: int, limit: int = LIMIT) -> Course:
    """Return the part of a uniform permutation that is measured."""
    permutation = Permutation(layout.num_samples, key=key)
    batches = _some_batches(layout.num_samples, batch_size, limit)
    samples = layout.some_samples(limit)
    return Course(layout, permutation.inverse(batches), samples, permutation.forward(samples).astype(np.float64))


def follow_buffer(
    layout: Layout,
    batch_size: int,
    *,
    key: int,
    world_size: int = 1,
    buffer_samples: int = BUFFER_SAMPLES,
    limit: int = LIMIT,
) -> Course:
    """Return the part of webdataset's ``shuffle()``, simulated, that is measured.

    Shards are shuffled and dealt to the workers of all ranks. Each worker has its own buffer and makes its own batches.
    For a large dataset, some shards are simulated as if they were the whole: a buffer moves samples only a short way.

    Args:
        layout: The dataset's layout.
        batch_size: The batch size of one rank.
        key: The key of the random choices.
        world_size: The number of ranks.
        buffer_samples: The size of each buffer.
        limit: About how many samples are simulated.
    """
    part, workers = layout, BUFFER_WORKERS * world_size
    if layout.num_samples > limit:
        shards = np.flatnonzero(layout.counts)
        enough = max(2 * BUFFER_WORKERS, limit * len(shards) // layout.num_samples)
        counts = layout.counts[shards[_spread(len(shards), enough)]]
        most = max(limit // _PART_OF_LIMIT, _BUFFERS_A_SHARD * buffer_samples)
        part, workers = Layout(np.minimum(counts, most), layout.block_samples), BUFFER_WORKERS
    order = _through_buffers(part, min(workers, len(part.counts)), batch_size, buffer_samples, key)
    positions = np.empty(len(order))
    positions[order] = np.arange(len(order))
    if part is not layout:
        # Around its place in the epoch, a shard is spread as far as in the part, times the number of ranks that take
        # turns. If a shard is larger than its part, its blocks lie further apart by the same factor.
        shards, blocks = part.shards_of(np.arange(len(order))), part.blocks_of(np.arange(len(order)))
        of_shard, of_block = _means(shards, positions), _means(blocks, positions)[blocks]
        places = shuffled(len(of_shard), key=derive(key, 0)) * (layout.num_samples / len(of_shard))
        apart = (of_block - of_shard[shards]) * (counts / part.counts)[shards]
        positions = (positions - of_block + apart) * world_size + places[shards]
    whole = _some_batches(len(order), batch_size, len(order))
    return Course(part, order[whole], np.arange(len(order)), positions)


def _through_buffers(layout: Layout, workers: int, batch_size: int, buffer_samples: int, key: int) -> IntArray:
    """Return all samples in the order in which a loader with some workers, each with a buffer, yields them."""
    shards, ends = shuffled(len(layout.counts), key=key), np.cumsum(layout.counts)
    outs, turns = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for worker in range(workers):
        arriving = [np.arange(ends[s] - layout.counts[s], ends[s]) for s in shards[worker::workers]]
        out = _through_buffer(np.concatenate(arriving), buffer_samples, derive(key, 1, worker))
        outs.append(out)
        turns.append(np.arange(len(out)) // batch_size * workers + worker)  # each worker's batches in turn
    order: IntArray = np.concatenate(outs)[np.argsort(np.concatenate(turns), kind="stable")]
    return order


def _through_buffer(arriving: IntArray, buffer_samples: int, key: int) -> IntArray:
    """Return samples in the order in which webdataset 1.0's ``shuffle(buffer_samples)`` yields them."""
    draws = mix64_array(np.uint64(key) ^ np.arange(len(arriving), dtype=np.uint64)) >> np.uint64(11)
    draw = iter((draws * 2.0**-53).tolist())
    buffer: list[int] = []
    out: list[int] = []

    def pick() -> None:
        k = int(next(draw) * len(buffer))
        out.append(buffer[k])
        buffer[k] = buffer[-1]
        buffer.pop()

    samples = iter(arriving.tolist())
    for sample in samples:
        buffer.append(sample)
        if len(buffer) < buffer_samples and (another := next(samples, None)) is not None:
            buffer.append(another)
        if len(buffer) >= min(_BUFFER_INITIAL, buffer_samples):
            pick()
    while buffer:
        pick()
    return np.array(out, dtype=np.int64)


def measure(course: Course, full: Layout, batch_size: int, held_samples: int) -> Mixing:
    """Return the figures of an order.

    Args:
        course: The part of the order that is measured.
        full: The layout of the whole dataset.
        batch_size: The size of a global batch.
        held_samples: How many samples are in memory at once.
    """
    layout, batch_size = course.layout, min(batch_size, full.num_samples)
    return Mixing(
        _effective(count_mates(layout.shards_of(course.batches)), 1 + (batch_size - 1) * full.same_shard),
        _effective(count_mates(layout.blocks_of(course.batches)), 1 + (batch_size - 1) * full.same_block),
        _dispersion(layout.shards_of(course.samples), course.positions, full.num_samples),
        _dispersion(layout.blocks_of(course.samples), course.positions, full.num_samples),
        held_samples,
    )


def count_mates(groups: IntArray) -> float:
    """Return how many samples in a batch are in the group of a given one, itself included, on average over all samples.

    Example:
        >>> count_mates(np.array([[7, 7, 7, 9], [1, 2, 3, 4]]))
        1.75
    """
    if not groups.size:
        return 1.0
    begins = np.flatnonzero(np.diff(np.sort(groups, axis=1), axis=1, prepend=-1))
    return float((np.diff(begins, append=groups.size) ** 2.0).sum()) / groups.size


def _effective(mates: float, expected: float) -> float:
    """Return Kish's effective size of a batch as a fraction of that of a random batch."""
    return (1 + (expected - 1) * CORRELATION) / (1 + (mates - 1) * CORRELATION)


def _means(groups: IntArray, positions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the mean position of each group. Every number up to the largest is the number of a group."""
    means: npt.NDArray[np.float64] = np.bincount(groups, positions) / np.bincount(groups)
    return means


def _dispersion(groups: IntArray, positions: npt.NDArray[np.float64], num_samples: int) -> float:
    """Return the average standard deviation of the positions in a group, as a fraction of that of all positions."""
    groups = np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(groups)
    if not (sizes > 1).any():
        return 1.0  # every group has one sample, so there is nothing to spread
    means = _means(groups, positions)
    deviations = np.sqrt(np.bincount(groups, (positions - means[groups]) ** 2) / sizes)
    return float(deviations[sizes > 1].mean() / (num_samples / 12**0.5))


def count_held(plan: OrderPlan, layout: Layout) -> int:
    """Return how many samples the open blocks of all ranks hold: the maximum over some moments of the epoch."""
    back = plan.lanes * (layout.block_samples + 2 * plan.window_samples)  # no open block began earlier than this
    held = [0]
    for moment in _spread(plan.num_samples, _MOMENTS):
        found = plan.locate(np.arange(max(0, moment - back), moment + 1))
        pieces = found.lanes * layout.num_blocks + layout.blocks_of(found.samples)
        is_open = np.unique(pieces[found.release > moment]) % layout.num_blocks
        held.append(int(layout.block_sizes(is_open).sum()))
    return max(held)


def spread_run(plan: OrderPlan) -> int:
    """Return how many neighbours an order spreads over the epoch nearly as far as a random order: a power of two.

    Fewer neighbours come at only a few places in the epoch, because each block is read whole, and windows keep its
    early and late samples apart. This does no harm unless they are similar, like those of a class in a sorted source.

    Args:
        plan: The order.
    """
    length = 2
    while 2 * length <= plan.num_samples:
        number = max(1, min(plan.num_samples, _RUN_SAMPLES) // length)
        starts = np.linspace(0, plan.num_samples - length, number).astype(np.int64)
        positions = plan.positions_of((starts[:, None] + np.arange(length)).ravel()).reshape(number, length)
        if positions.var(axis=1, ddof=1).mean() ** 0.5 >= _SPREAD * plan.num_samples / 12**0.5:
            break
        length *= 2
    return length


def read_amplification(
    plan: OrderPlan, layout: Layout, batch_size: int, world_size: int, *, in_memory: bool = False, limit: int = LIMIT
) -> float:
    """Return how many bytes all ranks together read in an epoch, as a multiple of the dataset's size.

    Each rank reads a block once for each lane in which it gets samples from it; or only once, if it keeps all blocks.

    Args:
        plan: The order.
        layout: The dataset's layout.
        batch_size: The batch size of one rank.
        world_size: The number of ranks.
        in_memory: Whether each rank has room for the whole dataset, and so keeps every block that it reads. It is
            taken into account for datasets of up to ``limit`` samples.
        limit: About how many samples are measured if the number of ranks does not divide the number of lanes;
            otherwise the result is computed.
    """
    if plan.num_samples == 0:
        return 1.0
    if in_memory and plan.num_samples <= limit:
        blocks = layout.blocks_of(plan.samples_at(np.arange(plan.num_samples)))
        read = np.unique(_ranks(plan, plan.num_samples, batch_size, world_size) * layout.num_blocks + blocks)
        return float(layout.block_sizes(read % layout.num_blocks).sum()) / plan.num_samples
    cut = 1 + plan.cut_samples() / plan.num_samples
    if plan.lanes % world_size == 0:
        return cut
    least = 4 * plan.lanes * (layout.block_samples + 2 * plan.window_samples)  # so that most blocks lie wholly in it
    end = min(plan.num_samples, max(limit, least))
    ranks, found = _ranks(plan, end, batch_size, world_size), plan.locate(np.arange(end))
    blocks = layout.blocks_of(found.samples)
    pieces = found.lanes * layout.num_blocks + blocks
    if end < plan.num_samples:
        # The blocks that lie wholly in it represent all blocks; the cuts at the ends of lanes are counted exactly.
        numbers, where, counts = np.unique(pieces, return_inverse=True, return_counts=True)
        is_whole = (counts == layout.block_sizes(numbers % layout.num_blocks))[where]
        ranks, pieces = ranks[is_whole], pieces[is_whole]
    read = np.unique(ranks * (plan.lanes * layout.num_blocks) + pieces) % layout.num_blocks
    amplification = float(layout.block_sizes(read).sum()) / len(pieces)
    return amplification if end == plan.num_samples else amplification * cut


def _ranks(plan: OrderPlan, end: int, batch_size: int, world_size: int) -> IntArray:
    """Return which rank gets each of the first positions of an epoch."""
    if plan.lanes % world_size == 0:
        return plan.ranks(0, end, world_size)
    batches = Batches(end, batch_size, world_size, drop_last=False)
    parts, start = [], 0
    while (stop := batches.stop(start)) is not None:
        parts.append(plan.ranks(start, stop, world_size))
        start = stop
    return np.concatenate(parts)


def _some_batches(num_samples: int, batch_size: int, limit: int) -> IntArray:
    """Return the positions of all batches, or of some stretches of many: int64, (batches, samples of a batch)."""
    batch_size = min(batch_size, num_samples)
    if batch_size == 0:
        return np.zeros((0, 0), dtype=np.int64)
    total, most = num_samples // batch_size, max(1, limit // batch_size)
    if total <= most:
        numbers = np.arange(total)
    else:
        length = -(-most // _STRETCHES)
        starts = np.linspace(0, total - length, min(_STRETCHES, most)).astype(np.int64)
        numbers = np.unique(starts[:, None] + np.arange(length))
    return numbers[:, None] * batch_size + np.arange(batch_size)


def _spread(total: int, most: int) -> IntArray:
    """Return all numbers below a total, or some of them, evenly spread.

    Example:
        >>> _spread(3, 5).tolist(), _spread(100, 4).tolist()
        ([0, 1, 2], [0, 25, 50, 75])
    """
    some = np.arange(min(total, most))
    return some if total <= most else some * (total // most) + some * (total % most) // most  # some * total overflows
