"""The blocks that an epoch needs, in order -> fetched ahead -> rows made by workers -> batches, in order.

::

    plan     which blocks and rows each batch of this rank needs; admits blocks while they fit into memory
    fetch    blocks, in the order in which they are needed; those of small samples are decoded here, whole
    make     batches of which everything is there: chunks of their rows, or a gather from whole blocks
    next     the next batch in the order, whatever was ready first

Each stage is a pool of threads whose tasks all end by themselves: nothing waits for what comes later in the order, so
nothing can hang. What the next batch needs is always admitted, so memory that is full slows down and never stops.
"""

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardkit.blocks import Block
from shardkit.buffers import Buffers
from shardkit.columnar import Arena
from shardkit.errors import WorkerError
from shardkit.order import Batches, IntArray, OrderPlan
from shardkit.rows import RawRow, Row
from shardkit.schedule import Places, Planned, schedule
from shardkit.slabs import BatchMaker, Slab
from shardkit.threads import Threads

_FETCH_THREADS = 4  # a local read is a copy; these hide a disk's latency
_CHUNK_ROWS = 16  # rows are handed to a worker at a time: enough that handing over costs nothing beside an image
_AHEAD_BATCHES = 2  # are made beyond the one that is being waited for, ...
_AHEAD_ROWS = 512  # ... or as many as have so many rows


class Blocks(Places, Protocol):
    """Where blocks come from: a ShardDataset."""

    block_bytes: float

    def read_block(self, shard: int, block: int, buffers: Buffers, /) -> Block:
        """Return a block, read into one of the buffers if it can be."""
        ...


RowsMaker = Callable[[Sequence[RawRow], Slab | None, int], list[Row]]


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
    """A block that is held for one lane, until the epoch has passed it.

    Attributes:
        number: The how many'th it is; they are numbered and fetched in the order in which they are needed.
        place: Where it is in the arena, or would be; -1 if there is no room.
        content: The block, or what went wrong; None if it is not here yet, or in the arena.
    """

    __slots__ = ("content", "number", "place")

    def __init__(self, number: int, place: int) -> None:
        self.number = number
        self.place = place
        self.content: Block | Exception | None = None


