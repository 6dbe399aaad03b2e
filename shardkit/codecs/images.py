"""Image files <-> arrays of pixels: 8-bit RGB, or as they are stored.

The format of an image is determined from its first bytes, never from its name, and the number of pixels that it claims
is bounded before anything is decoded. If simplejpeg is installed, it decodes JPEGs in half of Pillow's time; if OpenCV
is installed, it decodes PNGs and WebPs in four fifths of Pillow's time. Pillow decodes all other images, and complete
images that these two refuse. The pixels are the same. A truncated image is an error, even where Pillow would accept it,
and so is an image with more bits than the requested decoding keeps.

Only Pillow's readers of the formats below are used: others run programs, or read formats that no training set contains.
Pillow's own limit on pixels, a process-wide setting, is not relied on.
"""

import io
import re
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FIELDS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tif": "TIFF",
    "tiff": "TIFF",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
}
"""The last components of fields that hold images, and the format that Pillow writes for each."""

IMAGE_EXTENSIONS = {
    ".jpg": "jpg", ".jpeg": "jpg", ".jpe": "jpg", ".png": "png", ".webp": "webp", ".gif": "gif", ".bmp": "bmp",
    ".tif": "tif", ".tiff": "tif", ".ppm": "ppm", ".pgm": "pgm", ".pbm": "pbm",
}  # fmt: skip
"""The extensions of image files, in lower case, and the field that each is packed as."""

_MAGICS = {  # by the names of Pillow's readers
    "Jpeg": rb"\xff\xd8",
    "Png": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF....WEBP",
    "Gif": rb"GIF8[79]a",
    "Bmp": rb"BM",
    "Tiff": rb"II[*+]\0|MM\0[*+]",
    "Ppm": rb"P[1-6][\s#]",
}
# The palette numbers of an optimised GIF differ from the grey levels that it was made from.
_SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95},
    "WEBP": {"quality": 95},
    "GIF": {"optimize": False},
}
_TIFF_TILE_SIZE = (322, 323)
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_PLANES, _TIFF_EXTRA, _TIFF_FORMAT = 258, 262, 284, 338, 339
# libtiff decompresses to this machine's byte order; for these types, Pillow 13 expects the byte order of the file.
_TIFF_NATIVE = {"I;16BS": "I;16NS", "I;32BS": "I;32NS", "F;32BF": "F;32NF"}
_MODES = {"ppm": ("RGB",), "pgm": ("L", "I;16"), "pbm": ("1",)}
# libjpeg's messages about missing or wrong pixels; its other messages concern the data around them.
_JPEG_DAMAGE = re.compile(r"premature end|bad (?:Huffman|arithmetic) code|instead of RST", re.IGNORECASE)

MAX_SCANS = 100
"""The largest number of scans, passes over all pixels, that a JPEG may have. A scan may be a few bytes of the file, and
take a millisecond for every million pixels that the file claims. Progressive JPEGs have about 10; libtiff uses the same
bound."""

_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = b"\xff\xda"
_SCAN_PAIR = int.from_bytes(_SCAN, "little")
# A JPEG marker that begins a segment with a length, or that begins or ends an image. Other markers stand alone.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd8-\xfe])")
_SWAPPED = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}


class BitDepthError(ValueError):
    """An image has more bits per channel than the chosen decoding keeps; ``decode_unchanged`` keeps them all."""


def decode_image(data: bytes, *, max_pixels: int) -> npt.NDArray[np.uint8]:
    """Return an image's pixels.

    Every image becomes RGB: grey and black-and-white values are repeated, palettes and CMYK are converted. Alpha is
    dropped, not blended. Only the first frame of an animation, or the first of several pages, is decoded. An EXIF
    orientation is not applied, except that of a TIFF, which Pillow always applies.

    Args:
        data: The file.
        max_pixels: The largest permitted product of height and width.

    Returns:
        uint8, (height, width, 3), RGB, writable.

    Raises:
        BitDepthError: It has more than 8 bits per channel.
        ValueError: It is not an image, claims too many pixels, is cut, or is a JPEG of more than ``MAX_SCANS`` passes.
        Exception: Whatever Pillow raises on a damaged file.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    pixels = decode_jpeg(data, size) if size else None
    return decode_other_image(data, max_pixels=max_pixels) if pixels is None else pixels


def decode_other_image(data: bytes, *, max_pixels: int, exif: bool = False) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image that ``decode_jpeg`` does not decode; otherwise like ``decode_image``.

    Args:
        data: The file.
        max_pixels: As for ``decode_image``.
        exif: Apply its EXIF orientation.
    """
    pixels = None if exif else _decode_with_opencv(data, max_pixels)
    if pixels is not None:
        return pixels
    image = _open_image(data, max_pixels)
    _check_eight_bits(image.bits, image.file.mode)
    loaded = _loaded(image.file)
    return rgb_of(upright(loaded) if exif else loaded)


