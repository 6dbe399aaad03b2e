"""A file as the batches of a pass: a sample is a piece of 1 MB, so 1 000 of them are a GB."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loading.job import Batch, Job, Passes

PIECE = 1_000_000
"""The size of a piece in bytes."""


def read_pieces(read: Callable[[int], Any]) -> Iterator[Batch]:
    """Yield the pieces that a function returns, until it returns nothing."""
    while piece := read(PIECE):
        yield [piece], None


def passes_over_blocks(job: Job, read: Callable[[int, int], Any]) -> Passes:
    """Return a function that reads a file in blocks, as many at a time as the job has workers.

    Args:
        job: Its options have ``size`` and ``block``, whole numbers of pieces.
        read: Returns bytes of the file, given an offset and a size. Called by the workers.
    """
    block = job.options["block"]
    starts = range(0, job.options["size"], block)
    # The threads are kept between passes, and so are their connections.
    in_turn = ThreadPoolExecutor(job.workers).map if job.workers > 1 else map

    def one_pass() -> Iterator[Batch]:
        for data in in_turn(lambda start: read(start, block), starts):
            view = memoryview(data)
            yield [view[at : at + PIECE] for at in range(0, block, PIECE)], None

    return one_pass
