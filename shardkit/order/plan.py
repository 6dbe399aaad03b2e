"""The order of an epoch: the sample at each position, and its rank. It can be computed for any position, without I/O.

::

    runs      [0 1 2 3] [4 5 6 7] [8 9 a b]     shards, and the blocks of samples that they consist of
    line      7 2 b 0 5 9 1 a 4 8 3 6           all blocks, put in an order by a keyed permutation
    lanes     7 2 b 0                           the line, cut into pieces of equal length; in each, windows of as many
              5 9 1 a                           samples as a block has are mixed
              4 8 3 6
    epoch     one sample of each lane in turn: position p is lane p mod lanes, offset p div lanes

So a batch draws from every lane, a rank reads whole blocks, any position is computed without the earlier ones, and
nothing depends on ranks, workers or time. The docstring of ``shardkit.order`` specifies the order, with test vectors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardkit.errors import ArgumentError, check_whole
from shardkit.hashing import Permutation, UInt64Array, derive, mix64_array

LANES = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60, 120, 240, 480, 960, 1920, 3840)
"""The numbers that ``default_lanes`` chooses from: many world sizes divide them."""

OPEN_BYTES = 512_000_000
"""How many bytes the open blocks of all lanes may occupy together, over all ranks."""

OPEN_BLOCKS = 2
"""How many blocks of a lane are open at once: a window usually spans two."""

# The purpose of each key: the part of every derive() that follows seed and epoch.
_BLOCKS, _WINDOW, _STAGGER = 1, 2, 3

# How many samples are located at a time: a few arrays of 512 kB, which stay in a core's cache
# (scripts/bench/bench_order.py).
_AT_A_TIME = 1 << 16

IntArray = npt.NDArray[np.int64]


class Located(NamedTuple):
    """Where the samples at some positions come from: one element for each position.

    Attributes:
        samples: Their numbers in the dataset's order: int64.
        lanes: Their lanes: int64.
        release: A position of the epoch from which on the same lane has no more samples of the same block: the first
            such position, or at most one window of the lane later: int64.
    """

    samples: IntArray
    lanes: IntArray
    release: IntArray


class OrderPlan:
    """The order of one epoch: a permutation of the numbers of a dataset's samples, computed at any position.

    It takes memory for the runs, not for the samples, and depends on its arguments only. Different seeds or epochs give
    different orders; seed and epoch are mixed by a hash, never added.

    Args:
        run_samples: How many samples each run has. A run is cut into blocks: it is a shard, or a single block if a
            selection leaves only some of its samples. Runs without samples have no block.
        block_samples: How many samples a block has; the last of a run may have fewer.
        seed: Any whole number.
        epoch: Any whole number.
        lanes: How many lanes there are, at least 1.
        shuffle: False for the order of the dataset, in one lane.

    Attributes:
        num_samples: The number of samples, which is also the number of positions.
        num_blocks: The number of blocks that contain them.
        lanes: The number of lanes.
        window_samples: How many samples of a lane are mixed together.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> plan = OrderPlan([5, 4], 2, seed=0, epoch=0, lanes=2)
        >>> plan.samples_at(np.arange(plan.num_samples)).tolist()
        [2, 6, 3, 5, 7, 0, 4, 1, 8]
        >>> plan.samples_at([7]).tolist()
        [1]
    """

    def __init__(
        self,
        run_samples: npt.ArrayLike,
        block_samples: SupportsIndex,
        *,
        seed: SupportsIndex,
        epoch: SupportsIndex,
        lanes: SupportsIndex,
        shuffle: bool = True,
    ) -> None:
        runs = np.asarray(run_samples, dtype=np.int64)
        if runs.ndim != 1 or (runs < 0).any():
            raise ArgumentError("run_samples must be a list of numbers that are 0 or more")
        size = check_whole("block_samples", block_samples, least=1)
        seed, epoch = check_whole("seed", seed), check_whole("epoch", epoch)
        lanes = check_whole("lanes", lanes, least=1)
        self.lanes = lanes if shuffle else 1
        self.shuffle = shuffle
        self._block_samples = size
        self._runs = runs
        self._first_sample = prefix_sums(runs)  # the number of each run's first sample
        self._first_block = prefix_sums(-(-runs // size))
        self.num_samples = int(self._first_sample[-1])
        self.num_blocks = int(self._first_block[-1])
        self._permutation = Permutation(self.num_blocks, key=derive(seed, epoch, _BLOCKS))
        short = np.flatnonzero(runs % size)  # runs whose last block is short
        places = self._first_block[short + 1] - 1
        if shuffle:
            places = self._permutation.forward(places)
        by_place = np.argsort(places)
        # If all blocks had the full length, the offset of a block on the line would be its place times that length. So
        # it is enough to know how many samples the short blocks before an offset lack.
        self._missing = prefix_sums((size - runs[short] % size)[by_place])
        self._short_places = places[by_place]
        self._short_ends = (self._short_places + 1) * size - self._missing[1:]
        # As many samples as a block has on average, so that a lane has about two blocks open for any selection.
        self.window_samples = -(-self.num_samples // self.num_blocks) if self.num_blocks else 1
        self._window_key = derive(seed, epoch, _WINDOW)
        self._lengths = (self.num_samples - np.arange(self.lanes) + self.lanes - 1) // self.lanes
        self._starts = prefix_sums(self._lengths)  # where each lane begins on the line
        self._stagger = np.zeros(self.lanes, dtype=np.int64)  # the length of each lane's window 0, which may be empty
        if shuffle:
            keys = _derive_each(np.uint64(derive(seed, epoch, _STAGGER)), np.arange(self.lanes))
            self._stagger = (keys % np.uint64(self.window_samples)).astype(np.int64)

    def samples_at(self, positions: npt.ArrayLike) -> IntArray:
        """Return the numbers of the samples at any positions, in the dataset's order: int64, (positions,).

        Asking for many at once, up to about 100 000, costs much less per sample: a call mixes each window once.

        Raises:
            ArgumentError: A position is not in the epoch.
        """
        return self.locate(positions).samples

    def locate(self, positions: npt.ArrayLike) -> Located:
        """Return the numbers of the samples at any positions, their lanes, and when their blocks are no longer needed.

        A block that the end of a lane cuts in two counts as two: one lane has finished it long before the other begins
        it. There are at most ``lanes - 1`` such blocks.

        Raises:
            ArgumentError: A position is not in the epoch.

        Example:
            >>> plan = OrderPlan([4, 4], 4, seed=0, epoch=0, lanes=1, shuffle=False)
            >>> plan.locate([0, 3, 4]).release.tolist()
            [4, 4, 8]
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not 0 <= positions.min() <= positions.max() < self.num_samples:
            raise ArgumentError(f"positions must be in [0, {self.num_samples:,}), the samples of an epoch")
        lanes, offsets = positions % self.lanes, positions // self.lanes
        windows = self._windows(lanes, offsets)
        found = Located(np.empty_like(positions), lanes, np.empty_like(positions))
        for chosen, rows, first in self._by_window(windows * self.lanes + lanes):
            self._fill(found, chosen, rows, offsets[chosen], lanes[first], windows[first])
        return found

    def positions_of(self, samples: npt.ArrayLike) -> IntArray:
        """Return the positions of samples, the inverse of ``samples_at``: int64, (samples,).

        Raises:
            ArgumentError: A sample is not in the dataset.

        Example:
            >>> OrderPlan([5, 4], 2, seed=0, epoch=0, lanes=2).positions_of([2, 6, 1]).tolist()
            [0, 1, 7]
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise ArgumentError(f"samples must be in [0, {self.num_samples:,}), as many as the dataset has")
        runs = np.searchsorted(self._first_sample, samples, side="right") - 1
        blocks, rest = np.divmod(samples - self._first_sample[runs], self._block_samples)
        places = self._first_block[runs] + blocks
        if self.shuffle:
            places = self._permutation.forward(places)
        line = places * self._block_samples - self._missing[np.searchsorted(self._short_places, places)] + rest
        lanes = np.searchsorted(self._starts, line, side="right") - 1
        offsets = line - self._starts[lanes]
        if self.shuffle:
            windows = self._windows(lanes, offsets)
            for chosen, rows, first in self._by_window(windows * self.lanes + lanes):
                lows, sizes = self._bounds(lanes[first], windows[first])
                places_in = np.argsort(self._mix(lanes[first], windows[first], sizes), axis=1)
                offsets[chosen] = lows[rows] + places_in[rows, offsets[chosen] - lows[rows]]
        return offsets * self.lanes + lanes

    def cut_samples(self) -> int:
        """Return how many samples are read twice in an epoch, because the end of a lane cuts their block in two."""
        line = self._starts[1:-1]
        line = line[line < self.num_samples]
        places, rest = self._places(line)
        starts = line - rest
        return int((self._blocks(places, starts)[1] - starts)[rest > 0].sum())

    def _by_window(self, ids: IntArray) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Yield elements that share windows, some windows at a time.

        Args:
            ids: The window of each element.

        Yields:
            The numbers of some elements; for each of these elements, which of the windows it is in; for each of the
            windows, the number of one of its elements.
        """
        order = np.argsort(ids)
        begins = np.flatnonzero(np.diff(ids[order], prepend=-1))
        at_a_time = max(1, _AT_A_TIME // self.window_samples)
        for i in range(0, len(begins), at_a_time):
            some = begins[i : i + at_a_time]
            end = begins[i + at_a_time] if i + at_a_time < len(begins) else len(order)
            yield order[some[0] : end], np.repeat(np.arange(len(some)), np.diff(some, append=end)), order[some]

    def _fill(
        self, found: Located, chosen: IntArray, rows: IntArray, offsets: IntArray, lanes: IntArray, windows: IntArray
    ) -> None:
        """Fill in the samples and releases at positions that lie in some windows."""
        lows, sizes = self._bounds(lanes, windows)
        within = np.minimum(np.arange(self.window_samples), sizes[:, None] - 1)
        line = self._starts[lanes, None] + lows[:, None] + within
        # Neighbours mostly share a block, so each block is looked up only once.
        places, rest = self._places(line)
        is_new = np.diff(places, axis=1, prepend=-1) != 0
        piece = np.cumsum(is_new).reshape(is_new.shape) - 1
        base, ends = self._blocks(places[is_new], (line - rest)[is_new])
        picked = offsets - lows[rows]
        if self.shuffle:
            picked = self._mix(lanes, windows, sizes)[rows, picked]
        pieces = piece[rows, picked]
        found.samples[chosen] = base[pieces] + rest[rows, picked]
        found.release[chosen] = self._releases(ends, lanes[np.nonzero(is_new)[0]])[pieces]

    def _mix(self, lanes: IntArray, windows: IntArray, sizes: IntArray) -> IntArray:
        """Return the order of the samples of windows: int64, (windows, samples). Numbers past the end come last."""
        keys = _derive_each(_derive_each(np.uint64(self._window_key), lanes), windows)
        numbers = np.arange(self.window_samples)
        hashes = _derive_each(keys[:, None], numbers)
        hashes[numbers >= sizes[:, None]] = np.iinfo(np.uint64).max
        order: IntArray = np.argsort(hashes, axis=1, kind="stable")
        return order

    def _places(self, line: IntArray) -> tuple[IntArray, IntArray]:
        """Return the places of the blocks at offsets of the line, and the offsets within these blocks."""
        padded = line + self._missing[np.searchsorted(self._short_ends, line, side="right")]
        return np.divmod(padded, self._block_samples)

    def _blocks(self, places: IntArray, starts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first samples of blocks, and where they end on the line."""
        blocks = self._permutation.inverse(places) if self.shuffle else places
        runs = np.searchsorted(self._first_block, blocks, side="right") - 1
        before = (blocks - self._first_block[runs]) * self._block_samples  # in the run
        return self._first_sample[runs] + before, starts + np.minimum(self._block_samples, self._runs[runs] - before)

    def _releases(self, ends: IntArray, lanes: IntArray) -> IntArray:
        """Return the first positions after the last windows that need some blocks.

        Args:
            ends: Where the blocks end on the line.
            lanes: The lane of each block.
        """
        last = np.minimum(ends, self._starts[lanes + 1]) - 1 - self._starts[lanes]
        release: IntArray = (self._ends(lanes, self._windows(lanes, last)) - 1) * self.lanes + lanes + 1
        return release

    def _windows(self, lanes: IntArray, offsets: IntArray) -> IntArray:
        """Return the numbers of the windows that contain offsets of lanes."""
        windows: IntArray = (offsets + self.window_samples - self._stagger[lanes]) // self.window_samples
        return windows

    def _bounds(self, lanes: IntArray, windows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the offsets at which windows of lanes begin, and how many samples they have."""
        lows = np.maximum(0, self._ends(lanes, windows - 1))
        return lows, self._ends(lanes, windows) - lows

    def _ends(self, lanes: IntArray, windows: IntArray) -> IntArray:
        """Return the offsets at which windows of lanes end."""
        ends: IntArray = np.minimum(self._lengths[lanes], windows * self.window_samples + self._stagger[lanes])
        return ends

    def ranks(self, start: int, stop: int, world_size: int) -> IntArray:
        """Return which rank gets each position of the global batch ``[start, stop)``: int64, (stop - start,).

        The ranks' numbers of positions differ by at most one. If ``world_size`` divides the lanes, each rank has its
        own lanes, so no block is read twice. Otherwise each rank has a contiguous part of the batch's positions sorted
        by lane, which reads fewer blocks twice than dealing in turns.
        """
        positions = np.arange(start, stop)
        lanes = positions % self.lanes
        if self.lanes % world_size == 0:
            ranks: IntArray = lanes % world_size
            return ranks
        ranks = np.empty_like(positions)
        ranks[np.argsort(lanes, kind="stable")] = ((positions - start + 1) * world_size - 1) // max(1, stop - start)
        return ranks

    def deal(self, start: int, stop: int, rank: int, world_size: int) -> IntArray:
        """Return the positions of the global batch ``[start, stop)`` that a rank gets, ascending: int64.

        Example:
            >>> plan = OrderPlan([100], 2, seed=0, epoch=0, lanes=4)
            >>> plan.deal(8, 16, 1, 2).tolist(), plan.deal(8, 16, 1, 3).tolist()
            ([9, 11, 13, 15], [9, 10, 13])
        """
        return start + np.flatnonzero(self.ranks(start, stop, world_size) == rank)


@dataclass(frozen=True, slots=True)
class Batches:
    """Where the global batches of an epoch begin and end: at the same positions for every rank.

    Attributes:
        num_samples: How many positions the epoch has.
        batch_size: How many samples of a batch a rank gets.
        world_size: How many ranks there are.
        drop_last: Leave out the last batch if it is not full. Otherwise it has the samples that remain. If these are
            fewer than the ranks, they are added to the previous batch, so that no rank gets an empty batch, and some
            ranks get ``batch_size + 1`` samples.

    Example:
        >>> batches = Batches(num_samples=9, batch_size=2, world_size=2, drop_last=False)
        >>> batches.stop(0), batches.stop(4), batches.stop(9)
        (4, 9, None)
    """

    num_samples: int
    batch_size: int
    world_size: int
    drop_last: bool

    def stop(self, position: int) -> int | None:
        """Return where the batch that begins at a position ends; None at the end of the epoch."""
        stop = position + self.batch_size * self.world_size
        if self.drop_last:
            return stop if stop <= self.num_samples else None
        if position >= self.num_samples:
            return None
        return stop if stop + self.world_size <= self.num_samples else self.num_samples

    def count(self, position: int = 0) -> int:
        """Return the number of batches from a position on."""
        full, rest = divmod(max(0, self.num_samples - position), self.batch_size * self.world_size)
        if self.drop_last:
            return full
        return full + (rest >= self.world_size or (rest > 0 and full == 0))

    def leaves_ranks_empty(self, position: int) -> bool:
        """Return whether fewer samples than ranks remain from a position on, and would form their own batch."""
        return not self.drop_last and 0 < self.num_samples - position < self.world_size

    def too_few(self) -> ArgumentError:
        """Return the error for an epoch whose first batch would leave ranks empty."""
        return ArgumentError(
            f"the dataset has {self.num_samples} samples, fewer than the {self.world_size} ranks, and no rank may get "
            "an empty batch; use fewer ranks, or pass drop_last=True"
        )


def default_lanes(num_blocks: int, block_bytes: float) -> int:
    """Return the default number of lanes of a dataset: the largest of ``LANES`` for which memory stays bounded.

    Two blocks of every lane may occupy at most 512 MB together, over all ranks, and every lane must have a block.

    Args:
        num_blocks: The number of blocks.
        block_bytes: The average size of a block in bytes, uncompressed.

    Example:
        >>> default_lanes(100_000, 1_000_000), default_lanes(100_000, 8_000_000), default_lanes(7, 1_000_000)
        (240, 30, 6)
    """
    fitting = [n for n in LANES if n <= num_blocks and n * OPEN_BLOCKS * block_bytes <= OPEN_BYTES]
    return max(fitting, default=1)


def prefix_sums(numbers: npt.ArrayLike) -> IntArray:
    """Return for each number the sum of the numbers before it, and finally the total: int64, (numbers + 1,).

    Example:
        >>> prefix_sums([3, 0, 2]).tolist(), prefix_sums([]).tolist()
        ([0, 3, 3, 5], [0])
    """
    numbers = np.asarray(numbers, dtype=np.int64)
    sums = np.zeros(len(numbers) + 1, dtype=np.int64)
    np.cumsum(numbers, out=sums[1:])
    return sums


def _derive_each(keys: "np.uint64 | UInt64Array", parts: IntArray) -> UInt64Array:
    """Return ``derive(..., part)`` of each part, where ``keys`` are ``derive(...)``."""
    return mix64_array(keys ^ mix64_array(parts.astype(np.uint64)))
