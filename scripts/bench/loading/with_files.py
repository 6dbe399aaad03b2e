"""Loose files in a folder for each class: read one after the other, or by a DataLoader that shuffles them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loading import kernels
from loading.job import Batch, Job, Passes, batched


class _Files(Dataset[Any]):
    """Every image and its label, as a dataset for a DataLoader."""

    def __init__(self, folder: Path, task: str, *, pillow: bool) -> None:
        self.paths = [str(path) for path in sorted(folder.glob("*/*.jpg"))]
        self.labels = [path.rsplit("/", 2)[1] for path in self.paths]
        self._task = task
        self._pillow = pillow

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        data = Path(self.paths[index]).read_bytes()
        if self._task == "raw":
            return data, self.labels[index].encode()
        return kernels.make_row(data, pillow=self._pillow), int(self.labels[index])


def open_passes(job: Job) -> Passes:
    """Return a function that iterates over the files once."""
    files = _Files(job.files, job.task, pillow=bool(job.options.get("pillow")))
    if not job.workers:
        return lambda: _in_process(files, job.batch_size)
    collate = _lists if job.task == "raw" else _tensors
    loader = DataLoader(
        files,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.workers,
        collate_fn=collate,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return lambda: loader


def _in_process(files: _Files, batch_size: int) -> Iterator[Batch]:
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    for batch in batched((files[i] for i in order), batch_size):
        yield _lists(batch)


def _lists(samples: list[Any]) -> Batch:
    return [value for value, _ in samples], [label for _, label in samples]


def _tensors(samples: list[Any]) -> Batch:
    values, labels = _lists(samples)
    return torch.from_numpy(np.stack(values)), torch.tensor(labels)
