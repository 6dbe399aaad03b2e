"""Images -> images of one size: a box cut out, resized and mirrored, for batches.

A transform accepts decoded images and images that are not yet decoded. Datasets, loaders and streams pass the latter,
so that an image is decoded only when the needed part and size are known, and is written directly to its place in the
batch:

::

    bytes -- height and width --> box, mirrored or not -- decoded, smaller if that is enough --> resized into a row
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardkit.codecs.images import rgb_of, upright
from shardkit.codecs.registry import MAX_PIXELS
from shardkit.errors import ArgumentError, check_texts, check_whole
from shardkit.transforms.image_source import ArraySource, Box, PendingImage, Shape, Source, aligned, open_source
from shardkit.transforms.resize import Pixels, resize_linear, resize_nearest
from shardkit.transforms.rng import Rng

_TRIES = 10  # attempts to draw a box before the middle is used, as in torchvision


class ImageTransform:
    """The common base of this module's transforms.

    Attributes:
        nearest: The fields whose pixels are never mixed.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        antialias: bool = True,
        exif: bool = False,
        nearest: Sequence[str] = (),
    ) -> None:
        sides = tuple(size) if isinstance(size, Sequence) else (size, size)
        if len(sides) != 2:
            raise ArgumentError(f"size is {size!r}, expected a number of pixels, or (height, width)")
        self._shape = Shape(*(check_whole("size", side, least=1) for side in sides))
        self._antialias = bool(antialias)
        self._exif = bool(exif)
        self.nearest = frozenset(check_texts("nearest", nearest))

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """The shape of a result: (height, width, 3)."""
        return (*self._shape, 3)

    def __call__(self, image: Any, rng: Rng | None = None) -> Any:
        """Return an image of the requested size; for a dict of images, a dict of them, all cut and mirrored alike.

        Args:
            image: uint8, (height, width, 3), or a PIL image; or several, by the names of their fields, all of the same
                height and width. A field in ``nearest`` may be an array of any type. None stays None.
            rng: The source of all random numbers.

        Returns:
            uint8, (height, width, 3); for an array that ``nearest`` names, an array of its type.

        Raises:
            ArgumentError: It is not such an image, several images have different sizes, a name in ``nearest`` is not
                there, or ``rng`` is missing.
        """
        if isinstance(image, Mapping):
            return self.apply(image, rng)
        self._check_one()
        return self.apply({"image": image}, rng)["image"]

    def decode_into(
        self, data: bytes | memoryview, out: Pixels, rng: Rng | None = None, *, max_pixels: int = MAX_PIXELS
    ) -> None:
        """Decode an image file and write the result into ``out``, mostly without the GIL.

        The result is the same as if the image were first decoded and then transformed with the same random numbers,
        except for a difference of one or two grey levels if a large JPEG is decoded smaller.

        Args:
            data: The file.
            out: uint8, of the shape ``out_shape``, contiguous.
            rng: The source of all random numbers.
            max_pixels: The largest permitted number of pixels.

        Raises:
            ArgumentError: ``out`` has another type or shape or is not contiguous, or ``rng`` is missing.
            ValueError: It is not an image, is damaged or cut, or claims too many pixels. ``out`` may be partly written.
            Exception: Whatever Pillow raises on a damaged file.
        """
        if out.dtype != np.uint8 or out.shape != self.out_shape or not out.flags.carray:
            raise ArgumentError(
                f"out is a {out.dtype} array {out.shape}, expected uint8 {self.out_shape}, contiguous and writable"
            )
        self._check_one()
        source = open_source(data, max_pixels=max_pixels, exif=self._exif)
        box, mirrored = self._draw(source.height, source.width, rng)
        self._render(source, out, box, mirrored=mirrored, is_nearest=False)

    def apply(
        self, images: Mapping[str, Any], rng: Rng | None, outs: Mapping[str, Pixels] | None = None
    ) -> dict[str, Any]:
        """Return images by their names, all cut and mirrored alike; see ``__call__``.

        Args:
            images: Images; they may be pending.
            rng: The source of all random numbers.
            outs: Arrays for results that are uint8 and of the shape ``out_shape``; other results get new memory.

        Raises:
            CodecError: A pending image cannot be decoded.
        """
        if unknown := self.nearest - images.keys():
            raise ArgumentError(
                f"nearest names {', '.join(sorted(unknown))}, the images are {', '.join(images)}; name some of those"
            )
        sources = {name: self._open(name, image) for name, image in images.items() if image is not None}
        sizes = {(source.height, source.width) for source in sources.values()}
        if len(sizes) > 1:
            named = ", ".join(f"{name} {source.height} x {source.width}" for name, source in sources.items())
            raise ArgumentError(
                f"images that are cut alike must have the same height and width, got {named}; repair the sample, or "
                "leave it out when packing"
            )
        results = dict(images)
        for size in sizes:
            box, mirrored = self._draw(*size, rng)
            for name, source in sources.items():
                out = outs.get(name) if outs else None
                results[name] = self._render(source, out, box, mirrored=mirrored, is_nearest=name in self.nearest)
        return results

    def _check_one(self) -> None:
        if self.nearest:
            raise ArgumentError(
                f"nearest names {', '.join(sorted(self.nearest))}, but one image was given, without a name; give the "
                "names that the transform is for as a tuple: transform={('image', 'mask'): ...}, or ('mask',) alone"
            )

    def _draw(self, height: int, width: int, rng: Rng | None) -> tuple[Box, bool]:
        """Return which part of an image of that size is used, and whether it is mirrored."""
        raise NotImplementedError

    def _open(self, name: str, image: Any) -> Source:
        exif = self._exif
        if isinstance(image, PendingImage):
            if not image.is_unchanged:
                return image.open(exif=exif)
            image, exif = image.decode_unchanged(exif=exif), False
        if isinstance(image, np.ndarray):
            if exif:
                raise ArgumentError(
                    f"{name}: exif=True needs the file, and an array does not know how it was turned; let this "
                    "transform be the first for its field, in transform={...}, or pass decode=Decoder(images='pil')"
                )
            is_image = image.dtype == np.uint8 and image.shape[2:] == (3,)
            if image.size and (is_image or (name in self.nearest and image.ndim >= 2)):
                return ArraySource(image)
        elif hasattr(image, "getexif"):  # do not import PIL for users without PIL images
            image = upright(image) if self._exif else image
            return ArraySource(np.asarray(image) if name in self.nearest else rgb_of(image))
        got = f"{image.dtype} array {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ArgumentError(
            f"{name}: expected uint8 (height, width, 3) or a PIL image, got {got}; an array of another kind is resized "
            "only if nearest= names it"
        )

    def _render(self, source: Source, out: Pixels | None, box: Box, *, mirrored: bool, is_nearest: bool) -> Pixels:
        """Return a box of an image in the requested size, in ``out`` if it has the result's type and shape."""
        shape = Shape(box.height, box.width) if is_nearest else self._shape  # decoding smaller mixes a mask's pixels
        pixels = source.pixels(box, shape)
        out_shape = (*self._shape, *pixels.shape[2:])
        if out is None or out.shape != out_shape or out.dtype != pixels.dtype:
            out = np.empty(out_shape, pixels.dtype)
        if is_nearest:
            resize_nearest(pixels, out, mirrored=mirrored)
        else:
            resize_linear(pixels, out, mirrored=mirrored, antialias=self._antialias)
        return out