def decode_unchanged(data: bytes, *, max_pixels: int, exif: bool = False) -> npt.NDArray[Any]:
    """Return an image's pixels exactly as the file stores them.

    Grey is uint8 or uint16, (height, width), even if it has only 2 or 4 bits; black and white is 0 and 1; pixels of a
    palette image are indexes into the palette; colours are uint8 or uint16, (height, width, 3), and alpha is another
    channel. CMYK is (height, width, 4). A TIFF may also be int16, int32, uint32 or float32. An image that no array can
    represent exactly is an error.

    Args:
        data: The file.
        max_pixels: As for ``decode_image``.
        exif: Apply its EXIF orientation.

    Raises:
        ValueError: As for ``decode_image``; or its pixels cannot be read without changing them.
        Exception: Whatever Pillow raises on a damaged file.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    pixels: npt.NDArray[Any] | None = decode_jpeg(data, size) if size else None
    if pixels is None:
        image = _open_image(data, max_pixels)
        pixels = _stored_pixels(image, data, max_pixels)
        orientation = _orientation(image.file.getexif()) if exif else 1
    else:
        pixels = pixels[:, :, 0] if _is_grey(data) else pixels
        orientation = jpeg_orientation(data) if exif else 1
    return np.ascontiguousarray(oriented(pixels, orientation))


def open_image(data: bytes, *, max_pixels: int) -> "Image":
    """Return a loaded PIL image in the mode of the file: palettes and 16-bit grey are kept.

    For tif, gif and webp, Pillow warns above ``PIL.Image.MAX_IMAGE_PIXELS``, and refuses more than twice as many.

    The arguments and errors are those of ``decode_image``, except that images of more bits are refused only if Pillow
    has no mode that keeps them.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    if size:  # Pillow accepts damaged JPEGs; decoding to a small image finds the same damage
        decode_jpeg(data, size, divisor=8 if min(size) >= 8 else 1)
    image = _open_image(data, max_pixels)
    kept = _bits_of_mode(image.file.mode)
    if image.bits > kept:
        raise BitDepthError(
            f"its pixels are {image.bits}-bit, of which a PIL image would keep {kept}; ':unchanged' keeps all"
        )
    loaded: Image = _loaded(image.file)
    return loaded


class _ImageFile(NamedTuple):
    """An image that Pillow has opened but not loaded."""

    file: Any
    kind: str
    bits: int