class _Batch:
    """A batch that is planned, and what is made of it."""

    __slots__ = ("chunks", "finished", "made", "plan", "slab")

    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        self.slab: Slab | None = None
        self.made: list[Row | None] = []
        self.chunks = 0  # still to be made
        self.finished: Finished | None = None


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
        make_batch: Makes a batch of rows. Called by the same threads.
        make_arena: Returns an arena with room for so many blocks, if batches can be gathered from whole blocks.
        skips: Leave out rows that cannot be read or decoded.
        buffers: What blocks are read into.
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
        make_batch: BatchMaker,
        make_arena: Callable[[int], Arena] | None,
        skips: bool,
        buffers: Buffers,
        num_workers: int,
        memory: int,
    ) -> None:
        self._blocks = blocks
        self._epoch = epoch
        self._make_rows = make_rows
        self._make_batch = make_batch
        self._skips = skips
        self._memory = memory
        self._ahead = max(_AHEAD_BATCHES, -(-_AHEAD_ROWS // batches.batch_size))
        self._chunk_rows = min(_CHUNK_ROWS, -(-batches.batch_size // num_workers))
        # Room for what memory allows and for what the next batch may need beyond that; the rest is not decoded whole.
        self._block_bytes = max(1, int(blocks.block_bytes))
        places = min(memory // self._block_bytes + batches.batch_size + plan.lanes, plan.num_blocks + plan.lanes)
        self._free_places = list(range(places - 1, -1, -1))
        self._places = np.zeros(1 << 10, dtype=np.int64)  # of the slots, by number; -1 if not in the arena
        self._arena = make_arena(places) if make_arena else None
        self._buffers = buffers
        self._planned = schedule(blocks, plan, batches, position=position, rank=rank)
        self._upcoming: Planned | None = None  # not yet admitted
        self._slots: dict[int, _Slot] = {}  # those that are held, by number
        self._fetched: set[int] = set()  # numbers of slots that are there though one before them is not
        self._fetched_count = 0  # slots before which all are there
        self._releases: list[tuple[int, int]] = []  # a heap: from which position on which slot is not needed
        self._retired: deque[tuple[int, _Slot]] = deque()  # the batch from which on a slot is not needed
        self._made: set[int] = set()  # numbers of batches that are made though one before them is not
        self._made_count = 0  # batches before which all are made
        self.held_bytes = 0
        self.largest_held_bytes = 0
        self._queue: deque[_Batch] = deque()  # admitted, and not yet returned
        self._given = 0  # batches of the queue that workers have
        self._returned = 0
        self._is_planned = False  # to the end
        self._error: BaseException | None = None  # of planning
        self._is_planning = False
        self._is_closed = False
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._planner = Threads(1, "shardkit-plan")
        self._fetchers = Threads(_FETCH_THREADS, "shardkit-fetch")
        self._workers = Threads(num_workers, "shardkit-rows")
        with self._changed:
            self._plan_soon()

    def next(self) -> Finished | None:
        """Return the next batch, as soon as it is there; None at the end, or when the engine was closed."""
        if os.getpid() != self._process:
            raise WorkerError("an iterator of a ShardLoader was taken along into another process; call iter() there")
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
        pools = (self._planner, self._fetchers, self._workers)
        for pool in pools:
            pool.close(wait=False)
        if wait:
            for pool in pools:
                pool.join(None)

    # Planning

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

    def _admit(self, planned: Planned) -> bool:
        """Have the blocks fetched that a batch needs, if memory allows. The lock is held."""
        while self._releases and self._releases[0][0] <= planned.start:
            self._retired.append((planned.number, self._slots[heapq.heappop(self._releases)[1]]))
        self._free_retired()
        size = len(planned.wanted) * self._block_bytes
        is_next = planned.number == self._returned
        if self.held_bytes + size > self._memory and not is_next:
            return False
        if len(self._queue) > 4 * self._ahead and not planned.wanted:  # there is enough to make
            return False
        self.held_bytes += size
        self.largest_held_bytes = max(self.largest_held_bytes, self.held_bytes)
        number = planned.opened - len(planned.wanted)
        for wanted in planned.wanted:
            slot = _Slot(number, self._free_places.pop() if self._free_places else -1)
            self._slots[number] = slot
            heapq.heappush(self._releases, (wanted.release, number))
            self._fetchers.submit(self._fetch, slot, wanted.shard, wanted.block)
            number += 1
        self._queue.append(_Batch(planned))
        self._give()
        return True

    def _free_retired(self) -> None:
        """Let go of blocks that no batch needs that is not made. The lock is held."""
        while self._retired and self._retired[0][0] <= self._made_count:
            slot = self._retired.popleft()[1]
            del self._slots[slot.number]
            if slot.place >= 0:
                if self._arena is not None:
                    self._arena.clear(slot.place)
                self._free_places.append(slot.place)
            self.held_bytes -= self._block_bytes

    # Fetching

    def _fetch(self, slot: _Slot, shard: int, block: int) -> None:
        """Fetch a block, and decode it whole where that is possible."""
        content: Block | Exception | None
        try:
            content = self._blocks.read_block(shard, block, self._buffers)
            if self._arena is not None and slot.place >= 0 and self._arena.put(slot.place, content):
                content = None
        except Exception as error:  # noqa: BLE001 - it is raised where the block's rows would come
            content = error
        with self._changed:
            slot.content = content
            if slot.number >= len(self._places):
                self._places = np.concatenate([self._places, np.zeros_like(self._places)])
            self._places[slot.number] = slot.place if content is None else -1
            self._fetched.add(slot.number)
            while self._fetched_count in self._fetched:
                self._fetched.remove(self._fetched_count)
                self._fetched_count += 1
            self._give()

    # Making batches

    def _give(self) -> None:
        """Give batches whose blocks are there to the workers, so many ahead. The lock is held."""
        while self._given < min(len(self._queue), self._ahead + 1) and not self._is_closed:
            batch = self._queue[self._given]
            if batch.plan.opened > self._fetched_count:
                return
            self._given += 1
            places = self._places[batch.plan.numbers]
            if self._arena is not None and places.min(initial=0) >= 0:
                self._workers.submit(self._gather, batch, places)
                continue
            starts = range(0, len(batch.plan.rows), self._chunk_rows)
            batch.made = [None] * len(batch.plan.rows)
            batch.chunks = len(starts)
            batch.slab = self._make_batch.slab(len(batch.plan.rows)) if self._arena is None else None
            slots = [self._slots[number] for number in batch.plan.numbers.tolist()]
            for start in starts:
                stop = min(start + self._chunk_rows, len(slots))
                self._workers.submit(self._make_chunk, batch, start, slots[start:stop])

    def _gather(self, batch: _Batch, places: IntArray) -> None:
        """Make a batch of rows that are all in the arena."""
        try:
            arena = self._arena_of_batch()
            finished = Finished(arena.batch(places * arena.block_samples + batch.plan.rows), batch.plan.stop)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            finished = Finished(None, batch.plan.stop, (), error)
        self._end(batch, finished)

    def _make_chunk(self, batch: _Batch, start: int, slots: list[_Slot]) -> None:
        """Make some rows of a batch, and, if they are its last, the batch."""
        stop = start + len(slots)
        try:
            rows = self._made_rows(batch, start, slots)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            rows = [Row(None, error)] * len(slots)
        batch.made[start:stop] = rows
        with self._changed:
            batch.chunks -= 1
            if batch.chunks:
                return
        self._end(batch, self._finish(batch))

    def _made_rows(self, batch: _Batch, start: int, slots: list[_Slot]) -> list[Row]:
        made: list[Row | None] = []
        raws: list[RawRow] = []
        part = slice(start, start + len(slots))
        places = zip(batch.plan.rows[part].tolist(), batch.plan.positions[part].tolist(), strict=True)
        for slot, (row, position) in zip(slots, places, strict=True):
            content = slot.content
            if content is None:
                arena = self._arena_of_batch()
                made.append(Row(arena.sample(slot.place * arena.block_samples + row)))
                continue
            made.append(None)
            sample: Any = content
            if isinstance(content, Block):
                try:
                    sample = content.sample(row)
                except Exception as error:  # noqa: BLE001 - it is raised in the row's place
                    sample = error
            raws.append(RawRow(sample, self._epoch, position))
        others = iter(self._make_rows(raws, batch.slab, start)) if raws else iter(())
        return [next(others) if row is None else row for row in made]

    def _arena_of_batch(self) -> Arena:
        if self._arena is None:
            raise RuntimeError("a block was put into an arena, and there is none")
        return self._arena

    def _finish(self, batch: _Batch) -> Finished:
        values: list[Any] = []
        kept: list[int] = []
        skipped: list[BaseException] = []
        for number, row in enumerate(batch.made):
            if row is None:
                continue
            if row.error is None:
                values.append(row.value)
                kept.append(number)
            elif row.is_skippable and self._skips:
                skipped.append(row.error)
            else:
                return Finished(None, batch.plan.stop, skipped, row.error)
        try:
            return Finished(self._make_batch.batch(values, batch.slab, kept), batch.plan.stop, skipped)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            return Finished(None, batch.plan.stop, skipped, error)

    def _end(self, batch: _Batch, finished: Finished) -> None:
        """Note that a batch is made."""
        with self._changed:
            batch.finished = finished
            batch.made.clear()
            batch.slab = None
            self._made.add(batch.plan.number)
            while self._made_count in self._made:
                self._made.remove(self._made_count)
                self._made_count += 1
            self._free_retired()
            self._plan_soon()
            self._changed.notify_all()
