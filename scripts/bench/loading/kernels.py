"""From a JPEG's bytes to a row of a batch: functions for all loaders, where decoders are not what is compared."""

import io
import math
import random
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loading.job import SIZE

Pixels = npt.NDArray[np.uint8]


class Uniform(Protocol):
    """A generator of random numbers: ``random.Random`` or ``shardkit.Rng``."""

    def uniform(self, low: float, high: float, /) -> float:
        """Return a number from ``low`` to ``high``."""
        ...


def choose_box(width: int, height: int, rng: Uniform) -> tuple[int, int, int, int]:
    """Return left, upper, right and lower of a random crop, drawn like torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(rng.uniform(0, width - w + 1)), int(rng.uniform(0, height - h + 1))
            return left, upper, left + w, upper + h
    side = min(width, height)
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


def crop(pixels: Pixels, rng: Uniform, out: Pixels | None = None) -> Pixels:
    """Return a random crop of SIZE, antialiased, mirrored half the time, by shardkit's kernel, without the GIL."""
    from shardkit.transforms.resize import resize_linear

    left, upper, right, lower = choose_box(pixels.shape[1], pixels.shape[0], rng)
    row = np.empty((SIZE, SIZE, 3), np.uint8) if out is None else out
    resize_linear(pixels[upper:lower, left:right], row, mirrored=rng.uniform(0, 1) < 0.5, antialias=True)
    return row


def decode(data: bytes) -> Pixels:
    """Return the pixels of a JPEG, decoded by simplejpeg."""
    import simplejpeg

    pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    return pixels


def crop_with_pillow(image: Any) -> Pixels:
    """Return a random crop of a PIL image, as torchvision's RandomResizedCrop and RandomHorizontalFlip make it.

    torchvision itself would add its own overhead to these calls of Pillow, and few of its builds fit a given torch.
    """
    from PIL import Image

    rng = random.Random()  # noqa: S311 - of a benchmark
    image = (
        image.convert("RGB")
        .crop(choose_box(image.width, image.height, rng))
        .resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    )
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def make_row(data: bytes, *, pillow: bool) -> Pixels:
    """Return a row of a batch, made by Pillow or by the kernels that shardkit uses."""
    if pillow:
        from PIL import Image

        return crop_with_pillow(Image.open(io.BytesIO(data)))
    return crop(decode(data), random.Random())  # noqa: S311 - of a benchmark
