#!/usr/bin/env python3
"""Measure how long packing takes, compared with webdataset's ShardWriter and GNU tar, or with --memory its memory use.

4 000 files of 40 to 80 KB in class folders, on a memory file system, become uncompressed shards. shardkit's time covers
listing the folder and packing with one worker: shuffled, with SHA-256, CRCs, index and manifest. The time in fsync is
shown separately. webdataset reads the same files and writes the same fields. GNU tar runs as a process of its own and
writes only the files. The programs take turns, so that other load on the machine affects all of them, and each ratio
compares two runs of the same round.

Measured on a virtual machine with two shared cores, CPython 3.11, webdataset 1.0.2, medians of alternating rounds:
shardkit takes 0.32 s, 1.7 times as fast as webdataset's ``ShardWriter``; GNU tar takes 0.17 s. With ``--memory``,
packing 4 GB of samples of 1 KB from an iterator, shuffled, takes at most 513 MB of memory.

GNU tar is nearly twice as fast because it computes no checksums, writes no index and does not shuffle. The SHA-256 of a
shard alone, which cannot be split between threads, takes longer than all of GNU tar's work. If other programs keep the
second core busy, shardkit packs 1.4 times as fast as webdataset.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardkit.packing.job import pack
from shardkit.sources.folders import ImageFolder

SHARD_BYTES = 256_000_000
CLASSES = 10


def write_files(folder: Path, count: int) -> None:
    """Write files that have the size of JPEGs and, like them, cannot be compressed."""
    numbers = random.Random(0)  # noqa: S311 - sizes and bytes of a benchmark
    content = numbers.randbytes(1_000_000)
    for number in range(count):
        size = numbers.randint(40_000, 80_000)
        start = numbers.randrange(len(content) - size)
        path = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[start : start + size])


def with_shardkit(source: Path, out: Path) -> None:
    """List the folder and pack it."""
    pack(ImageFolder(source), out / "train", compression="none", num_workers=1, progress=False)


def with_webdataset(source: Path, out: Path) -> None:
    """Read the files and write them with webdataset."""
    import webdataset  # here, so that its memory is not counted as ours

    with webdataset.ShardWriter(str(out / "train-%06d.tar"), maxsize=SHARD_BYTES, maxcount=10**9, verbose=0) as writer:
        for number, folder in enumerate(sorted(source.iterdir())):
            for path in sorted(folder.iterdir()):
                writer.write({"__key__": f"{folder.name}/{path.stem}", "jpg": path.read_bytes(), "cls": number})


def with_tar(source: Path, out: Path) -> None:
    """Pack the files with GNU tar."""
    subprocess.run(["tar", "-cf", out / "train.tar", "-C", source, "."], check=True)


PROGRAMS = {"shardkit": with_shardkit, "webdataset": with_webdataset, "GNU tar": with_tar}


class SyncTimer:
    """Measures the seconds in ``os.fsync``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._fsync = os.fsync
        os.fsync = self._timed  # type: ignore[assignment] # it takes descriptors alone, as it is called here

    def _timed(self, descriptor: int) -> None:
        started = time.perf_counter()
        self._fsync(descriptor)
        self.seconds += time.perf_counter() - started


def cpu_seconds() -> float:
    """Return the processor seconds of this process and the children it has waited for, over all threads."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(program: Callable[[Path, Path], None], source: Path, folder: Path, timer: SyncTimer) -> dict[str, float]:
    """Run a program once; return its seconds without fsync, those in fsync, and its processor seconds."""
    out = folder / "out"
    out.mkdir()
    synced, cpu, started = timer.seconds, cpu_seconds(), time.perf_counter()
    program(source, out)
    elapsed, synced = time.perf_counter() - started, timer.seconds - synced
    cpu = cpu_seconds() - cpu
    shutil.rmtree(out)
    return {"seconds": elapsed - synced, "fsync": synced, "cpu": cpu}


def compare(folder: Path, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return each program's medians, and the median and the worst of shardkit's ratios to it."""
    source = folder / "images"
    source.mkdir()
    write_files(source, count)
    timer = SyncTimer()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for turn in range(rounds + 1):
        for name, program in PROGRAMS.items():
            result = measure(program, source, folder, timer)
            if turn:  # the first round is for warming up
                results[name].append(result)
    table = {}
    for name, runs in results.items():
        row = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
        for what in ("seconds", "cpu"):
            ratios = [run[what] / own[what] for run, own in zip(runs, results["shardkit"], strict=True)]
            row |= {f"{what}_ratio": statistics.median(ratios), f"{what}_ratio_worst": min(ratios)}
        table[name] = row
    return table


def small_samples(total: int) -> Iterator[dict[str, Any]]:
    """Yield samples with one text of 1 KB each."""
    text = random.Random(0).randbytes(750).hex()  # noqa: S311 - a text of a benchmark
    for number in range(total // 1000):
        start = number % 500
        yield {"__key__": f"{number:09d}", "txt": text[start : start + 1000]}


def pack_small(out: str, total: int) -> None:
    """Pack many small samples from an iterator, shuffled."""
    pack(small_samples(total), out, compression="none", progress=False)


def measure_memory(folder: Path, total: int) -> dict[str, float]:
    """Pack small samples in a process of its own; return its sampled peak resident size and its seconds."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--pack-small", str(folder / "small"), "--bytes", str(total)]
    process = subprocess.Popen(command)
    largest = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
        largest = max([largest, *(1024 * int(size) for size in sizes)])
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the pack ended with {process.returncode}")
    return {"largest_resident_bytes": largest, "packed_bytes": total, "seconds": time.perf_counter() - started}


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="folder for temporary files (default: a memory file system, if there is one)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=4000)
    parser.add_argument("--memory", action="store_true", help="measure memory instead, in the temporary folder")
    parser.add_argument("--bytes", type=int, default=4 * 10**9, help="total size of the small samples, for --memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pack-small", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pack_small:
        pack_small(arguments.pack_small, arguments.bytes)
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and not arguments.memory else None  # noqa: S108 - a fresh name
    with tempfile.TemporaryDirectory(dir=arguments.dir or memory) as temporary:
        if arguments.memory:
            peak = measure_memory(Path(temporary), arguments.bytes)
            size, packed, seconds = peak.values()
            text = f"{packed / 1e9:g} GB of samples of 1 KB: at most {size / 1e6:.0f} MB resident, {seconds:.0f} s"
            print(json.dumps(peak) if arguments.json else text)
            return
        table = compare(Path(temporary), arguments.files, arguments.rounds)
    if arguments.json:
        print(json.dumps(table))
        return
    print(f"{arguments.files:,} files, medians of {arguments.rounds} rounds; ratios of one round, (worst)")
    for name, row in table.items():
        print(
            f"  {name:10} {row['seconds']:6.3f} s + {row['fsync']:5.3f} s fsync, {row['cpu']:6.3f} s cpu; shardkit is "
            f"{row['seconds_ratio']:5.2f} ({row['seconds_ratio_worst']:.2f}) times as fast, "
            f"{row['cpu_ratio']:5.2f} ({row['cpu_ratio_worst']:.2f}) by cpu"
        )


if __name__ == "__main__":
    main()
