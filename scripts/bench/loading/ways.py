"""Epochs in several ways: in a loop, in bare threads, and by shardkit's loader with threads or processes.

It is a program of its own: ways.py ERRAND prints one line of JSON for each way. The time includes the start: for the
loader, opening the dataset and starting threads or processes, but not this process's imports. It also includes adding
every image to a checksum, which does not depend on the order.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
from isal.isal_zlib import crc32

from loading import kernels
from loading.bare import run_threads
from loading.child import machine_cpu_seconds, tree_cpu_seconds
from loading.job import SIZE, Errand, Way, batched
from loading.pipelines import Augment
from shardkit import ShardDataset, ShardLoader

Sums: TypeAlias = Iterator[tuple[int, int]]
"""For each batch, the number of images and a checksum over them and their keys."""

_CHUNK = 16  # images that a bare thread takes at a time


def main() -> None:
    """Measure each way and print the result."""
    errand = Errand.from_json(sys.argv[1])
    measure(Way("sequential", 1, 100), errand)  # for warming up
    for way in errand.ways:
        best: dict[str, Any] = {}
        for _ in range(1 + errand.repeats):
            result = measure(way, errand)
            best = min(best or result, result, key=lambda one: one["others"])
            if best["others"] <= errand.quiet:
                break
        print(json.dumps(best), flush=True)


def measure(way: Way, errand: Errand) -> dict[str, Any]:
    """Return the time of an epoch, start included, and its checksum; for processes, also the time of the next epoch."""
    files = _files(errand.folder)
    memory = [(key, path.read_bytes()) for key, path in files] if way.kind == "bare" else []
    cpu, machine = tree_cpu_seconds(), machine_cpu_seconds()
    started = time.perf_counter()
    augment = Augment(errand.pipeline)
    loader: ShardLoader | None = None
    if way.kind == "sequential":
        epoch = partial(_sequential, files, augment, way.batch_size)
    elif way.kind == "bare":
        epoch = partial(_bare, memory, augment, way.workers)
    else:
        dataset = ShardDataset(Path(errand.folder, "image"), fields={"image": "jpg"})
        worker_type: Any = way.kind
        loader = ShardLoader(
            dataset, way.batch_size, transform=augment, num_workers=way.workers, worker_type=worker_type
        )
        epoch = partial(_loaded, loader)
    outputs, times = [_total(epoch())], [time.perf_counter() - started]
    if way.kind == "process":
        outputs.append(_total(epoch()))
        times.append(time.perf_counter() - started - times[0])
    cpu, machine = tree_cpu_seconds() - cpu, machine_cpu_seconds() - machine
    if loader is not None:
        loader.close()
    return {"outputs": outputs, "seconds": times, "others": max(0.0, machine - cpu) / sum(times)}


@cache
def _files(folder: str) -> list[tuple[str, Path]]:
    """Return the keys and paths of the loose images, in a random order."""
    root = Path(folder, "files")
    files = [(path.relative_to(root).with_suffix("").as_posix(), path) for path in sorted(root.glob("*/*.jpg"))]
    Random(0).shuffle(files)  # noqa: S311 - of a benchmark
    return files


def _total(sums: Sums) -> tuple[int, int]:
    counts, checksums = zip(*sums, strict=True)
    return sum(counts), sum(checksums)


def _sum(keys: Iterable[str], images: Iterable[Any]) -> tuple[int, int]:
    """Return the number of images, uint8, (SIZE, SIZE, 3), and a checksum over them and their keys."""
    checksums = [crc32(image, crc32(key.encode())) for key, image in zip(keys, images, strict=True)]
    return len(checksums), sum(checksums)


def _sequential(files: list[tuple[str, Path]], augment: Augment, batch_size: int) -> Sums:
    """Read, decode and augment one image after the other, and collate batches, in an ordinary loop."""
    for batch in batched(files, batch_size):
        samples = [augment({"__key__": key, "image": kernels.decode(path.read_bytes())}) for key, path in batch]
        images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
        yield _sum((key for key, _ in batch), images.numpy())


def _loaded(loader: ShardLoader) -> Sums:
    for batch in loader:
        yield _sum(batch["__key__"], batch["image"].permute(0, 2, 3, 1).numpy())


def _bare(memory: list[tuple[str, bytes]], augment: Augment, workers: int) -> Sums:
    """Decode and augment in threads, into preallocated rows, without ordering, reading or passing batches on."""
    return run_threads(_Augmented(memory, augment), workers)


class _Augmented:
    """The work of the bare threads."""

    def __init__(self, memory: list[tuple[str, bytes]], augment: Augment) -> None:
        self.pieces = list(batched(memory, _CHUNK))
        self._augment = augment

    def state(self) -> Any:
        return np.empty((_CHUNK, SIZE, SIZE, 3), np.uint8)

    def make(self, piece: list[tuple[str, bytes]], rows: Any) -> tuple[int, int]:
        for row, (key, data) in zip(rows, piece, strict=False):
            row[:] = self._augment({"__key__": key, "image": kernels.decode(data)})["image"]
        return _sum((key for key, _ in piece), rows[: len(piece)])


if __name__ == "__main__":
    main()
