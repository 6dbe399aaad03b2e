"""An image file -> the pixels of a box of it, decoded once the box and the size of the result are known.

An array is also a source, so that transforms treat both alike.
"""

from typing import NamedTuple, Protocol

from shardkit.codecs.images import (
    decode_jpeg,
    decode_other_image,
    decode_unchanged,
    jpeg_orientation,
    jpeg_size,
    oriented,
)
from shardkit.codecs.registry import undecodable
from shardkit.errors import ArgumentError, CodecError
from shardkit.transforms.resize import Pixels

# A JPEG is decoded smaller only if resizing still has to shrink it by at least this factor. At 4, at least 99.2 % of
# the values of nine photographs at qualities 75 and 95 were within 2 grey levels of decoding at full size, and none
# differed by more than 6; at 3, 98.5 %; at 2, 82 %.
_REDUCTION_LEFT = 4
_MAX_SIDE = 65_535  # of a JPEG. Antialiasing needs memory for each side, and max_pixels would allow one very long row


class Box(NamedTuple):
    """A part of an image, in pixels.

    Attributes:
        top: The number of rows above it.
        left: The number of columns to the left of it.
        height: The number of its rows.
        width: The number of its columns.
    """

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: Pixels) -> Pixels:
        """Return this part of an image as a view, not a copy."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


class Shape(NamedTuple):
    """Height and width of an image."""

    height: int
    width: int


class Source(Protocol):
    """An image of known size, whose pixels may not be decoded yet."""

    height: int
    width: int

    def pixels(self, box: Box, shape: Shape) -> Pixels:
        """Return a box's pixels, or a smaller version of it that is large enough for an image of that shape."""
        ...


class ArraySource:
    """An array.

    Raises:
        ArgumentError: A side is too long.
    """

    def __init__(self, array: Pixels) -> None:
        self._array = array
        self.height, self.width = array.shape[:2]
        if max(self.height, self.width) > _MAX_SIDE:
            raise ArgumentError(
                f"it has {self.height:,} x {self.width:,} pixels, expected at most {_MAX_SIDE:,} on a side, as a JPEG "
                "has; cut it into several"
            )

    def pixels(self, box: Box, _: Shape) -> Pixels:
        """Return a box's pixels."""
        return box.of(self._array)


