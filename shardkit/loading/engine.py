"""The blocks of an epoch, in order -> fetched ahead -> rows made by workers -> batches, in order.

::

    plan     which blocks and rows each batch of this rank needs; admits blocks while they fit into memory
    fetch    blocks, in the order in which they are needed; blocks of small samples are decoded here as a whole, and
             blocks of large samples that are in the page cache are only opened
    make     batches whose blocks have all been fetched: chunks of their rows, or a gather from whole blocks
    next     the next batch in the order, whichever was ready first

Each stage is a pool of threads. No task waits for anything later in the order, so nothing can hang. The blocks of the
next batch are always admitted, so full memory slows the loader down but never stops it. An error of a block, a row or a
batch is raised in its place in the order; any other error ends the pass immediately.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from shardkit.errors import WorkerError
from shardkit.loading.batch_memory import BatchMaker, Slab
from shardkit.loading.columnar import Arena
from shardkit.loading.fetch import Blocks, Fetcher, Slot
from shardkit.loading.rows import RawRow, Row
from shardkit.loading.threads import Threads
from shardkit.order.plan import Batches, IntArray, OrderPlan
from shardkit.order.schedule import Planned, schedule
from shardkit.reading.block import Block
from shardkit.reading.memory import Buffers
from shardkit.reading.page_cache import ResidentBlock

_CHUNK_ROWS = 16  # rows that a worker gets at a time: the cost of passing them is small compared with decoding an image
# How many batches are made ahead of the one that the training loop waits for: this many, ...
_AHEAD_BATCHES = 2
_AHEAD_ROWS = 512  # ... or, if that is more, batches with this many rows together, ...
_AHEAD_GATHERED_ROWS = 8192  # ... or this many rows if they are gathered, which is as quick as waking a thread; ...
_AHEAD_BYTES = 32_000_000  # ... but after the first, at most as many as have this many bytes, read or made
_LOOK_SECONDS = 0.1  # seconds of waiting for batches after which the load of the processors is checked:
_BUSY = 0.6  # if less than this part of it was spent computing, workers wait for data, and more of them are started
_LEAST_BLOCK_BYTES = 512  # one member's header: a limit in case a manifest claims more blocks than its shards can have


RowsMaker = Callable[[Sequence[RawRow], Slab | None, int], list[Row]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch.

    Attributes:
        value: The batch for the training loop.
        stop: The position in the epoch after the batch.
        skipped: The errors of the rows that were left out, in order.
        error: The error to raise in place of the batch.
    """

    value: Any
    stop: int
    skipped: Sequence[BaseException] = ()
    error: BaseException | None = None


class _Batch:
    """A planned batch, and its rows so far."""

    __slots__ = ("chunks", "finished", "made", "plan", "slab")

    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        self.slab: Slab | None = None
        self.made: list[Row | None] = []
        self.chunks = 0  # how many are still to be made
        self.finished: Finished | None = None


