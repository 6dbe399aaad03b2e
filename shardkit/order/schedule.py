"""The order of an epoch -> which blocks and rows each batch of a rank needs, in which order, and until when."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from shardkit.order.plan import Batches, IntArray, OrderPlan

_FIRST_STRETCH, _STRETCH = 1 << 12, 1 << 18  # positions of the epoch are planned at a time, at first and later


class Places(Protocol):
    """What knows where samples are: a ShardDataset."""

    def places(self, samples: IntArray, /) -> tuple[IntArray, IntArray, IntArray]:
        """Return the shard, the block and the row in the block of samples."""
        ...


class Wanted(NamedTuple):
    """A block that is needed in a lane (0 for all, if all blocks are held), and from which position on it is not."""

    lane: int
    shard: int
    block: int
    release: int


class Planned(NamedTuple):
    """What a batch needs.

    A block that is open in a lane has a number: they are numbered in the order in which batches need them first.

    Attributes:
        number: The batch's number, from 0.
        start: The position in the epoch at which it begins, all ranks' rows counted.
        stop: The position after it.
        positions: The position of each of this rank's rows.
        numbers: For each row, the number of the open block that it is in.
        rows: For each row, which of that block's samples it is.
        wanted: The blocks that no batch before it needs.
        opened: How many blocks this and all batches before it need: the number of the next one.
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
    """Yield what each batch of a rank needs, from a position on. Many are planned at a time, which is quicker.

    Args:
        places: What knows where samples are.
        plan: The epoch's order.
        batches: Where batches begin and end.
        position: Where to begin.
        rank: Which rank's rows.
        holds_all: Keep every block to the end. Else one that the end of a lane cuts in two is wanted twice, as it is
            done with in one lane long before it is begun in the other.
    """
    number, stretch, opened = 0, _FIRST_STRETCH, 0
    open_blocks: dict[tuple[int, int, int], tuple[int, int]] = {}  # of a lane: the number, and the release
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
        new: list[int] = []  # which of them no batch before needs
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
    """Return where the next batches begin and end, about so many positions and at least one batch."""
    bounds: list[tuple[int, int]] = []
    last = position + stretch
    while position < last and (stop := batches.stop(position)) is not None:
        bounds.append((position, stop))
        position = stop
    return bounds


def _distinct(
    lanes: IntArray, shards: IntArray, blocks: IntArray, release: IntArray
) -> tuple[list[Wanted], list[int], IntArray]:
    """Return each block of each lane once, in the order of first use; where that is; and for each row which it is."""
    _, ids = np.unique(shards << 32 | blocks, return_inverse=True)
    _, first, which = np.unique(ids * (1 + lanes.max(initial=0)) + lanes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    columns = (column[first].tolist() for column in (lanes, shards, blocks, release))
    return [Wanted(*wanted) for wanted in zip(*columns, strict=True)], first.tolist(), rank[which]
