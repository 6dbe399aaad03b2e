"""The ceiling: bare threads that do the same work on bytes in memory, without ordering, reading or queueing batches."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32

from loading import kernels
from loading.job import ARRAY, SIZE, Batch, Job, Passes
from shardkit.reading.block import Block
from shardkit.reading.dataset import ShardDataset

_CHUNK = 16  # rows of an image batch that a thread takes at a time


def open_passes(job: Job) -> Passes:
    """Return a function that runs the threads over all data once."""
    work = {"image": _Images, "raw": _Bytes, "small": _Bytes, "npy": _Arrays}[job.task](job)
    return lambda: run_threads(work, job.workers)


def run_threads(work: Any, workers: int) -> Iterator[Any]:
    """Process the ``pieces`` in threads, and yield the results in the order in which they are ready.

    Args:
        work: Has ``pieces``; ``state()``, which makes a thread's private state; and ``make(piece, state)``.
        workers: The number of threads.
    """
    made: SimpleQueue[Any] = SimpleQueue()
    pieces = iter(range(len(work.pieces)))
    lock = threading.Lock()

    def take() -> None:
        torch.set_num_threads(1)  # for the calls of this thread
        state = work.state()
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                break
            made.put(work.make(work.pieces[piece], state))
        made.put(None)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    running = workers
    while running:
        batch = made.get()
        if batch is None:
            running -= 1
        else:
            yield batch


class _Images:
    """Decode, crop, resize and flip into preallocated rows."""

    def __init__(self, job: Job) -> None:
        images = []
        for folder in sorted(job.files.iterdir()):
            images += [(path.read_bytes(), int(folder.name)) for path in sorted(folder.iterdir())]
        self.pieces = [images[i : i + _CHUNK] for i in range(0, len(images), _CHUNK)]

    def state(self) -> Any:
        return np.empty((_CHUNK, SIZE, SIZE, 3), np.uint8), Random(0)  # noqa: S311 - of a benchmark

    def make(self, piece: Any, state: Any) -> Batch:
        rows, rng = state
        for row, (data, _) in zip(rows, piece, strict=False):
            kernels.crop(kernels.decode(data), rng, row)
        return rows[: len(piece)], [label for _, label in piece]


def _blocks(folder: Path) -> list[tuple[bytes | memoryview, int, Any]]:
    """Return every block: its bytes, its CRC-32, and the begin and end of each field of each sample."""
    dataset = ShardDataset(folder, decode=False)
    found = []
    for shard, entry in enumerate(dataset.manifest.shards):
        for number in range(entry.blocks):
            block = dataset.read_block(shard, number)
            found.append((block.data, crc32(block.data), _layout(block)))
    return found


def _layout(block: Block) -> list[tuple[tuple[int, int], ...]]:
    views = [block.sample(row) for row in range(len(block))]
    start = np.frombuffer(block.data, np.uint8).ctypes.data
    layout = []
    for sample in views:
        fields = [np.frombuffer(view, np.uint8) for name, view in sorted(sample.items()) if not name.startswith("__")]
        layout.append(tuple((f.ctypes.data - start, f.ctypes.data - start + f.size) for f in fields))
    return layout


class _Bytes:
    """Compare each block's CRC-32 and copy every sample's bytes and label out of it; their places are known."""

    def __init__(self, job: Job) -> None:
        self.pieces = _blocks(job.dataset)

    def state(self) -> Any:
        return None

    def make(self, piece: Any, _state: Any) -> Batch:
        data, expected, layout = piece
        if crc32(data) != expected:
            raise RuntimeError("a block has changed")
        return [data[a:b] for _, (a, b) in layout], [data[a:b] for (a, b), _ in layout]


class _Arrays:
    """Compare each block's CRC-32 and gather its arrays, which lie at equal distances, with one copy."""

    def __init__(self, job: Job) -> None:
        self.pieces = []
        for data, expected, layout in _blocks(job.dataset):
            ends = [fields[0][1] for fields in layout]
            stride = ends[1] - ends[0] if len(ends) > 1 else 4 * ARRAY
            if any(b - a != stride for a, b in pairwise(ends)):
                raise RuntimeError("the block is not regular")
            view = np.ndarray((len(ends), ARRAY), np.float32, data, ends[0] - 4 * ARRAY, (stride, 4))
            self.pieces.append((data, expected, view))

    def state(self) -> Any:
        return None

    def make(self, piece: Any, _state: Any) -> Batch:
        data, expected, view = piece
        if crc32(data) != expected:
            raise RuntimeError("a block has changed")
        return view.copy(), None
