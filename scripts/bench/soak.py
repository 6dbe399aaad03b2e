#!/usr/bin/env python3
"""Load for a long time, with many faults, and check that memory, threads, descriptors and processes do not grow.

A cycle runs loaders with threads and with processes: whole epochs, abandoned epochs, resumed states, skipped damage, a
transform that raises and a worker process that dies. It reads small samples, which use other code, and it reads streams
in the process itself and in a DataLoader. It also runs one more epoch of a loader whose process is kept for all cycles.
Every cycle must give the same samples. After each cycle, memory, threads, descriptors and processes are counted. The
first cycles are for warming up; of the others, the last third is compared with the first. The exit status is 1 if
anything has grown.
"""

import argparse
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from loading.child import anonymous_bytes, processes_below
from loading.notes import note
from torch.utils.data import DataLoader

import shardkit
from shardkit.codecs.registry import encode

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 1000
_BATCH_SIZE = 32
_WARM_UP = 0.25  # share of the cycles
_MEMORY_GROWTH = 8_000_000  # bytes by which two cycles may differ by chance
_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 16  # an option of glibc's mallopt(), and its value in bytes
_THREAD_SECONDS = 60  # for the threads of an abandoned iterator, which finish their current task


WorkerType = Literal["thread", "process"]


class Usage(NamedTuple):
    """What this process and its descendants use.

    Attributes:
        memory: The bytes of anonymous memory of this process and its descendants.
        threads: The threads of this process.
        descriptors: Its open files, pipes and sockets.
        processes: Its descendants.
    """

    memory: int
    threads: int
    descriptors: int
    processes: int


