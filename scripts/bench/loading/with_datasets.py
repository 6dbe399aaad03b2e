"""HF datasets, streaming shards in webdataset's format: in the process itself, or in a DataLoader.

It always decodes texts and labels. It decodes images to PIL, and they are cropped like webdataset's.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from loading import kernels
from loading.job import Batch, Job, Passes, batched

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
datasets: Any = import_module("datasets")  # it reads environment variables when it is imported

PACKAGES = ("datasets",)


def open_passes(job: Job) -> Passes:
    """Return a function that iterates over the dataset once."""
    files = {"train": job.shards}
    samples: Any = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    if job.task == "raw":
        samples = samples.cast_column("jpg", datasets.Image(decode=False))
    elif job.task == "image":
        samples = samples.shuffle(seed=0, buffer_size=1000)
    collate = {"image": _images, "raw": _raw, "small": _texts}[job.task]
    if not job.workers:
        return lambda: map(collate, batched(samples, job.batch_size))
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=collate,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return lambda: _batches(loader)


def _batches(loader: DataLoader[Any]) -> Iterator[Batch]:
    yield from loader


def _images(samples: list[dict[str, Any]]) -> Batch:
    rows = [kernels.crop_with_pillow(sample["jpg"]) for sample in samples]
    return torch.from_numpy(np.stack(rows)), torch.tensor([int(sample["cls"]) for sample in samples])


def _raw(samples: list[dict[str, Any]]) -> Batch:
    return [sample["jpg"]["bytes"] for sample in samples], [sample["cls"] for sample in samples]


def _texts(samples: list[dict[str, Any]]) -> Batch:
    return [sample["txt"].encode() for sample in samples], [sample["cls"] for sample in samples]
