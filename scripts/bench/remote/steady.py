"""Measure the memory, descriptors and threads of an epoch: ``steady.py JOB`` prints them as JSON.

At first the training loop is slow, so that the loader fetches ahead as much as memory allows. Then it takes all
batches.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from loading.child import anonymous_bytes
from loading.job import Job

from shardkit import ShardDataset, ShardLoader

_LANES = 15  # leaves memory for fetching ahead
_PAUSE = 0.5  # seconds without growth after which the memory counts as full


def count(job: Job) -> dict[str, Any]:
    """Return the growth of memory and the bytes held for blocks, both at their peak, and the other counts."""
    dataset = ShardDataset(
        job.options.get("url", job.dataset), decode=False, storage_options=job.options.get("storage_options")
    )
    loader = ShardLoader(dataset, job.batch_size, memory=job.options["memory"], lanes=_LANES)
    before = anonymous_bytes(os.getpid())
    batches: Any = iter(loader)
    next(batches)
    memory = _wait_until_full()
    taken = [_taken()]
    for _ in batches:
        taken.append(_taken())
        memory = max(memory, anonymous_bytes(os.getpid()))
    descriptors, threads = zip(*taken[len(taken) // 2 :], strict=True)
    return {
        "shards": len(job.shards),
        "memory_bytes": memory - before,
        "held_bytes": batches._engine._fetcher.largest_held_bytes,  # noqa: SLF001 - nobody else is told
        "descriptors": (min(descriptors), max(descriptors)),
        "threads": (min(threads), max(threads)),
    }


def _taken() -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def _wait_until_full() -> int:
    """Wait until memory no longer grows, and return its maximum."""
    memory, now = 0, anonymous_bytes(os.getpid())
    while now > memory + 100_000:
        memory = now
        time.sleep(_PAUSE)
        now = anonymous_bytes(os.getpid())
    return max(memory, now)


if __name__ == "__main__":
    print(json.dumps(count(Job(**json.loads(sys.argv[1])))))