class RandomResizedCrop(ImageTransform):
    """A part of an image, with random position, area and shape, resized, and mirrored half the time.

    This is the usual augmentation for training. The boxes have the same distribution as those of torchvision's
    transform of that name, and are resized as by Pillow, within 2 grey levels. If it is the first transform of a field
    in the ``transform`` of a loader, a dataset or a stream, the image is decoded, cut and resized in one step, with the
    GIL released.

    A JPEG is decoded to 1/2, 1/4 or 1/8 of its size if each side of the box then still has at least four pixels for
    each pixel of the result. Such a box is moved and cut by fewer than 2, 4 or 8 pixels, so that it begins and ends at
    whole pixels. 99 % of the values are then within 2 grey levels. The whole file is decoded, whatever the box, so that
    damage anywhere in it is an error.

    Args:
        size: Height and width of the result in pixels; or (height, width).
        scale: The smallest and the largest area of the part, as fractions of the image's area.
        ratio: The smallest and the largest ratio of its width to its height.
        flip: How often it is mirrored, left to right, from 0 to 1.
        antialias: Use all pixels of the part. Without it, some detail is lost and some artefacts appear, as with
            OpenCV's linear interpolation.
        exif: Apply the image's EXIF orientation. By default the image stays as it is stored.
        nearest: Those of several fields that hold values such as class numbers, which must not be mixed: each pixel of
            the result is one of the field's pixels. Every other field must be an image.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> import numpy as np
        >>> crop = RandomResizedCrop(224)
        >>> crop(np.zeros((375, 500, 3), np.uint8), Rng(0)).shape
        (224, 224, 3)
        >>> both = RandomResizedCrop((32, 64), nearest=("mask",))
        >>> made = both({"image": np.zeros((80, 90, 3), np.uint8), "mask": np.ones((80, 90), np.int64)}, Rng(0))
        >>> made["image"].shape, made["mask"].shape, made["mask"].dtype
        ((32, 64, 3), (32, 64), dtype('int64'))
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        antialias: bool = True,
        exif: bool = False,
        nearest: Sequence[str] = (),
    ) -> None:
        super().__init__(size, antialias=antialias, exif=exif, nearest=nearest)
        self._scale = _check_range("scale", scale, most=1)
        self._log_ratio = tuple(map(math.log, _check_range("ratio", ratio, most=math.inf)))
        self._ratio = tuple(ratio)
        if not 0 <= flip <= 1:
            raise ArgumentError(f"flip is {flip!r}, expected how often images are mirrored, from 0 to 1")
        self._flip = flip

    def _draw(self, height: int, width: int, rng: Rng | None) -> tuple[Box, bool]:
        if rng is None:
            raise ArgumentError(
                "a random transform was called without rng; pass an Rng, as shardkit.Rng(7), which decides the result"
            )
        box = aligned(self._draw_box(height, width, rng), self._shape)
        return box, rng.random() < self._flip

    def _draw_box(self, height: int, width: int, rng: Rng) -> Box:
        for _ in range(_TRIES):
            area = height * width * rng.uniform(*self._scale)
            ratio = math.exp(rng.uniform(*self._log_ratio))
            box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top, left = rng.integers(0, height - box_height + 1), rng.integers(0, width - box_width + 1)
                return Box(top, left, box_height, box_width)
        low, high = self._ratio
        ratio = min(max(width / height, low), high)
        return _middle(height, width, ratio, 1)


class ResizeCenterCrop(ImageTransform):
    """The middle of an image, resized: the usual evaluation.

    From the largest part that has the result's aspect ratio, it keeps the fraction ``crop`` of each side. By default,
    this is the part that torchvision's ``Resize(256)`` and ``CenterCrop(224)`` leave for 224, but made in one step.

    Args:
        size: Height and width of the result in pixels; or (height, width).
        crop: The fraction of the sides that is kept, above 0 and up to 1.
        antialias: As for ``RandomResizedCrop``, like all that follow.
        exif: Apply the image's EXIF orientation.
        nearest: Those of several fields whose pixels are never mixed.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> import numpy as np
        >>> ResizeCenterCrop(224)(np.zeros((375, 500, 3), np.uint8)).shape
        (224, 224, 3)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        crop: float = 0.875,
        antialias: bool = True,
        exif: bool = False,
        nearest: Sequence[str] = (),
    ) -> None:
        super().__init__(size, antialias=antialias, exif=exif, nearest=nearest)
        if not 0 < crop <= 1:
            raise ArgumentError(f"crop is {crop!r}, expected how much of the sides is taken, above 0 and up to 1")
        self._crop = crop

    def _draw(self, height: int, width: int, _: Rng | None) -> tuple[Box, bool]:
        box = _middle(height, width, self._shape.width / self._shape.height, self._crop)
        return aligned(box, self._shape), False


