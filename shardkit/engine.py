"""The blocks that an epoch needs, in order -> fetched ahead -> rows made by workers -> batches, in order.

::

    plan     which blocks and rows each batch of this rank needs; admits blocks while they fit into memory
    fetch    blocks, in the order in which they are needed
    rows     chunks of a batch's rows: bytes -> values; the worker that makes the last one puts the batch together
    next     the next batch in the order, whatever was ready first

Each stage is a pool of threads whose tasks all end by themselves: nothing waits for what comes later in the order, so
nothing can hang. What the next batch needs is always admitted, so memory that is full slows down and never stops.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardkit.blocks import Block
from shardkit.errors import ShardkitError
from shardkit.order import Batches, IntArray, OrderPlan
from shardkit.rows import RawRow, Row

_FETCH_THREADS = 4  # a local read is a copy; these hide a disk's latency
_CHUNK_ROWS = 16  # rows are handed to a worker at a time: enough that handing over costs nothing beside an image
_AHEAD_BATCHES = 2  # are made beyond the one that is being waited for, ...
_AHEAD_ROWS = 512  # ... or as many as have so many rows
_FIRST_STRETCH, _STRETCH = 1 << 12, 1 << 18  # positions of the epoch are planned at a time, at first and later


class Blocks(Protocol):
    """Where blocks come from: a ShardDataset."""

    block_bytes: float

    def places(self, samples: IntArray, /) -> tuple[IntArray, IntArray, IntArray]:
        """Return the shard, the block and the row in the block of samples."""
        ...

    def read_block(self, shard: int, block: int, /) -> Block:
        """Return a block."""
        ...


RowsMaker = Callable[[Sequence[RawRow]], list[Row]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch.

    Attributes:
        value: What the training loop gets.
        stop: The position in the epoch after it.
        skipped: The errors of the rows that were left out, in order.
        error: What is to be raised in its place.
    """

    value: Any
    stop: int
    skipped: Sequence[BaseException] = ()
    error: BaseException | None = None


class _Slot:
    """A block that is held for one lane, until the epoch has passed it."""

    __slots__ = ("future", "is_released", "size", "uses")

    def __init__(self, future: "Future[Block]", size: int) -> None:
        self.future = future
        self.size = size
        self.uses = 0  # batches that need it and are not made yet
        self.is_released = False


class _Wanted(NamedTuple):
    """A block that a batch needs: its lane, shard and number, and the position from which on nobody needs it."""

    lane: int
    shard: int
    block: int
    release: int


@dataclass(eq=False, slots=True)
class _Batch:
    number: int
    start: int
    stop: int
    positions: list[int]
    rows: list[int]  # the row in its block
    wanted: list[_Wanted]
    which: list[int]  # for each row, which of the wanted blocks
    slots: list[_Slot] = field(default_factory=list)
    made: list[Row | None] = field(default_factory=list)
    chunks: int = 0  # still to be made
    finished: Finished | None = None


