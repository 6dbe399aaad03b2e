#!/usr/bin/env python3
"""Measure how quickly ShardStream yields undecoded samples in one process, compared with webdataset.

There are two kinds of samples, 60 KB (jpg, cls) and 300 bytes (txt, cls), each as a bare tar and as a dataset with an
index. The programs take turns, so that other load on the machine affects all of them, and each ratio compares two runs
of the same round.

Measured with ``--megabytes 200 --folder /dev/shm`` on a virtual machine with two shared cores, CPython 3.11, webdataset
1.0.2, undecoded samples in order in one process, medians of alternating rounds::

    samples    fields                                       samples/s  times webdataset
    ---------  -------------------------------------------  ---------  ----------------
    60 KB      as they come                                    72 700               4.4
    60 KB      each compared with its CRC-32 in the index      56 400               3.4
    300 bytes  as they come                                   274 700              11.3
    300 bytes  each compared with its CRC-32 in the index     195 200               8.1

webdataset compares no checksums.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import webdataset

from shardkit import index_shards
from shardkit.format.tar import END_OF_ARCHIVE, member_header, member_size, padding
from shardkit.loading.stream import ShardStream, StreamWarning

KINDS = {"60 KB": ("jpg", 60_000), "300 B": ("txt", 300)}
SHARDS = 4


def write_shards(folder: Path, field: str, size: int, count: int) -> None:
    """Write a dataset of random bytes, ``count`` samples in all."""
    content = os.urandom(2 * size)
    for number in range(SHARDS):
        with (folder / f"train-{number:06d}.tar").open("wb") as file:
            for i in range(number, count, SHARDS):
                for name_of_field, data in ((field, content[i % size :][:size]), ("cls", b"%d" % (i % 1000))):
                    file.write(member_header(f"{i:08d}.{name_of_field}", len(data)) + data + bytes(padding(len(data))))
            file.write(END_OF_ARCHIVE)
    index_shards(folder)


def programs(folder: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return the programs to compare: each starts a new pass over the same samples, in the order of the shards."""
    tars = sorted(str(path) for path in folder.glob("*.tar"))
    return {
        "webdataset": lambda: webdataset.WebDataset(tars, shardshuffle=False),
        "shardkit": lambda: ShardStream(tars, decode=False, shuffle=False),
        "shardkit, index": lambda: ShardStream(folder, decode=False, shuffle=False),
        "shardkit, shuffled": lambda: ShardStream(tars, decode=False, buffer_size=100),
    }


def measure(folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """Return the samples per second of every program in every round."""
    rates: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, make in programs(folder).items():
            started = time.perf_counter()
            seen = sum(1 for _ in make())
            elapsed = time.perf_counter() - started
            if seen != count:
                raise RuntimeError(f"{name} yielded {seen:,} samples, expected {count:,}")
            if turn:  # the first round is for warming up
                rates.setdefault(name, []).append(count / elapsed)
    return rates


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the tar of each kind of samples")
    parser.add_argument(
        "--folder", help="folder for the temporary shards (default: a memory file system, if there is one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", StreamWarning)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a folder in it, with a fresh name
    results = {}
    for kind, (field, size) in KINDS.items():
        count = max(SHARDS, arguments.megabytes * 10**6 // (member_size("12345678.jpg", size) + 1024))
        with tempfile.TemporaryDirectory(dir=arguments.folder or memory) as temporary:
            write_shards(Path(temporary), field, size, count)
            rates = measure(Path(temporary), count, arguments.rounds)
        results[kind] = {
            name: {
                "samples_per_second": round(statistics.median(values)),
                "times_webdataset": round(
                    statistics.median(a / b for a, b in zip(values, rates["webdataset"], strict=True)), 2
                ),
                "worst_round": round(min(a / b for a, b in zip(values, rates["webdataset"], strict=True)), 2),
            }
            for name, values in rates.items()
        }
    if arguments.json:
        print(json.dumps(results))
        return
    for kind, rows in results.items():
        print(f"{kind} samples, medians of {arguments.rounds} rounds")
        for name, row in rows.items():
            rate, times, worst = row.values()
            print(f"  {name:20} {rate:>10,} samples/s   {times:5.1f} times webdataset (worst round {worst:.1f})")


if __name__ == "__main__":
    main()
