"""DALI on the processor: its reader of webdataset's format, with its index, and its decoder of crops only.

DALI returns its own buffers, which are valid until the next batch. With the option ``touch``, in the task raw, they are
copied into bytes, which all other loaders return.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from loading.job import SIZE, Batch, Job, Passes

dali: Any = import_module("nvidia.dali")
fn: Any = import_module("nvidia.dali.fn")
types: Any = import_module("nvidia.dali.types")

PACKAGES = ("nvidia-dali-cuda130",)


def open_passes(job: Job) -> Passes:
    """Return a function that runs the pipeline over the dataset once."""
    built = dali.Pipeline(batch_size=job.batch_size, num_threads=job.workers, device_id=None, prefetch_queue_depth=2)
    with built:
        first, labels = fn.readers.webdataset(
            paths=job.shards,
            index_paths=[f"{shard}.idx" for shard in job.shards],
            ext=["txt" if job.task == "small" else "jpg", "cls"],
            random_shuffle=True,
            initial_fill=1024,
            pad_last_batch=True,
            name="reader",
        )
        if job.task == "image":
            first = fn.decoders.image_random_crop(first, device="cpu", random_area=[0.08, 1.0])
            first = fn.resize(
                first, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=bool(job.options.get("antialias"))
            )
            first = fn.flip(first, horizontal=fn.random.coin_flip())
        built.set_outputs(first, labels)
    built.build()
    return lambda: _run(built, job)


def _run(built: Any, job: Job) -> Iterator[Batch]:
    remain = built.epoch_size("reader")
    while remain > 0:
        first, labels = built.run()
        count = min(remain, job.batch_size)  # the rest of the last batch repeats its last sample
        texts = [np.asarray(labels.at(i)).tobytes() for i in range(count)]
        if job.task == "image":
            yield np.asarray(first.as_tensor())[:count], [int(text) for text in texts]
        elif job.options.get("touch", True):
            yield [np.asarray(first.at(i)).tobytes() for i in range(count)], texts
        else:
            yield _Untouched(first, count), texts
        remain -= count


class _Untouched:
    """A batch whose content is not read."""

    def __init__(self, tensors: Any, count: int) -> None:
        self._tensors = tensors
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (np.asarray(self._tensors.at(i)) for i in range(self._count))
