"""What people write is right to a type checker: mypy reads this in strict mode, and nothing runs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

import shardkit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def brighter(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return image


def cropped(values: dict[str, Any], rng: shardkit.Rng) -> dict[str, Any]:
    return values | {"draw": rng.random()}


def use_dataset(dataset: shardkit.ShardDataset) -> tuple[Dataset[Any], int, list[Any]]:
    for sample in dataset:
        print(sample["label"])
    for batch in DataLoader(dataset, batch_sampler=shardkit.ShardSampler(dataset, batch_size=16, seed=0)):
        print(batch)
    return dataset, len(dataset), dataset[:3]


def use_transforms(
    of_fields: "dict[str, Callable[..., Any]]", of_several: "Mapping[tuple[str, ...], Callable[..., Any]]"
) -> None:
    dataset = shardkit.ShardDataset("train", fields={"image": "jpg", "mask": "mask.png:unchanged", "label": "cls"})
    crop = shardkit.RandomResizedCrop(64, nearest=("mask",))

    shardkit.ShardLoader(dataset, 16, transform=of_fields)
    shardkit.ShardLoader(dataset, 16, transform=of_several)
    shardkit.ShardLoader(dataset, 16, transform=lambda sample: sample)
    shardkit.ShardLoader(dataset, 16, transform={"image": brighter})
    shardkit.ShardLoader(dataset, 16, transform={("image", "mask"): crop})
    shardkit.ShardLoader(dataset, 16, transform={("image", "mask"): cropped, "label": float})
    shardkit.ShardDataset(Path("train"), transform={("image", "mask"): crop, "label": float})
    shardkit.ShardStream(["a.tar"], transform={("image", "mask"): crop, "label": float})
    shardkit.pack([], "out", transform={("image", "mask"): cropped, "label": float})

    # What is wrong is found: an ignore that is not needed would be an error.
    shardkit.ShardLoader(dataset, 16, transform={1: brighter})  # type: ignore[dict-item]
    shardkit.ShardLoader(dataset, 16, transform={"image": 3})  # type: ignore[dict-item]
    shardkit.ShardLoader(dataset, 16, transform=3)  # type: ignore[arg-type]
    shardkit.ShardLoader([dataset], 16)  # type: ignore[arg-type]


def use_loader(dataset: shardkit.ShardDataset) -> None:
    loader = shardkit.ShardLoader(dataset, 16, collate_fn=torch.utils.data.default_collate)
    assert_type(loader.state_dict()["epoch"], int)