class Resize(ImageTransform):
    """A whole image, resized to the requested size; its aspect ratio is not kept.

    Args:
        size: Height and width of the result in pixels; or (height, width).
        antialias: As for ``RandomResizedCrop``, like all that follow.
        exif: Apply the image's EXIF orientation.
        nearest: Those of several fields whose pixels are never mixed.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> import numpy as np
        >>> Resize((32, 64))(np.zeros((375, 500, 3), np.uint8)).shape
        (32, 64, 3)
    """

    def _draw(self, height: int, width: int, _: Rng | None) -> tuple[Box, bool]:
        return Box(0, 0, height, width), False


def _middle(height: int, width: int, ratio: float, crop: float) -> Box:
    """Return the middle of an image: the fraction ``crop`` of the largest box with width / height = ``ratio``."""
    box_height = max(1, round(crop * min(height, width / ratio)))
    box_width = max(1, round(crop * min(width, height * ratio)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _check_range(name: str, numbers: tuple[float, float], *, most: float) -> tuple[float, float]:
    low, high = numbers if isinstance(numbers, Sequence) and len(numbers) == 2 else (0, 0)
    if not 0 < low <= high <= most or high == math.inf:
        up_to = f" and up to {most}" if most < math.inf else ""
        raise ArgumentError(f"{name} is {numbers!r}, expected (low, high), above 0{up_to}")
    return low, high
