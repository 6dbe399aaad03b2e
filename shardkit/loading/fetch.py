"""Blocks, read ahead in the order in which they are needed, and held until the epoch no longer needs them."""

import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardkit.loading.columnar import Arena
from shardkit.loading.threads import Failures, Threads
from shardkit.order.plan import IntArray
from shardkit.order.schedule import Places, Planned, Wanted
from shardkit.reading.block import Block
from shardkit.reading.memory import Buffers
from shardkit.reading.page_cache import ResidentBlock

if TYPE_CHECKING:
    from threading import RLock

_THREADS = 2  # enough to copy from the page cache; more would take processors from the threads that decode
_MORE_THREADS = ((0.002, 4), (0.02, 32))  # threads if a fetch waits for more than these seconds: a disk, a server


class Blocks(Places, Protocol):
    """The source of blocks: a ShardDataset."""

    block_bytes: float

    def open_block(self, shard: int, block: int, buffers: Buffers, /) -> Block | ResidentBlock:
        """Return a block: read into memory of the buffers if possible, or only opened if it is in the page cache."""
        ...


class Slot:
    """A block that is held for one lane, as long as the epoch needs it there.

    Attributes:
        number: Its sequence number, in the order in which blocks are needed and fetched.
        place: Its reserved place in the arena, even if it is not put there; -1 if there is no room.
        content: The block, or the error of reading it; None if it is not fetched yet, or is in the arena.
    """

    __slots__ = ("content", "number", "place")

    def __init__(self, number: int, place: int) -> None:
        self.number = number
        self.place = place
        self.content: Block | ResidentBlock | Exception | None = None


class Fetcher:
    """Fetches blocks in its own threads, and holds them.

    All methods are called with the lock held.

    Args:
        blocks: The source of the blocks.
        lock: Guards this object.
        on_fetched: Called when a block was fetched, with the lock held.
        failures: Takes errors that do not belong to a block.
        arena: Takes the blocks that can be decoded as a whole; None if there is no arena.
        places: How many blocks the arena has room for.
        buffers: The memory that blocks are read into.

    Attributes:
        held_bytes: The size of all blocks that are held or being fetched, each counted with the mean size of a block.
        largest_held_bytes: The largest value of ``held_bytes`` so far.
        threads: The threads that fetch.
    """

    def __init__(
        self,
        blocks: Blocks,
        lock: "RLock",
        on_fetched: Callable[[], None],
        failures: Failures,
        *,
        arena: Arena | None,
        places: int,
        buffers: Buffers,
    ) -> None:
        self._blocks = blocks
        self._lock = lock
        self._on_fetched = on_fetched
        self._arena = arena
        self._buffers = buffers
        self._free_places = list(range(places - 1, -1, -1))
        self._places = np.zeros(1 << 10, dtype=np.int64)  # of the slots, by number; -1 if not in the arena
        self._block_bytes = max(1, int(blocks.block_bytes))
        self._slots: dict[int, Slot] = {}  # the held slots, by number
        self._fetched: set[int] = set()  # numbers of fetched slots after the first one that is not fetched
        self._fetched_count = 0  # the number of the first slot that is not fetched
        self._releases: list[tuple[int, int]] = []  # a heap of (position from which a slot is not needed, its number)
        self._retired: deque[tuple[int, Slot]] = deque()  # (number of the first batch that does not need it, slot)
        self._waits = 0.0  # how many seconds a fetch waits: a moving average
        self.held_bytes = 0
        self.largest_held_bytes = 0
        self.threads = Threads(_THREADS, "shardkit-fetch", failures)

    def fetch(self, planned: Planned) -> None:
        """Fetch the blocks that a batch needs and no earlier batch needs."""
        for number, wanted in enumerate(planned.wanted, planned.opened - len(planned.wanted)):
            slot = Slot(number, self._free_places.pop() if self._free_places else -1)
            self._slots[number] = slot
            heapq.heappush(self._releases, (wanted.release, number))
            self.threads.submit(self._fetch, slot, wanted)
        self.held_bytes += self.size_of(planned)
        self.largest_held_bytes = max(self.largest_held_bytes, self.held_bytes)

    def size_of(self, planned: Planned) -> int:
        """Return by how much ``held_bytes`` grows when a batch's blocks are fetched."""
        return len(planned.wanted) * self._block_bytes

    def has(self, planned: Planned) -> bool:
        """Return whether all blocks that a batch and the earlier ones need are fetched."""
        return planned.opened <= self._fetched_count

    def slots(self, planned: Planned) -> list[Slot]:
        """Return the slot of each of a batch's rows. Its blocks must have been fetched."""
        return [self._slots[number] for number in planned.numbers.tolist()]

    def arena_rows(self, planned: Planned) -> IntArray | None:
        """Return where a batch's rows are in the arena; None if not all of them are there."""
        if self._arena is None:
            return None
        places = self._places[planned.numbers]
        return places * self._arena.block_samples + planned.rows if places.min(initial=0) >= 0 else None

    def retire(self, position: int, number: int) -> None:
        """Note that batches from this position on are being admitted; the first of them has this number."""
        while self._releases and self._releases[0][0] <= position:
            self._retired.append((number, self._slots[heapq.heappop(self._releases)[1]]))

    def free(self, made: int) -> None:
        """Free the blocks that are needed only by batches before this number."""
        while self._retired and self._retired[0][0] <= made:
            slot = self._retired.popleft()[1]
            del self._slots[slot.number]
            if slot.place >= 0:
                if self._arena is not None:
                    self._arena.clear(slot.place)
                self._free_places.append(slot.place)
            self.held_bytes -= self._block_bytes

    def drop(self) -> None:
        """Free all blocks. No more batches can be made."""
        self._slots.clear()
        self._releases.clear()
        self._retired.clear()
        self._arena = None

    def hurry(self) -> None:
        """Start more threads if fetches mostly wait. Called when the training loop waits for a block."""
        most = max((count for seconds, count in _MORE_THREADS if self._waits > seconds), default=0)
        if self.threads.count < most:
            self.threads.add(self.threads.count)
            self._waits = 0.0  # measure again before starting more

    def _fetch(self, slot: Slot, wanted: Wanted) -> None:
        """Fetch a block, and decode it as a whole if that is possible."""
        began, computed = time.perf_counter(), time.thread_time()
        content: Block | ResidentBlock | Exception | None
        try:
            content = self._blocks.open_block(wanted.shard, wanted.block, self._buffers)
        except Exception as error:  # noqa: BLE001 - it is raised in the place of the block's rows
            content = error
        waited = (time.perf_counter() - began) - (time.thread_time() - computed)
        arena = self._arena
        if arena is not None and slot.place >= 0 and isinstance(content, Block):
            try:
                content = None if arena.put(slot.place, content) else content
            except Exception as error:  # noqa: BLE001 - as above
                content = error
        with self._lock:
            self._waits += (waited - self._waits) / 4
            slot.content = content
            if slot.number >= len(self._places):
                self._places = np.concatenate([self._places, np.zeros_like(self._places)])
            self._places[slot.number] = slot.place if content is None else -1
            self._fetched.add(slot.number)
            while self._fetched_count in self._fetched:
                self._fetched.remove(self._fetched_count)
                self._fetched_count += 1
            self._on_fetched()