class Obeying:
    """A transform that raises or ends the process if a file says so; without the file it does nothing.

    Args:
        order: The file.
    """

    def __init__(self, order: Path) -> None:
        self._order = order

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample."""
        if sample["label"] % 100 == 1 and self._order.exists():
            if self._order.read_text() == "exit":
                os._exit(3)
            raise ArithmeticError("as ordered")
        return sample


def make_dataset(folder: Path) -> None:
    """Pack samples with a few cut images, and damage one block."""
    rng = np.random.default_rng(0)

    def sample(number: int) -> dict[str, Any]:
        image = encode("jpg", rng.integers(0, 256, (48, 64, 3), np.uint8))
        if number % 100 == 0:
            image = image[: len(image) // 2]
        return {"__key__": f"{number:06d}", "jpg": image, "npy": np.full(64, number, np.float32), "cls": number}

    samples = map(sample, range(SAMPLES))
    shardkit.pack(samples, folder, shard_samples=250, block_bytes="100kB", compression="none", progress=False)
    shard = min(folder.glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[data.index(b"\xff\xd8") + 1000] ^= 1  # in an image
    shard.write_bytes(data)


@contextmanager
def expected(kind: type[Exception]) -> "Iterator[None]":
    """Suppress an error of a kind, and raise if there is none."""
    try:
        yield
    except kind:
        return
    raise RuntimeError(f"expected {kind.__name__}")


def count(batches: Iterable[Any]) -> int:
    """Return the total number of samples in batches."""
    return sum(len(batch["__key__"]) for batch in batches)


def make_loader(dataset: Path, order: Path, worker_type: WorkerType, num_workers: int = 2) -> shardkit.ShardLoader:
    """Return a loader of images that skips damaged samples."""
    crop = shardkit.RandomResizedCrop(32)
    return shardkit.ShardLoader(
        shardkit.ShardDataset(dataset, fields={"image": "jpg", "label": "cls"}, transform={"image": crop}),
        _BATCH_SIZE,
        transform=Obeying(order),
        num_workers=num_workers,
        worker_type=worker_type,
        on_error="skip",
        max_skipped=SAMPLES,
    )


def run_loader(dataset: Path, order: Path, worker_type: WorkerType, *, close: bool) -> list[int]:
    """Run epochs of a loader with many faults, and return the numbers of samples."""
    loader = make_loader(dataset, order, worker_type)
    counts = [count(loader), loader.skipped]
    for batches in (0, 1, 5):
        left = list(islice(iter(loader), batches))
    passing = iter(loader)
    left = list(islice(passing, 7))
    state = json.loads(json.dumps(loader.state_dict()))
    counts += [count(left), count(passing)]
    loader.load_state_dict(state)
    counts.append(count(loader))
    order.write_text("raise")
    with expected(ArithmeticError):
        count(loader)
    if worker_type == "process":
        order.write_text("exit")
        with expected(shardkit.WorkerError):
            count(loader)
    order.unlink()
    counts.append(count(loader))
    if close:
        loader.close()
    return counts


def run_others(dataset: Path) -> list[int]:
    """Read a loader that does not skip, small samples and streams, and return the numbers of samples."""
    with expected(shardkit.ShardkitError):
        count(shardkit.ShardLoader(shardkit.ShardDataset(dataset), _BATCH_SIZE))
    loader = shardkit.ShardLoader(shardkit.ShardDataset(dataset, fields=["npy"]), _BATCH_SIZE, on_error="skip")
    counts = [count(loader), count(islice(loader, 3)), count(loader)]
    stream = shardkit.ShardStream(
        dataset, fields={"label": "cls"}, batch_size=_BATCH_SIZE, buffer_size=100, on_error="skip", max_skipped=SAMPLES
    )
    counts += [count(stream), count(islice(stream, 3)), count(stream)]
    processes = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    counts += [count(processes), count(islice(processes, 3))]
    return counts


def run_cycle(dataset: Path, order: Path, *, close: bool) -> list[int]:
    """Run one cycle, and return the number of samples of each epoch.

    Args:
        dataset: The folder of the dataset.
        order: The file that says what the transform does.
        close: Whether loaders are closed; otherwise they are only dropped.
    """
    counts = run_loader(dataset, order, "thread", close=close)
    counts += run_loader(dataset, order, "process", close=close)
    return counts + run_others(dataset)


def usage() -> Usage:
    """Return the usage after everything that was abandoned has ended."""
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("shardkit"):
            thread.join(_THREAD_SECONDS)
    multiprocessing.active_children()  # joins the processes that have ended
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    own, processes = Path("/proc/self"), processes_below(os.getpid())
    return Usage(
        sum(map(anonymous_bytes, processes)),
        len(list((own / "task").iterdir())),
        len(list((own / "fd").iterdir())),
        len(processes) - 1,
    )


def grown(usages: Sequence[Usage]) -> dict[str, tuple[float, float]]:
    """Return what has grown between the first and the last third after warming up, with both values."""
    usages = usages[int(len(usages) * _WARM_UP) :]
    third = max(1, len(usages) // 3)
    found = {}
    for name in Usage._fields:
        first, last = ([getattr(one, name) for one in part] for part in (usages[:third], usages[-third:]))
        if name == "memory":
            before, after = statistics.median(first), statistics.median(last)
            if after > before + _MEMORY_GROWTH:
                found[name] = before, after
        elif min(last) > max(first):
            found[name] = max(first), min(last)
    return found


def give_back_memory() -> None:
    """Let glibc return large allocations at once, so that only memory that is in use is counted."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_LARGE)  # for child processes
    with suppress(AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def soak(folder: Path, seconds: float, cycles: int) -> list[Usage]:
    """Run cycles for ``seconds``, and at least ``cycles`` of them, and return the usage after each.

    Raises:
        RuntimeError: An epoch had other samples than in the previous cycle.
    """
    dataset, order = folder / "dataset", folder / "order"
    make_dataset(dataset)
    usages: list[Usage] = []
    counts: list[int] = []
    started = time.monotonic()
    standing = make_loader(dataset, order, "process", num_workers=1)
    while len(usages) < cycles or time.monotonic() - started < seconds:
        found = [*run_cycle(dataset, order, close=len(usages) % 2 == 0), count(standing)]
        if counts and found != counts:
            raise RuntimeError(f"the epochs had {found} samples, those of the previous cycle had {counts}")
        counts = found
        usages.append(usage())
        note(f"cycle {len(usages)}: {describe(usages[-1])}")
    standing.close()
    return usages


def describe(used: Usage) -> str:
    """Return the usage in words."""
    others = (f"{number} {name}" for name, number in zip(Usage._fields[1:], used[1:], strict=True))
    return ", ".join([f"{used.memory / 1e6:.1f} MB", *others])


def main() -> int:
    """Run cycles, print the usage after each and whether anything has grown, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cycles", type=int, default=8, help="least number of cycles, however long they take")
    parser.add_argument("--json", type=Path, help="write the counts into this file")
    arguments = parser.parse_args()
    give_back_memory()
    logging.getLogger("shardkit").setLevel(logging.ERROR)  # skipped samples are expected
    with tempfile.TemporaryDirectory() as temporary:
        usages = soak(Path(temporary), arguments.seconds, arguments.cycles)
    if arguments.json:
        arguments.json.write_text(json.dumps([one._asdict() for one in usages]))
    growth = grown(usages)
    for name, (before, after) in growth.items():
        print(f"{name}: grown from {before:,.0f} to {after:,.0f}")
    if not growth:
        print(f"nothing has grown in {len(usages)} cycles: {describe(usages[-1])}")
    return 1 if growth else 0


if __name__ == "__main__":
    sys.exit(main())
