#!/usr/bin/env python3
"""How fast shardkit loads, beside other loaders and beside what the hardware can do.

image: photographs of 60 KB are decoded, cropped at random to 224 x 224, mirrored, and become batches of 64. raw: their
bytes and labels are handed over. small: texts of 300 bytes and labels. npy: arrays of 1 KB. Each loader runs in a
process of its own, with two threads or two processes, and they take turns; a ratio is of one round. The ceiling is the
same work in bare threads, on bytes in memory. Other loaders are installed into environments in the folder --work, where
they are not installed already.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from loading.environments import PACKAGES, UnavailableError, python_of
from loading.inputs import make_inputs
from loading.job import BATCH_SIZES, Job
from loading.peers import OWN, PEERS, Peer
from loading.rounds import measure_rounds, summarise

_WORK = Path(tempfile.gettempdir(), "shardkit-bench-loading")


def find_python(package: str, work: Path, *, install: bool) -> str:
    """Return a Python that can import a package.

    Raises:
        UnavailableError: There is none, and none can or may be made.
    """
    if not package or importlib.util.find_spec(package):
        return sys.executable
    if not install:
        raise UnavailableError(f"{' '.join(PACKAGES[package])} is not installed")
    return python_of(package, work)


def machine() -> dict[str, Any]:
    """Return what numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def print_table(task: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print a task's loaders as Markdown."""
    print(f"\n| {task} | samples/s | of the ceiling | shardkit is | CPU s per 1 000 | memory | first batch |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "error" in row:
            print(f"| {name} | not measured: {row['error']} | | | | | |")
            continue
        ceiling = f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else ""
        times = f"{1 / row['of_shardkit']:.2f} x" if "of_shardkit" in row and name != OWN else ""
        print(
            f"| {name} | {row['samples_per_second']:,.0f} | {ceiling} | {times} | {row['cpu_seconds_per_1000']:.3g} "
            f"| {row['memory_bytes'] / 1e6:,.0f} MB | {row['first_batch_seconds']:.2f} s |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=_WORK, help=f"for input and environments; by default {_WORK}")
    parser.add_argument("--tasks", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--only", nargs="+", help="loaders whose name contains one of these")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--smalls", type=int, default=200_000, help="samples of small and npy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2, help="that each run takes, in whole passes")
    parser.add_argument("--limit", type=float, default=6, help="seconds after which a slow loader's pass is left")
    parser.add_argument("--quiet", type=float, default=0.05, help="repeat a run if others used more of a processor")
    parser.add_argument("--no-install", action="store_true", help="measure only what is installed")
    parser.add_argument("--json", type=Path, help="write everything into a file")
    arguments = parser.parse_args()
    work, install = arguments.work.resolve(), not arguments.no_install
    python = python_of("input", work) if install else sys.executable
    folder = make_inputs(work, arguments.images, arguments.smalls, python)
    state = machine()
    print(", ".join(f"{name} {value}" for name, value in state.items()))
    results = {}
    for task in arguments.tasks:
        peers = [peer for peer in PEERS if task in peer.tasks]
        if arguments.only:
            peers = [peer for peer in peers if any(part in peer.name for part in arguments.only)]

        def make_job(peer: Peer, task: str = task) -> Job:
            options = peer.options
            return Job(task, peer.module, str(folder), peer.workers, options, arguments.seconds, arguments.limit)

        runs = measure_rounds(
            peers,
            lambda peer: find_python(peer.package, work, install=install),
            make_job,
            rounds=arguments.rounds,
            quiet=arguments.quiet,
        )
        rows = summarise(runs)
        print_table(task, rows)
        results[task] = {"loaders": rows, "runs": runs}
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": state, "tasks": results}, indent=1))


if __name__ == "__main__":
    main()