class Engine:
    """One pass over an epoch, or the rest of it, for one rank.

    Args:
        blocks: Where blocks come from.
        plan: The epoch's order.
        batches: Where batches begin and end.
        position: Where to begin.
        rank: Which rank's rows.
        epoch: The epoch's number.
        make_rows: Makes rows of samples' bytes. Called by ``num_workers`` threads.
        collate: Makes a batch of rows. Called by the same threads.
        skips: Leave out rows that cannot be read or decoded.
        num_workers: How many threads make rows.
        memory: How many bytes of blocks are held, unless the next batch needs more.
    """

    def __init__(  # noqa: PLR0913 - the parts of a pipeline; one place calls it
        self,
        blocks: Blocks,
        plan: OrderPlan,
        batches: Batches,
        *,
        position: int,
        rank: int,
        epoch: int,
        make_rows: RowsMaker,
        collate: Callable[[list[Any]], Any],
        skips: bool,
        num_workers: int,
        memory: int,
    ) -> None:
        self._blocks = blocks
        self._plan = plan
        self._batches = batches
        self._rank = rank
        self._epoch = epoch
        self._make_rows = make_rows
        self._collate = collate
        self._skips = skips
        self._memory = memory
        self._ahead = max(_AHEAD_BATCHES, -(-_AHEAD_ROWS // batches.batch_size))
        self._chunk_rows = min(_CHUNK_ROWS, -(-batches.batch_size // num_workers))
        self._planned = self._plan_batches(position)
        self._upcoming: _Batch | None = None  # planned, and not yet admitted
        self._held: dict[tuple[int, int, int], _Slot] = {}
        self._releases: list[tuple[int, tuple[int, int, int]]] = []  # a heap: when to let go of what is held
        self.held_bytes = 0
        self.largest_held_bytes = 0
        self._queue: deque[_Batch] = deque()  # admitted, and not yet returned
        self._given = 0  # batches of the queue that workers have
        self._returned = 0
        self._is_planned = False  # to the end
        self._error: BaseException | None = None  # of planning
        self._is_planning = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="shardkit-plan")
        self._fetchers = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="shardkit-fetch")
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="shardkit-rows")
        with self._changed:
            self._plan_soon()

    def next(self) -> Finished | None:
        """Return the next batch, as soon as it is there; None at the end, or when the engine was closed."""
        with self._changed:
            while not (self._queue and self._queue[0].finished):
                if self._is_closed:
                    return None
                if not self._queue and (self._is_planned or self._error):
                    if self._error is not None:
                        raise self._error
                    return None
                self._changed.wait()
            batch = self._queue.popleft()
            self._given -= 1
            self._returned += 1
            self._give()
            self._plan_soon()
        return batch.finished

    def close(self, *, wait: bool) -> None:
        """End all threads: what they are at is finished, the rest is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for pool in (self._planner, self._fetchers, self._workers):
            pool.shutdown(wait=wait, cancel_futures=True)

    def _plan_soon(self) -> None:
        """Let the planner look whether there is something to do. The lock is held."""
        if not (self._is_planning or self._is_planned or self._error or self._is_closed):
            self._is_planning = True
            self._planner.submit(self._admit_batches)

    def _admit_batches(self) -> None:
        """Plan and admit batches until memory is full."""
        try:
            while True:
                if self._upcoming is None:
                    self._upcoming = next(self._planned, None)
                with self._changed:
                    if self._upcoming is None or self._is_closed:
                        self._is_planned, self._is_planning = True, False
                        self._changed.notify_all()
                        return
                    if not self._admit(self._upcoming):
                        self._is_planning = False
                        return
                    self._upcoming = None
        except BaseException as error:  # noqa: BLE001 - it is raised after the batches that were planned
            with self._changed:
                self._error, self._is_planning = error, False
                self._changed.notify_all()

    def _admit(self, batch: _Batch) -> bool:
        """Have a batch's blocks fetched and its rows made, if memory allows. The lock is held."""
        while self._releases and self._releases[0][0] <= batch.start:
            slot = self._held.pop(heapq.heappop(self._releases)[1])
            slot.is_released = True
            self._free(slot)
        missing = [wanted for wanted in batch.wanted if wanted[:3] not in self._held]
        size = int(self._blocks.block_bytes)
        is_next = batch.number == self._returned
        if self.held_bytes + len(missing) * size > self._memory and not is_next:
            return False
        for wanted in missing:
            future = self._fetchers.submit(self._blocks.read_block, wanted.shard, wanted.block)
            self._held[wanted[:3]] = _Slot(future, size)
            heapq.heappush(self._releases, (wanted.release, wanted[:3]))
            self.held_bytes += size
        self.largest_held_bytes = max(self.largest_held_bytes, self.held_bytes)
        batch.slots = [self._held[wanted[:3]] for wanted in batch.wanted]
        for slot in batch.slots:
            slot.uses += 1
        self._queue.append(batch)
        self._give()
        return True

    def _give(self) -> None:
        """Give batches to the workers, those that are to be made ahead. The lock is held."""
        while self._given < min(len(self._queue), self._ahead + 1) and not self._is_closed:
            batch = self._queue[self._given]
            self._given += 1
            starts = range(0, len(batch.rows), self._chunk_rows)
            batch.made = [None] * len(batch.rows)
            batch.chunks = len(starts)
            for start in starts:
                self._workers.submit(self._make_chunk, batch, start, min(start + self._chunk_rows, len(batch.rows)))

    def _make_chunk(self, batch: _Batch, start: int, stop: int) -> None:
        """Make some rows of a batch, and, if they are its last, the batch."""
        try:
            raws = [self._raw(batch, i) for i in range(start, stop)]
            rows: list[Row] = self._make_rows(raws)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            rows = [Row(None, error)] * (stop - start)
        batch.made[start:stop] = rows
        with self._changed:
            batch.chunks -= 1
            if batch.chunks:
                return
        finished = self._finish(batch)
        with self._changed:
            batch.finished = finished
            batch.made.clear()
            for slot in batch.slots:
                slot.uses -= 1
                self._free(slot)
            batch.slots.clear()
            self._plan_soon()
            self._changed.notify_all()

    def _raw(self, batch: _Batch, row: int) -> RawRow:
        sample: Any
        try:
            sample = batch.slots[batch.which[row]].future.result().sample(batch.rows[row])
        except ShardkitError as error:
            sample = error
        return RawRow(sample, self._epoch, batch.positions[row])

    def _finish(self, batch: _Batch) -> Finished:
        values = []
        skipped: list[BaseException] = []
        for row in batch.made:
            if row is None:
                continue
            if row.error is None:
                values.append(row.value)
            elif row.is_skippable and self._skips:
                skipped.append(row.error)
            else:
                return Finished(None, batch.stop, skipped, row.error)
        try:
            return Finished(self._collate(values), batch.stop, skipped)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            return Finished(None, batch.stop, skipped, error)

    def _free(self, slot: _Slot) -> None:
        """Count a block that nobody needs any more as gone. The lock is held."""
        if slot.is_released and not slot.uses:
            self.held_bytes -= slot.size

    def _plan_batches(self, position: int) -> Iterator[_Batch]:
        """Yield what each batch needs, from a position on. Many are planned at a time, which is quicker."""
        number, stretch = 0, _FIRST_STRETCH
        while bounds := self._bounds(position, stretch):
            dealt = [self._plan.deal(a, b, self._rank, self._batches.world_size) for a, b in bounds]
            positions = np.concatenate(dealt)
            ends = np.cumsum([len(part) for part in dealt]).tolist()
            found = self._plan.locate(positions)
            shards, blocks, rows = self._blocks.places(found.samples)
            wanted, which = _distinct(found.lanes, shards, blocks, found.release)
            begin = 0
            for (start, stop), end in zip(bounds, ends, strict=True):
                own, inverse = np.unique(which[begin:end], return_inverse=True)
                yield _Batch(
                    number,
                    start,
                    stop,
                    positions[begin:end].tolist(),
                    rows[begin:end].tolist(),
                    [wanted[i] for i in own.tolist()],
                    inverse.tolist(),
                )
                number += 1
                begin = end
            position = bounds[-1][1]
            stretch = min(2 * stretch, _STRETCH)

    def _bounds(self, position: int, stretch: int) -> list[tuple[int, int]]:
        """Return where the next batches begin and end, about so many positions and at least one batch."""
        bounds: list[tuple[int, int]] = []
        last = position + stretch
        while position < last and (stop := self._batches.stop(position)) is not None:
            bounds.append((position, stop))
            position = stop
        return bounds


def _distinct(lanes: IntArray, shards: IntArray, blocks: IntArray, release: IntArray) -> tuple[list[_Wanted], IntArray]:
    """Return each block of each lane once, in the order of first use, and for each row which of them it lies in."""
    _, ids = np.unique(shards << 32 | blocks, return_inverse=True)
    _, first, which = np.unique(ids * (1 + lanes.max()) + lanes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    columns = (column[first].tolist() for column in (lanes, shards, blocks, release))
    return [_Wanted(*wanted) for wanted in zip(*columns, strict=True)], rank[which]
