"""shardkit's storage: a stream, or, with the option ``block``, blocks as the loader reads them."""

from collections.abc import Iterator
from typing import Any

from loading.job import Batch, Job, Passes

from remote.pieces import passes_over_blocks, read_pieces
from shardkit.reading.memory import Buffers
from shardkit.storage.registry import storage_for


def open_passes(job: Job) -> Passes:
    """Return a function that reads the file once."""
    url = job.options["url"]
    storage = storage_for(url, job.options.get("storage_options"))
    if "block" in job.options:
        buffers = Buffers(1 << 28)

        def read(start: int, count: int) -> Any:
            out = buffers.take(count).data
            storage.read_into(url, start, out)
            return out

        return passes_over_blocks(job, read)

    def forward() -> Iterator[Batch]:
        stream = storage.open(url)
        yield from read_pieces(stream.read)
        stream.close()

    return forward
