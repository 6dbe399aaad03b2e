"""shardkit: its loader with threads, or, with the option ``stream``, its stream in a DataLoader with processes.

The option ``memory`` limits the loader's memory, so that it mixes fewer blocks. With the options ``url`` and
``storage_options``, the dataset is read from that URL.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from loading.job import SIZE, Batch, Job, Passes
from shardkit import RandomResizedCrop, ShardDataset, ShardLoader, ShardStream

_FIELDS = {
    "image": {"value": "jpg", "label": "cls"},
    "raw": {"value": "jpg", "label": "cls"},
    "small": {"value": "txt", "label": "cls"},
    "npy": {"value": "npy"},
}
_FEW_LANES = 15


def open_passes(job: Job) -> Passes:
    """Return a function that iterates over the loader once."""
    transform = {"value": RandomResizedCrop(SIZE)} if job.task == "image" else None
    decode = job.task in ("image", "npy")
    place, storage_options = job.options.get("url", job.dataset), job.options.get("storage_options")
    loader: Iterable[Any]
    if job.options.get("stream"):
        stream = ShardStream(
            place,
            fields=_FIELDS[job.task],
            decode=decode,
            transform=transform,
            batch_size=job.batch_size,
            storage_options=storage_options,
        )
        loader = DataLoader(
            stream, batch_size=None, num_workers=job.workers, persistent_workers=True, multiprocessing_context="fork"
        )
    else:
        dataset = ShardDataset(place, fields=_FIELDS[job.task], decode=decode, storage_options=storage_options)
        memory = {"memory": job.options["memory"], "lanes": _FEW_LANES} if "memory" in job.options else {}
        loader = ShardLoader(dataset, job.batch_size, transform=transform, num_workers=job.workers, **memory)
    return partial(_batches, loader)


def _batches(loader: Iterable[Any]) -> Iterator[Batch]:
    for batch in loader:
        yield batch["value"], batch.get("label")
