#!/usr/bin/env python3
"""Measure what the order of an epoch of 10^9 samples costs.

Measured on a virtual machine with two shared cores, for 100 000 shards: the plan is ready after 0.008 s and takes 7 MB.
Looking up any position takes 0.12 ms; in sequence, a sample takes 0.15 us.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from shardkit.hashing import shuffled
from shardkit.order.plan import OrderPlan

ROUNDS = 7
ANYWHERE = 1000
STRETCH = 1 << 18  # positions that a loader asks for at once


def main() -> None:
    """Print one line for each combination of block size and number of lanes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shards", type=int, nargs="?", default=100_000, help="number of shards of the dataset (default: 100,000)"
    )
    num_shards = parser.parse_args().shards
    runs = 9_000 + shuffled(num_shards, key=0) % 2_001  # of different sizes: 10 000 on average
    for block_samples, lanes in ((16, 240), (64, 240), (64, 960), (256, 240)):
        make = partial(OrderPlan, runs, block_samples, seed=1, epoch=0, lanes=lanes)
        print(measure(make))


def measure(make: Callable[[], OrderPlan]) -> str:
    """Return the cost of a plan."""
    ready = statistics.median(seconds(make) for _ in range(ROUNDS))
    tracemalloc.start()
    plan = make()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    some = np.linspace(0, plan.num_samples - 1, ANYWHERE).astype(np.int64)
    each = sorted(seconds(partial(plan.samples_at, [position])) for position in some)
    starts = np.linspace(0, plan.num_samples - STRETCH, ROUNDS).astype(np.int64)
    stretch = statistics.median(seconds(partial(plan.locate, start + np.arange(STRETCH))) for start in starts)
    return (
        f"{plan.num_samples:,} samples, {plan.num_blocks:,} blocks, {plan.lanes} lanes: ready in {ready:.3f} s, "
        f"{memory / 1e6:.0f} MB at most; a position {1e3 * each[ANYWHERE // 2]:.2f} ms "
        f"(99 % within {1e3 * each[ANYWHERE * 99 // 100]:.2f}); in sequence {1e6 * stretch / STRETCH:.2f} us a sample"
    )


def seconds(function: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
