"""The order of an epoch -> the blocks and rows that each batch of a rank needs, and when a block is no longer used."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from shardkit.order.plan import Batches, IntArray, OrderPlan

_FIRST_STRETCH, _STRETCH = 1 << 12, 1 << 18  # positions that are planned at a time: at first, and at most


class Places(Protocol):
    """Finds samples in shards: a ShardDataset."""

    def places(self, samples: IntArray, /) -> tuple[IntArray, IntArray, IntArray]:
        """Return the shard, the block and the row in the block of samples."""
        ...


class Wanted(NamedTuple):
    """A block that a lane needs before position ``release``. If all blocks are held, all of them have lane 0."""

    lane: int
    shard: int
    block: int
    release: int


class Planned(NamedTuple):
    """The blocks and rows that a batch needs.

    Each block that is open in a lane has a number. Blocks are numbered in the order in which batches first need them.

    Attributes:
        number: The batch's number, from 0.
        start: The first position of the batch in the epoch, over all ranks.
        stop: The position after its last one.
        positions: The position of each of this rank's rows.
        numbers: For each row, the number of the open block that contains it.
        rows: For each row, the number of its sample in that block.
        wanted: The blocks that this batch is the first to need.
        opened: How many blocks this and all earlier batches need. This is also the number of the next block.
    """

    number: int
    start: int
    stop: int
    positions: IntArray
    numbers: IntArray
    rows: IntArray
    wanted: list[Wanted]
    opened: int


def schedule(
    places: Places, plan: OrderPlan, batches: Batches, *, position: int, rank: int, holds_all: bool
) -> Iterator[Planned]:
    """Yield the blocks and rows that each batch of a rank needs. Many batches are planned at a time, which is faster.

    Args:
        places: Finds samples in shards.
        plan: The epoch's order.
        batches: Where batches begin and end.
        position: The position to begin at.
        rank: The rank whose batches are planned.
        holds_all: Keep every block to the end. Otherwise, a block that the end of a lane cuts in two is needed twice:
            one lane has finished it long before the other begins it.
    """
    number, stretch, opened = 0, _FIRST_STRETCH, 0
    open_blocks: dict[tuple[int, int, int], tuple[int, int]] = {}  # lane, shard, block -> number, release
    while bounds := _bounds(batches, position, stretch):
        dealt = [plan.deal(start, stop, rank, batches.world_size) for start, stop in bounds]
        positions = np.concatenate(dealt)
        ends = np.cumsum([len(part) for part in dealt]).tolist()
        found = plan.locate(positions)
        shards, blocks, rows = places.places(found.samples)
        lanes, release = found.lanes, found.release
        if holds_all:
            lanes, release = np.zeros_like(lanes), np.full_like(release, plan.num_samples)
        wanted, firsts, which = _distinct(lanes, shards, blocks, release)
        new: list[int] = []  # the blocks that no earlier batch needs
        numbers = np.empty(len(wanted), dtype=np.int64)
        for i, one in enumerate(wanted):
            if one[:3] not in open_blocks:
                open_blocks[one[:3]] = (opened + len(new), one.release)
                new.append(i)
            numbers[i] = open_blocks[one[:3]][0]
        numbers = numbers[which]
        begin, at = 0, 0
        for (start, stop), end in zip(bounds, ends, strict=True):
            until = at
            while until < len(new) and firsts[new[until]] < end:
                until += 1
            own = [wanted[i] for i in new[at:until]]
            opened += len(own)
            part = slice(begin, end)
            yield Planned(number, start, stop, positions[part], numbers[part], rows[part], own, opened)
            number, begin, at = number + 1, end, until
        position = bounds[-1][1]
        open_blocks = {key: value for key, value in open_blocks.items() if value[1] > position}
        stretch = min(2 * stretch, _STRETCH)


def _bounds(batches: Batches, position: int, stretch: int) -> list[tuple[int, int]]:
    """Return where the next batches begin and end: at least one, and batches with about ``stretch`` positions."""
    bounds: list[tuple[int, int]] = []
    last = position + stretch
    while position < last and (stop := batches.stop(position)) is not None:
        bounds.append((position, stop))
        position = stop
    return bounds


def _distinct(
    lanes: IntArray, shards: IntArray, blocks: IntArray, release: IntArray
) -> tuple[list[Wanted], list[int], IntArray]:
    """Return each block of each lane once, in the order of first use; the row of its first use; each row's block."""
    _, ids = np.unique(shards << 32 | blocks, return_inverse=True)
    _, first, which = np.unique(ids * (1 + lanes.max(initial=0)) + lanes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    columns = (column[first].tolist() for column in (lanes, shards, blocks, release))
    return [Wanted(*wanted) for wanted in zip(*columns, strict=True)], first.tolist(), rank[which]