def _open_image(data: bytes, max_pixels: int) -> _ImageFile:
    from PIL import ImageFile

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on, so that cut images pass for whole ones; set it to False"
        )
    kind = next((kind for kind, magic in _MAGICS.items() if re.match(magic, data, re.DOTALL)), None)
    if kind is None:
        raise ValueError(f"it begins with {data[:8]!r}, unlike every image that shardkit reads")
    if kind == "Jpeg":
        _check_scans(data)
        _check_jpeg_end(data)
    elif kind == "Png":
        _check_png(data)
    elif kind == "Gif":
        _check_gif(data)
    elif kind == "WebP":
        _check_pixels(_webp_size(data), max_pixels)  # Pillow allocates the pixels when it opens the file
    image = getattr(import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")(io.BytesIO(data))
    _check_pixels(image.size, max_pixels)
    bits = 8
    if kind == "Tiff":  # libtiff allocates a whole tile, which may be larger than the image
        _check_pixels(tuple(image.tag_v2.get(tag, 0) for tag in _TIFF_TILE_SIZE), max_pixels)
        bits = max(image.tag_v2.get(_TIFF_BITS, (1,)))
        if image.tile and image.tile[0].codec_name == "libtiff":
            _set_raw_mode(image, _TIFF_NATIVE.get(_raw_mode(image), _raw_mode(image)))
    elif kind == "Png":
        bits = int(_raw_mode(image).partition(";")[2].rstrip("B") or 8)
    elif kind == "Ppm" and image.mode != "1":
        bits = 8 * _pnm_dtype(image).itemsize
    return _ImageFile(image, kind, bits)


def _check_eight_bits(bits: int, mode: str) -> None:
    if bits > 8:
        kind = {"I": " integers", "F": " floats"}.get(mode, "") if bits == 32 else ""
        raise BitDepthError(
            f"its pixels are {bits}-bit{kind}, expected 8 bits, as rgb keeps no more; ':unchanged' does"
        )


def _bits_of_mode(mode: str) -> int:
    return 16 if mode.startswith("I;16") else 32 if mode in ("I", "F") else 8


def _stored_pixels(image: _ImageFile, data: bytes, max_pixels: int) -> npt.NDArray[Any]:
    """Return the pixels of an image that was opened but not loaded."""
    file, kind, bits = image
    raw_mode = _raw_mode(file)
    if kind == "Ppm" and file.mode != "1":
        return _pnm_pixels(file, data)
    tags = file.tag_v2 if kind == "Tiff" else {}
    is_planar = tags.get(_TIFF_PLANES, 1) != 1
    if {0, 1} & set(tags.get(_TIFF_EXTRA, ())) or (is_planar and (bits > 8 or file.mode in ("LA", "PA"))):
        planes = ", in planes" if is_planar else ""
        raise ValueError(
            f"its channels ({raw_mode}, {bits}-bit{planes}) cannot be read without changing them; store it with plain "
            "alpha, in one plane, or as npy"
        )
    if raw_mode == "LA;16B" and data[12:16] == b"IHDR":  # read as 8-bit RGBA, which has as many bytes per pixel
        header = b"IHDR" + data[16:24] + b"\x08\x06" + data[26:29]
        other = data[:12] + header + zlib.crc32(header).to_bytes(4) + data[33:]
        return np.array(_loaded(_open_image(other, max_pixels).file)).view(">u2").astype(np.uint16)
    if bits > _bits_of_mode(file.mode):
        return _sixteen_bits(image, _open_image(data, max_pixels).file)
    pixels = np.array(_loaded(file))
    if file.mode == "1":
        return pixels.astype(np.uint8)
    if file.mode == "L" and tags.get(_TIFF_PHOTOMETRIC) == 0:  # white is 0, which Pillow inverts
        pixels = ~pixels
    if file.mode == "L" and bits in (2, 4):  # Pillow scales them to 8 bits
        return pixels // np.uint8(255 // (2**bits - 1))
    if tags and file.mode in ("L", "I"):  # Pillow does not have all of these types
        sign = "i" if tags.get(_TIFF_FORMAT, (1,))[0] == 2 else "u"
        pixels = pixels.astype(np.int16) if bits == 16 else pixels
        return pixels.view(f"{sign}{pixels.itemsize}")
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _sixteen_bits(image: _ImageFile, other: Any) -> npt.NDArray[np.uint16]:
    """Return 16-bit colours. Pillow keeps only the upper byte of each, or the lower if the bytes are declared swapped.

    Args:
        image: The image.
        other: The same image, opened once more.
    """
    raw_mode = _raw_mode(image.file)
    if image.bits != 16 or not re.fullmatch("(RGB|RGBA|CMYK);16[BLN]", raw_mode):
        raise ValueError(f"its pixels have {image.bits} bits ({raw_mode}), which Pillow cannot read; store it as npy")
    _set_raw_mode(other, raw_mode[:-1] + _SWAPPED[raw_mode[-1]])
    upper, lower = np.asarray(_loaded(image.file)), np.asarray(_loaded(other))
    pixels: npt.NDArray[np.uint16] = upper.astype(np.uint16) << 8 | lower
    return pixels


def _loaded(image: Any) -> Any:
    image.load()
    return image


def _raw_mode(image: Any) -> str:
    """Return Pillow's name for the stored pixel layout of an image that is not loaded."""
    args = image.tile[0].args if image.tile else ""
    return str(args[0] if isinstance(args, tuple) else args)


def _set_raw_mode(image: Any, raw_mode: str) -> None:
    for number, tile in enumerate(image.tile):
        args = raw_mode if isinstance(tile.args, str) else (raw_mode, *tile.args[1:])
        image.tile[number] = tile._replace(args=args)


def _pnm_dtype(image: Any) -> "np.dtype[Any]":
    """Return the type of the numbers in a PGM or PPM that was opened but not loaded."""
    codec, _, _, args = image.tile[0]
    largest = args[1] if codec != "raw" else 65535 if image.mode == "I" else 255
    return np.dtype(">u2" if largest > 255 else np.uint8)


def _pnm_pixels(image: Any, data: bytes) -> npt.NDArray[Any]:
    """Return the numbers of a PGM or PPM, which Pillow would rescale if the maximum is not 255 or 65535."""
    codec, _, offset, _ = image.tile[0]
    dtype, shape = _pnm_dtype(image), (image.height, image.width, 3)[: 3 if image.mode == "RGB" else 2]
    count = int(np.prod(shape))
    if codec == "ppm_plain":
        texts = re.finditer(rb"\S+", re.sub(rb"#[^\r\n]*", b"", data[offset:]))
        numbers = np.fromiter((int(text[0]) for text in texts), dtype.newbyteorder("="), count)
        return numbers.reshape(shape)
    return np.frombuffer(data, dtype, count, offset).astype(dtype.newbyteorder("=")).reshape(shape)


def upright(image: "Image") -> "Image":
    """Return a PIL image with its EXIF orientation applied."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def oriented(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Return a view of an image with an EXIF orientation applied."""
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels.swapaxes(0, 1) if orientation >= 5 else pixels


def encode_image(component: str, value: object) -> bytes:
    """Return an image file.

    Lossless: png, bmp, tif, ppm (colour), pgm (grey), pbm (black and white), and gif for grey. Lossy: jpg and webp,
    both with quality 95, and gif for colours, which it reduces to 256. For another quality, or a lossless webp,
    encode the image yourself and pass the bytes.

    Args:
        component: One of ``IMAGE_FIELDS``.
        value: uint8, (height, width, 3) RGB, (height, width, 4) RGBA or (height, width) grey; or a PIL image, whose
            mode is kept.

    Raises:
        ValueError: It is not an image, or the format does not support its kind.
        Exception: Whatever Pillow raises on something that the format cannot represent, such as alpha in a JPEG.
    """
    from PIL import Image

    image = value if isinstance(value, Image.Image) else _image_of(value)
    if component == "pbm" and image.mode == "L" and set(np.unique(np.asarray(image))) <= {0, 255}:
        image = image.convert("1")
    modes = _MODES.get(component, (image.mode,))
    if image.mode not in modes:
        raise ValueError(
            f"{component} holds images of mode {' or '.join(modes)}, got {image.mode}; convert it, or use png"
        )
    file = io.BytesIO()
    form = IMAGE_FIELDS[component]
    image.save(file, form, **_SAVE_OPTIONS.get(form, {}))
    return file.getvalue()


def _image_of(value: object) -> "Image":
    from PIL import Image

    got = type(value).__name__
    if isinstance(value, np.ndarray):
        got = f"{value.dtype} array {value.shape}"
        if value.dtype == np.uint8 and value.size and (value.ndim == 2 or value.shape[2:] in ((3,), (4,))):
            return Image.fromarray(value)
    raise ValueError(f"expected a uint8 array (height, width, 3) or (height, width), or a PIL image, got {got}")


def jpeg_size(data: bytes | memoryview, *, max_pixels: int) -> tuple[int, int] | None:
    """Return height and width of a JPEG that ``decode_jpeg`` may decode; None if Pillow should decode or refuse it.

    Raises:
        ValueError: It is cut, or has more than ``MAX_SCANS`` passes.
    """
    if data[:2] != b"\xff\xd8":
        return None
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        if _JPEG_DAMAGE.search(str(error)):
            raise
        return None
    if width * height > max_pixels or colours in ("CMYK", "YCCK"):
        return None  # Pillow refuses the first, and converts the second as it does without simplejpeg
    _check_scans(data)
    return height, width


def decode_jpeg(data: bytes | memoryview, size: tuple[int, int], *, divisor: int = 1) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a JPEG, without the GIL; None if Pillow should decode or refuse it.

    Args:
        data: The file.
        size: The result of ``jpeg_size``.
        divisor: 1, 2, 4 or 8: decode to an image whose sides are shorter by this factor. Each pixel is about the mean
            of a square of pixels; an incomplete square at the right or bottom edge also becomes a pixel. Only for
            images with sides of 8 pixels or more.

    Raises:
        ValueError: It is damaged or cut at any place.
    """
    import simplejpeg

    # simplejpeg takes the smallest scale n/8 that gives at least this size; several give the same size if a side has
    # fewer than 8 pixels.
    height, width = (-(-side // divisor) for side in size) if divisor > 1 else (0, 0)
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError as error:
        if _JPEG_DAMAGE.search(str(error)):
            raise
        return None
    return pixels


def _is_grey(data: bytes | memoryview) -> bool:
    """Return whether a JPEG has one channel."""
    frames = (begin for marker, begin, _ in _jpeg_segments(data) if marker in _JPEG_FRAMES)
    return data[next(frames) + 5] == 1


def _check_scans(data: bytes | memoryview) -> None:
    """Raise if a JPEG has more passes over its pixels than one should need."""
    # NumPy compares all pairs of bytes, at even and at odd offsets, in a sixth of the time of bytes.count().
    pairs = (np.frombuffer(data, "<u2", (len(data) - first) // 2, first) for first in (0, 1) if len(data) - first > 1)
    if sum(int(np.count_nonzero(some == _SCAN_PAIR)) for some in pairs) <= MAX_SCANS:
        return
    # Some of these markers may belong to thumbnails or other embedded images.
    if sum(marker == _SCAN[1] for marker, _, _ in _jpeg_segments(data)) > MAX_SCANS:
        raise ValueError(f"it is a JPEG of more than {MAX_SCANS} scans, as no encoder makes them")


def _check_jpeg_end(data: bytes) -> None:
    """Raise unless a JPEG has its end marker; Pillow does not always check for it once it has all pixels."""
    end = max((end for _, _, end in _jpeg_segments(data)), default=2)
    if not _JPEG_MARKER.search(data, end):
        raise ValueError(f"it is cut: {len(data):,} bytes of a JPEG without an end marker")


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, from 1 to 8; 1 (upright) if it has none.

    Raises:
        Exception: Whatever Pillow raises on damaged EXIF data.
    """
    for marker, begin, end in takewhile(lambda segment: segment[0] != _SCAN[1], _jpeg_segments(data)):
        if marker == 0xE1 and data[begin : begin + 6] == b"Exif\0\0":
            from PIL import Image

            exif = Image.Exif()
            exif.load(bytes(data[begin:end]))
            return _orientation(exif)
    return 1


def _orientation(exif: Any) -> int:
    from PIL import ExifTags

    orientation: int = exif.get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment, and where its content begins and ends; for a scan, only its header counts.

    These are the segments that the decoder finds: it too skips all bytes between a segment's end and the next marker.
    """
    at = 2
    while (found := _JPEG_MARKER.search(data, at)) and found[1] not in (b"\xd8", b"\xd9"):  # another image, the end
        begin = found.end() + 2
        at = begin + max(0, int.from_bytes(data[begin - 2 : begin]) - 2)
        yield found[1][0], begin, at


def _decode_with_opencv(data: bytes, max_pixels: int) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a PNG or WebP, in four fifths of Pillow's time; None if Pillow should decode or refuse it.

    That is the case if OpenCV is not installed, for animated PNGs, where the two choose different frames, and for files
    that OpenCV cannot decode: Pillow then reports what is wrong.
    """
    if re.match(_MAGICS["Png"], data):
        _check_png(data)
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        if b"acTL" in data[: data.find(b"IDAT")]:
            return None
    elif re.match(_MAGICS["WebP"], data, re.DOTALL):
        width, height = _webp_size(data)
    else:
        return None
    if width * height > max_pixels or (data[:1] == b"\x89" and data[24] > 8):
        return None
    try:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        return cast("npt.NDArray[np.uint8] | None", cv2.imdecode(np.frombuffer(data, np.uint8), flags))
    except (ImportError, AttributeError):  # it is not installed, or is older than 4.10
        return None
    except cv2.error:
        return None


def rgb_of(image: "Image") -> npt.NDArray[np.uint8]:
    """Return the pixels of a PIL image in the form that ``decode_image`` returns.

    Raises:
        BitDepthError: It has more than 8 bits per channel.
    """
    _check_eight_bits(_bits_of_mode(image.mode), image.mode)
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # Pillow warns about direct conversion to RGB
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _check_pixels(size: tuple[int, ...], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ValueError(f"it claims {width:,} x {height:,} pixels, the limit is max_pixels={max_pixels:,}")


def _check_png(data: bytes) -> None:
    """Raise unless all chunks are there and the critical ones undamaged; Pillow checks neither if it has all rows."""
    at, kind = 8, b""
    while kind != b"IEND":
        kind = data[at + 4 : at + 8]
        end = at + 12 + int.from_bytes(data[at : at + 4])
        if end > len(data):
            raise ValueError(f"it is cut: {len(data):,} bytes of a PNG without its last chunk")
        is_critical = kind[:1].isupper()
        if is_critical and zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise ValueError(f"its {kind.decode('latin-1')} chunk at byte {at:,} is damaged")
        at = end


def _check_gif(data: bytes) -> None:
    """Raise unless all blocks and the trailer are there; Pillow accepts a file that is cut after its first image."""
    try:
        at = 13 + _palette_bytes(data[10])
        while (kind := data[at]) != 0x3B:  # the trailer
            # An image has a descriptor of 9 bytes, an optional palette, and a byte for its code size; an extension has
            # a label.
            at += 1 + (10 + _palette_bytes(data[at + 9]) if kind == 0x2C else 1)
            while length := data[at]:
                at += 1 + length
            at += 1
    except IndexError:
        raise ValueError(f"it is cut: {len(data):,} bytes of a GIF without its end") from None


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the width and height that the first chunk states."""
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
