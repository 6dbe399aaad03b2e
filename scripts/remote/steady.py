"""A program: descriptors and threads in the course of an epoch. steady.py JOB prints them as JSON."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from loading import with_shardkit
from loading.job import Job


def count(job: Job) -> dict[str, Any]:
    """Return the least and the most of both in an epoch's second half, and how many shards it had."""
    passes = with_shardkit.open_passes(job)
    taken = [(len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) for _ in passes()]
    half = taken[len(taken) // 2 :]
    descriptors, threads = zip(*half, strict=True)
    return {
        "shards": len(job.shards),
        "counts": {
            "descriptors": (min(descriptors), max(descriptors)),
            "threads": (min(threads), max(threads)),
        },
    }


if __name__ == "__main__":
    print(json.dumps(count(Job(**json.loads(sys.argv[1])))))