class Engine:
    """One pass over an epoch, or the rest of it, for one rank.

    Args:
        blocks: The source of the blocks.
        plan: The epoch's order.
        batches: Where batches begin and end.
        position: The position to begin at.
        rank: The rank whose rows are made.
        epoch: The epoch's number.
        make_rows: Makes rows from samples' bytes. Called by ``num_workers`` threads.
        make_batch: Makes a batch from rows. Called by the same threads.
        make_arena: Returns an arena with room for a number of blocks; None if batches cannot be gathered.
        skips: Leave out rows that cannot be read or decoded.
        buffers: The memory that blocks are read into.
        num_workers: How many threads make rows at most.
        busy_workers: How many of them are started at first. More are started if they mostly wait.
        memory: How many bytes of blocks are held at most, unless the next batch needs more. If the dataset is not
            larger, each block is read once.
    """

    def __init__(  # noqa: PLR0913 - the parts of a pipeline; it is called in one place
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
        busy_workers: int,
        memory: int,
    ) -> None:
        self._epoch = epoch
        self._make_rows = make_rows
        self._make_batch = make_batch
        self._skips = skips
        self._memory = memory
        self._read_bytes = int(batches.batch_size * plan.num_blocks * blocks.block_bytes / max(1, plan.num_samples))
        self._chunk_rows = min(_CHUNK_ROWS, -(-batches.batch_size // num_workers))
        # Room for the blocks that memory allows, and for those that the next batch may need in addition. Any blocks
        # beyond these are not decoded as a whole.
        beyond = batches.batch_size + plan.lanes
        places = min(memory // max(_LEAST_BLOCK_BYTES, int(blocks.block_bytes)) + beyond, plan.num_blocks + plan.lanes)
        self._arena = make_arena(places) if make_arena else None
        ahead_rows = _AHEAD_GATHERED_ROWS if self._arena else _AHEAD_ROWS
        self._ahead = max(_AHEAD_BATCHES, -(-ahead_rows // batches.batch_size))
        # A Ctrl-C may come anywhere in Python code, even inside threading.Condition, whose lock would then be in an
        # unknown state. So the training loop's thread uses only these two objects, which are written in C.
        self._lock = threading.RLock()
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._failures: SimpleQueue[BaseException] = SimpleQueue()  # errors without a place in the order
        self._fetcher = Fetcher(
            blocks, self._lock, self._take_fetched, self._failures, arena=self._arena, places=places, buffers=buffers
        )
        holds_all = plan.num_blocks * blocks.block_bytes <= memory
        self._planned = schedule(blocks, plan, batches, position=position, rank=rank, holds_all=holds_all)
        self._upcoming: Planned | None = None  # not yet admitted
        self._made: set[int] = set()  # numbers of made batches after the first one that is not made
        self._made_count = 0  # the number of the first batch that is not made
        self._queue: deque[_Batch] = deque()  # admitted, and not yet returned
        self._given = 0  # how many batches of the queue were given to workers
        self._returned = 0
        self._is_planned = False  # whether planning has reached the end of the epoch
        self._error: Exception | None = None  # an error of planning, raised after the batches that were planned
        self._is_planning = False
        self._is_awaited = False  # the training loop waits for the next batch
        self._is_closed = False
        self._process = os.getpid()
        self._planner = Threads(1, "shardkit-plan", self._failures)
        self._num_workers = num_workers
        self._workers = Threads(busy_workers, "shardkit-rows", self._failures)
        self._pools = (self._planner, self._fetcher.threads, self._workers)
        self._busy_workers = busy_workers
        self._awaited = self._computed = 0.0  # recent seconds of waiting for batches, and of computing in that time
        with self._lock:
            self._plan_soon()

    def next(self) -> Finished | None:
        """Wait for the next batch and return it; None at the end of the epoch, or if the engine was closed.

        Raises:
            WorkerError: A thread has died, or the engine was created in another process.
            BaseException: The error of a thread.
        """
        if os.getpid() != self._process:
            raise WorkerError("an iterator of a ShardLoader cannot be used in another process; call iter() there")
        has_changed = True
        while True:
            has_ended = not has_changed and any(pool.has_ended for pool in self._pools)
            if not self._failures.empty():
                raise self._failures.get()
            with self._lock:
                if self._queue and self._queue[0].finished:
                    self._is_awaited = False
                    batch = self._queue.popleft()
                    self._given -= 1
                    self._returned += 1
                    self._give()
                    self._plan_soon()
                    return batch.finished
                if self._is_closed:
                    return None
                if not self._queue and self._is_planned:
                    if self._error is not None:
                        raise self._error
                    return None
                self._is_awaited = True
            if has_ended:  # because of an error that was raised outside of its code, where nothing could catch it
                raise WorkerError("a thread of the loader has died; see above for its error")
            has_changed = self._wait()

    def _wait(self) -> bool:
        """Wait for a change; return whether there was one. Start more workers if the existing ones wait, too."""
        began, computed = time.perf_counter(), time.process_time()
        has_changed = False
        with contextlib.suppress(Empty):
            # A Ctrl-C just before the wait takes effect only after it, so the wait has a time limit.
            self._changes.get(timeout=_LOOK_SECONDS)
            has_changed = True
        if self._workers.count == self._num_workers:
            return has_changed
        if self._given:  # the workers have something to do
            self._awaited += time.perf_counter() - began
            self._computed += time.process_time() - computed
        if self._awaited >= _LOOK_SECONDS:
            if self._computed < _BUSY * self._busy_workers * self._awaited:
                self._workers.add(min(self._workers.count, self._num_workers - self._workers.count))
            self._awaited = self._computed = 0.0
        return has_changed

    def _note_change(self) -> None:
        """Wake the training loop, so that it checks again."""
        if self._changes.empty():
            self._changes.put(None)

    def close(self, *, wait: bool) -> None:
        """End all threads: tasks that have begun are finished, the others are dropped."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._fetcher.drop()  # now, and not only when Python's garbage collector runs
            self._arena = None
            self._note_change()
        for pool in self._pools:
            pool.close()
        if wait:
            for pool in self._pools:
                pool.join(None)

    # Planning

    def _plan_soon(self) -> None:
        """Make the planner admit batches, unless this would gain nothing now. The lock is held."""
        upcoming = self._upcoming
        if upcoming and not upcoming.wanted and len(self._queue) > 2 * self._ahead:
            return  # there is nothing to fetch, and waking a thread for one small batch costs more than making it
        if not (self._is_planning or self._is_planned or self._is_closed):
            self._is_planning = True
            self._planner.submit(self._admit_batches)

    def _admit_batches(self) -> None:
        """Plan and admit batches until memory is full."""
        while True:
            try:
                self._upcoming = self._upcoming or next(self._planned, None)
            except Exception as error:  # noqa: BLE001 - raised after the batches that were planned
                self._error = error
            with self._lock:
                if self._upcoming is None or self._is_closed:
                    self._is_planned, self._is_planning = True, False
                    self._note_change()
                    return
                if not self._admit(self._upcoming):
                    self._is_planning = False
                    return
                self._upcoming = None

    def _admit(self, planned: Planned) -> bool:
        """Fetch the blocks that a batch needs and return True, if memory allows. The lock is held."""
        self._fetcher.retire(planned.start, planned.number)
        self._fetcher.free(self._made_count)
        is_next = planned.number == self._returned
        if self._fetcher.held_bytes + self._fetcher.size_of(planned) > self._memory and not is_next:
            return False
        if len(self._queue) > 4 * self._ahead and not planned.wanted:  # enough batches are admitted
            return False
        self._fetcher.fetch(planned)
        self._queue.append(_Batch(planned))
        self._give()
        return True

    # Making batches

    def _take_fetched(self) -> None:
        """Continue after a block was fetched. The lock is held."""
        if self._is_awaited and self._queue and not self._fetcher.has(self._queue[0].plan):
            self._fetcher.hurry()
        self._give()

    def _give(self) -> None:
        """Give batches whose blocks were fetched to the workers, a limited number ahead. The lock is held."""
        ahead = min(self._ahead, max(1, _AHEAD_BYTES // max(self._read_bytes, self._make_batch.nbytes)))
        while self._given < min(len(self._queue), ahead + 1) and not self._is_closed:
            batch = self._queue[self._given]
            if not self._fetcher.has(batch.plan):
                return
            self._given += 1
            arena_rows = self._fetcher.arena_rows(batch.plan)
            if arena_rows is not None:
                self._workers.submit(self._gather, batch, arena_rows)
                continue
            starts = range(0, len(batch.plan.rows), self._chunk_rows)
            batch.made = [None] * len(batch.plan.rows)
            batch.chunks = len(starts)
            batch.slab = self._make_batch.slab(len(batch.plan.rows)) if self._arena is None else None
            slots = self._fetcher.slots(batch.plan)
            for start in starts:
                stop = min(start + self._chunk_rows, len(slots))
                self._workers.submit(self._make_chunk, batch, start, slots[start:stop])

    def _gather(self, batch: _Batch, rows: IntArray) -> None:
        """Make a batch whose rows are all in the arena."""
        try:
            finished = Finished(self._arena_of_batch().batch(rows), batch.plan.stop)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            finished = Finished(None, batch.plan.stop, (), error)
        self._end(batch, finished)

    def _make_chunk(self, batch: _Batch, start: int, slots: list[Slot]) -> None:
        """Make some rows of a batch; after the last rows, make the batch."""
        stop = start + len(slots)
        try:
            rows = self._made_rows(batch, start, slots)
        except BaseException as error:  # noqa: BLE001 - it is raised in the batch's place
            rows = [Row(None, error)] * len(slots)
        batch.made[start:stop] = rows
        with self._lock:
            batch.chunks -= 1
            if batch.chunks:
                return
        self._end(batch, self._finish(batch))

    def _made_rows(self, batch: _Batch, start: int, slots: list[Slot]) -> list[Row]:
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
            if isinstance(content, (Block, ResidentBlock)):
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
        with self._lock:
            batch.finished = finished
            batch.made.clear()
            batch.slab = None
            self._made.add(batch.plan.number)
            while self._made_count in self._made:
                self._made.remove(self._made_count)
                self._made_count += 1
            self._fetcher.free(self._made_count)
            self._plan_soon()
            self._note_change()
