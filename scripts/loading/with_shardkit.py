"""shardkit: its loader with threads, or with the option ``stream`` its stream in a DataLoader with processes."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from loading import kernels
from loading.job import Batch, Job, Passes
from shardkit import ShardDataset, ShardLoader, ShardStream
from shardkit.rng import Rng

_FIELDS = {
    "image": {"value": "jpg", "label": "cls"},
    "raw": {"value": "jpg", "label": "cls"},
    "small": {"value": "txt", "label": "cls"},
    "npy": {"value": "npy"},
}


def _crop(image: Any, rng: Rng) -> Any:
    return kernels.crop(image, rng)


def open_passes(job: Job) -> Passes:
    """Return what iterates over the loader once."""
    transform = {"value": _crop} if job.task == "image" else None
    decode = job.task in ("image", "npy")
    loader: Iterable[Any]
    if job.options.get("stream"):
        stream = ShardStream(
            job.dataset, fields=_FIELDS[job.task], decode=decode, transform=transform, batch_size=job.batch_size
        )
        loader = DataLoader(
            stream, batch_size=None, num_workers=job.workers, persistent_workers=True, multiprocessing_context="fork"
        )
    else:
        dataset = ShardDataset(job.dataset, fields=_FIELDS[job.task], decode=decode)
        loader = ShardLoader(dataset, job.batch_size, transform=transform, num_workers=job.workers)
    return partial(_batches, loader)


def _batches(loader: Iterable[Any]) -> Iterator[Batch]:
    for batch in loader:
        yield batch["value"], batch.get("label")
