"""Four pipelines of albumentations, from light to heavy, as transforms of a loader.

In addition to decoding, which takes 0.65 ms, they take about 0.02, 0.1, 0.7 and 2.5 ms of processor time per image. A
pipeline's random numbers depend only on the sample's key. So a sample's result is the same to the last bit, however it
is loaded.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any
from zlib import crc32

from loading.job import SIZE
from shardkit import Albumentations, Rng

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise it looks for a newer version over the network
A: Any = import_module("albumentations")
import_module("cv2").setNumThreads(0)  # its own threads would make the sequential loader parallel


def _crop() -> list[Any]:
    return [A.RandomCrop(SIZE, SIZE), A.HorizontalFlip()]


def _resize() -> list[Any]:
    return [A.RandomResizedCrop((SIZE, SIZE)), A.HorizontalFlip()]


def _colour() -> list[Any]:
    affine = A.Affine(rotate=(-15, 15), scale=(0.9, 1.1), p=1)
    return [*_resize(), A.ColorJitter(p=1), affine, A.GaussianBlur(p=1)]


def _noise() -> list[Any]:
    affine = A.Affine(rotate=(-15, 15), scale=(0.9, 1.1), p=1)  # of the whole image
    return [affine, *_resize(), A.ColorJitter(p=1), A.GaussianBlur(p=1), A.GaussNoise(p=1)]


_MAKERS: dict[str, Callable[[], list[Any]]] = {"crop": _crop, "resize": _resize, "colour": _colour, "noise": _noise}


class Augment:
    """A pipeline as a function of a sample, its key and its image.

    Args:
        name: One of ``PIPELINES``.
    """

    def __init__(self, name: str) -> None:
        self._transform = Albumentations(A.Compose(_MAKERS[name]()))

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample with its image augmented: uint8, (SIZE, SIZE, 3)."""
        rng = Rng(crc32(sample["__key__"].encode()))
        return {**sample, "image": self._transform(sample["image"], rng)}