def open_source(data: bytes | memoryview, *, max_pixels: int, exif: bool) -> Source:
    """Return an image file as a source. A JPEG is decoded when its pixels are requested, other images at once.

    Args:
        data: The file.
        max_pixels: The largest permitted number of pixels.
        exif: Whether its EXIF orientation is applied.

    Raises:
        ArgumentError: A side is too long.
        ValueError: It is not an image, is damaged or cut, or is too large; ``pixels`` may raise it too.
        Exception: Whatever Pillow raises on a damaged file.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    if size is None:
        return ArraySource(decode_other_image(bytes(data), max_pixels=max_pixels, exif=exif))
    return _JpegSource(data, size, max_pixels, jpeg_orientation(data) if exif else 1)


class _JpegSource:
    """A JPEG that is decoded when its pixels are requested."""

    def __init__(self, data: bytes | memoryview, size: tuple[int, int], max_pixels: int, orientation: int) -> None:
        self._data = data
        self._size = size
        self._max_pixels = max_pixels
        self._orientation = orientation
        self.height, self.width = size if orientation < 5 else size[::-1]

    def pixels(self, box: Box, shape: Shape) -> Pixels:
        """Return a box's pixels; if fewer are enough for the shape, each is the mean of several."""
        divisor = self._divisor(box, shape)
        array = decode_jpeg(self._data, self._size, divisor=divisor)
        if array is None:
            divisor, array = 1, decode_other_image(bytes(self._data), max_pixels=self._max_pixels)
        if divisor > 1:
            box = Box(*(number // divisor for number in box))
        return box.of(oriented(array, self._orientation))

    def _divisor(self, box: Box, shape: Shape) -> int:
        """Return the factor by which to decode smaller, such that the box still begins and ends at whole pixels."""
        divisor = divisor_of(box, shape)
        numbers = (*box, self.height, self.width) if self._orientation > 1 else box
        while any(number % divisor for number in numbers):
            divisor //= 2
        return divisor


class PendingImage:
    """An image file in a sample that the next transform decodes.

    Args:
        data: The file.
        max_pixels: The largest permitted number of pixels.
        field: Its field, for messages.
        key: Its sample, for messages.
        url: Its shard, for messages.
        is_unchanged: Whether its pixels are returned as they are stored, not as RGB.

    Attributes:
        is_unchanged: As above.
        height: In pixels, after ``open``.
        width: In pixels, after ``open``.
        error: The error that was raised because it cannot be decoded; None if there was none.
    """

    __slots__ = ("_data", "_max_pixels", "_place", "_source", "error", "height", "is_unchanged", "width")

    def __init__(
        self,
        data: bytes | memoryview,
        *,
        max_pixels: int,
        field: str,
        key: str,
        url: str,
        is_unchanged: bool = False,
    ) -> None:
        self.is_unchanged = is_unchanged
        self._data = data
        self._max_pixels = max_pixels
        self._place = (field, key, url)
        self.error: Exception | None = None

    def open(self, *, exif: bool) -> "PendingImage":
        """Read its height and width, and return itself.

        Args:
            exif: Whether its EXIF orientation is applied.

        Raises:
            CodecError: It cannot be decoded; only ``pixels`` detects some kinds of damage.
        """
        try:
            self._source = open_source(self._data, max_pixels=self._max_pixels, exif=exif)
        except Exception as error:
            raise self._undecodable(error) from error
        self.height, self.width = self._source.height, self._source.width
        return self

    def decode_unchanged(self, *, exif: bool) -> Pixels:
        """Return all of its pixels, as they are stored; see ``codecs.images.decode_unchanged``.

        Raises:
            CodecError: It cannot be decoded.
        """
        try:
            return decode_unchanged(bytes(self._data), max_pixels=self._max_pixels, exif=exif)
        except Exception as error:
            raise self._undecodable(error) from error

    def pixels(self, box: Box, shape: Shape) -> Pixels:
        """Return a box's pixels, or a smaller version of it that is large enough for an image of that shape."""
        try:
            return self._source.pixels(box, shape)
        except Exception as error:
            raise self._undecodable(error) from error

    def _undecodable(self, error: Exception) -> CodecError:
        field, key, url = self._place
        self.error = undecodable(error, field, key=key, url=url)
        return self.error


def divisor_of(box: Box, shape: Shape) -> int:
    """Return the factor by which an image may be decoded smaller, 1, 2, 4 or 8, so that the result hardly differs.

    Example:
        >>> divisor_of(Box(0, 0, 3000, 4000), Shape(224, 224)), divisor_of(Box(0, 0, 400, 4000), Shape(224, 224))
        (2, 1)
    """
    divisor = 8
    reduction = min(box.height / shape.height, box.width / shape.width)
    while divisor > 1 and reduction < _REDUCTION_LEFT * divisor:
        divisor //= 2
    return divisor


def aligned(box: Box, shape: Shape) -> Box:
    """Return a box moved and cut, by less than ``divisor_of`` pixels, to whole pixels of the JPEG decoded smaller.

    Boxes that are decoded at full size are returned unchanged.

    Example:
        >>> aligned(Box(5, 7, 2001, 1901), Shape(224, 224)), aligned(Box(5, 7, 301, 200), Shape(224, 224))
        (Box(top=4, left=6, height=2000, width=1900), Box(top=5, left=7, height=301, width=200))
    """
    divisor = divisor_of(box, shape)
    return Box(*(number // divisor * divisor for number in box)) if divisor > 1 else box
