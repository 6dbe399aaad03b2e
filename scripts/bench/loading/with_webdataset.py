"""webdataset as in its documentation, or with shardkit's decoder and kernels; in the process itself or a DataLoader.

Its documentation decodes to PIL images and lets torchvision crop, and shuffles in a buffer of 1 000 samples.
"""

import io
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from loading import kernels
from loading.job import Batch, Job, Passes, batched

_FIELDS = {"image": ("jpg", "cls"), "raw": ("jpg", "cls"), "small": ("txt", "cls"), "npy": ("npy", "cls")}


def open_passes(job: Job) -> Passes:
    """Return a function that iterates over the dataset once."""
    stages: list[Any] = [
        webdataset.SimpleShardList(job.shards),
        webdataset.detshuffle(len(job.shards)),
        webdataset.split_by_worker,
        webdataset.tarfile_to_samples(),
    ]
    if job.task == "image" and job.options.get("pillow"):
        stages += [webdataset.shuffle(1000), webdataset.decode("pil"), webdataset.map(_crop_pillow)]
    elif job.task == "image":
        stages += [webdataset.shuffle(1000), webdataset.map(_crop)]
    elif job.task == "npy":
        stages += [webdataset.map(_array)]
    else:
        first, second = _FIELDS[job.task]
        stages += [webdataset.to_tuple(first, second)]
    if not job.workers:
        pipeline = webdataset.DataPipeline(*stages)
        return lambda: map(partial(_collate, task=job.task), batched(pipeline, job.batch_size))
    collate = partial(_collate, task=job.task)
    pipeline = webdataset.DataPipeline(*stages, webdataset.batched(job.batch_size, collation_fn=collate, partial=True))
    loader = DataLoader(
        pipeline,
        batch_size=None,
        num_workers=job.workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return lambda: _batches(loader)


def _batches(loader: Iterable[Any]) -> Iterator[Batch]:
    yield from loader


def _crop_pillow(sample: dict[str, Any]) -> tuple[Any, int]:
    return kernels.crop_with_pillow(sample["jpg"]), int(sample["cls"])


def _crop(sample: dict[str, Any]) -> tuple[Any, int]:
    return kernels.make_row(sample["jpg"], pillow=False), int(sample["cls"])


def _array(sample: dict[str, Any]) -> tuple[Any, None]:
    return np.load(io.BytesIO(sample["npy"])), None


def _collate(samples: list[Any], *, task: str) -> Batch:
    values, labels = zip(*samples, strict=True)
    if task in ("image", "npy"):
        return torch.from_numpy(np.stack(values)), None if task == "npy" else torch.tensor(labels)
    return list(values), list(labels)
