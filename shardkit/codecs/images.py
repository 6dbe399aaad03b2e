"""Image files <-> arrays of pixels.

Which format an image has is read from its first bytes, never from its name, and the pixels that it claims are bounded
before anything is decoded. JPEG goes to simplejpeg where that is installed, in half of Pillow's time, PNG and
WebP to OpenCV where that is installed, in four fifths of it; the rest, and what these refuse although nothing is
missing, goes to Pillow. The pixels are the same. An image that is cut is an error, also where Pillow would take it.

Of Pillow only the readers of the formats below are used: others run programs or read what no training set holds. Its
own bound on pixels, a process-wide setting, is not relied on.
"""

import io
import re
import zlib
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

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

_MAGICS = {  # by the names of Pillow's readers
    "Jpeg": rb"\xff\xd8",
    "Png": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF....WEBP",
    "Gif": rb"GIF8[79]a",
    "Bmp": rb"BM",
    "Tiff": rb"II[*+]\0|MM\0[*+]",
    "Ppm": rb"P[1-6][\s#]",
}
_SAVE_OPTIONS: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95}, "WEBP": {"quality": 95}}
_TIFF_TILE_SIZE = (322, 323)
_MODES = {"ppm": ("RGB",), "pgm": ("L", "I;16"), "pbm": ("1",)}
# What libjpeg says when pixels are missing or wrong; other complaints concern what surrounds them.
_JPEG_DAMAGE = re.compile(r"premature end|bad (?:Huffman|arithmetic) code|instead of RST", re.IGNORECASE)
# ... when there is more than the pixels that a JPEG claims, up to its end or to a marker between pixels.
_JPEG_REST = re.compile(r"extraneous bytes before marker 0xd[0-79]\Z")
_JPEG_FRAMES = (0xC0, 0xC1)  # the markers of those that are decoded from top to bottom, ...
_JPEG_ALL_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # ... and of all
_LEAST_ROWS_SAVED = 32  # less is not worth a copy of the file


def decode_image(data: bytes, *, max_pixels: int) -> npt.NDArray[np.uint8]:
    """Return an image's pixels.

    Everything becomes RGB: grey and black-and-white are repeated, palettes and CMYK converted. Alpha is dropped, not
    blended. Of 16 bits a channel the upper 8 are kept. Of an animation or several pages the first is decoded. An EXIF
    orientation is not applied, except that of a TIFF, which Pillow always applies.

    Args:
        data: The file.
        max_pixels: The most that its height times its width may be.

    Returns:
        uint8, (height, width, 3), RGB; it can be written to.

    Raises:
        ValueError: It is no image, claims too many pixels, is cut, or has values that 8 bits cannot say (float, 32-bit
            integers).
        Exception: Whatever Pillow raises on a damaged file.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    pixels = decode_jpeg(data, size) if size else None
    return decode_other_image(data, max_pixels=max_pixels) if pixels is None else pixels


def decode_other_image(data: bytes, *, max_pixels: int) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image that ``decode_jpeg`` does not decode; as ``decode_image`` otherwise."""
    pixels = _decode_with_opencv(data, max_pixels)
    return rgb_of(open_image(data, max_pixels=max_pixels)) if pixels is None else pixels


def open_image(data: bytes, *, max_pixels: int) -> "Image":
    """Return an image as Pillow has it, loaded, in the mode of the file: a palette stays one, 16 bits stay 16.

    Of tif, gif and webp Pillow warns beyond ``PIL.Image.MAX_IMAGE_PIXELS``, and refuses what is beyond twice that.

    Args and errors as for ``decode_image``.
    """
    from PIL import ImageFile

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on, so that cut images pass for whole ones; set it to False"
        )
    kind = next((kind for kind, magic in _MAGICS.items() if re.match(magic, data, re.DOTALL)), None)
    if kind is None:
        raise ValueError(f"it begins with {data[:8]!r}, as no image does that shardkit reads")
    if kind == "Png":
        _check_png(data)
    elif kind == "Gif":
        _check_gif(data)
    elif kind == "WebP":
        _check_pixels(_webp_size(data), max_pixels)  # Pillow takes the memory for the pixels when it opens the file
    image = getattr(import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")(io.BytesIO(data))
    _check_pixels(image.size, max_pixels)
    if kind == "Tiff":  # libtiff takes the memory for a whole tile, which may be larger than the image
        _check_pixels(tuple(image.tag_v2.get(tag, 0) for tag in _TIFF_TILE_SIZE), max_pixels)
    image.load()
    return cast("Image", image)


def encode_image(component: str, value: object) -> bytes:
    """Return an image file.

    Lossless: png, bmp, tif, ppm (colour), pgm (grey), pbm (black and white), and gif for grey. Lossy: jpg and webp,
    both with quality 95, and gif for colours, which it cuts down to 256. For another quality, or a lossless webp,
    encode the image yourself and give the bytes.

    Args:
        component: One of ``IMAGE_FIELDS``.
        value: uint8, (height, width, 3) RGB, (height, width, 4) RGBA or (height, width) grey; or a PIL image, of which
            the mode is kept.

    Raises:
        ValueError: It is no image, or of a kind that the format does not have.
        Exception: Whatever Pillow raises on what a format cannot say, such as alpha in a JPEG.
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
    """Return height and width of a JPEG that ``decode_jpeg`` may decode; None of what is for Pillow to decide.

    Raises:
        ValueError: It is cut.
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
        return None  # Pillow refuses the one, and converts the other as it does without simplejpeg
    return height, width


def decode_jpeg(
    data: bytes | memoryview, size: tuple[int, int], *, divisor: int = 1, rows: int | None = None
) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a JPEG, without the GIL; None if it is for Pillow to decide.

    Args:
        data: The file.
        size: What ``jpeg_size`` returned.
        divisor: 1, 2, 4 or 8: decode to a smaller image, of which a pixel is about the mean of so many squared. An
            incomplete pixel at the right or at the bottom counts as one. Only for images of 8 pixels a side or more.
        rows: How many of the image's rows are needed, from the top. There may be more in the result, and they may be
            wrong. Damage in the others is not always noticed; that the file is cut, always.

    Raises:
        ValueError: It is damaged or cut.
    """
    import simplejpeg

    upper_rows = None if rows is None else _decode_upper_rows(data, size, divisor, rows)
    if upper_rows is not None:
        return upper_rows
    # It takes the smallest n/8 that gives at least so many pixels; of fewer than 8 a side, several give as many.
    height, width = (-(-side // divisor) for side in size) if divisor > 1 else (0, 0)
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError as error:
        if _JPEG_DAMAGE.search(str(error)):
            raise
        return None
    return pixels


def _decode_upper_rows(
    data: bytes | memoryview, size: tuple[int, int], divisor: int, rows: int
) -> npt.NDArray[np.uint8] | None:
    """Return the upper rows of a JPEG, decoded as if it ended below them; None if it has to be decoded whole.

    libjpeg then complains of the rest of the file. It says what it complained of first, so that all is well above.
    """
    import simplejpeg

    rows += 2 * divisor  # what smooth upsampling of the colours looks at
    at = _height_place(data) if rows + _LEAST_ROWS_SAVED <= size[0] else None
    if at is None:
        return None
    shortened = np.frombuffer(data, np.uint8).copy()  # without the GIL
    shortened[at : at + 2] = divmod(rows, 256)
    height, width = -(-rows // divisor), -(-size[1] // divisor)
    pixels = np.empty((height, width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(shortened, "RGB", min_height=height, min_width=width, buffer=pixels)
    except ValueError as error:
        return pixels if _JPEG_REST.search(str(error)) else None
    return pixels


def _height_place(data: bytes | memoryview) -> int | None:
    """Return where a JPEG that is decoded from top to bottom has its height; None for others."""
    frames = ((marker, begin) for marker, begin, _ in _jpeg_segments(data) if marker in _JPEG_ALL_FRAMES)
    marker, begin = next(frames, (0, 0))
    return begin + 1 if marker in _JPEG_FRAMES else None


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, from 1 to 8; 1, upright, if it has none.

    Raises:
        Exception: Whatever Pillow raises on damaged EXIF data.
    """
    for marker, begin, end in _jpeg_segments(data):
        if marker == 0xE1 and data[begin : begin + 6] == b"Exif\0\0":
            from PIL import ExifTags, Image

            exif = Image.Exif()
            exif.load(bytes(data[begin:end]))
            orientation: int = exif.get(ExifTags.Base.Orientation, 1)
            return orientation if orientation in range(1, 9) else 1
    return 1


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment before the pixels, and where its content begins and ends."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:  # the pixels
        if data[at + 1] == 0xFF:  # there may be any number of these before a marker
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        yield data[at + 1], at + 4, end
        at = end


def _decode_with_opencv(data: bytes, max_pixels: int) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a PNG or a WebP, in four fifths of Pillow's time; None if it is for Pillow to decide.

    That is where OpenCV is not installed, for animated PNGs, of which the two do not take the same image, and for what
    OpenCV cannot decode: what is wrong with it, Pillow says.
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
    if width * height > max_pixels:
        return None
    try:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        return cast("npt.NDArray[np.uint8] | None", cv2.imdecode(np.frombuffer(data, np.uint8), flags))
    except (ImportError, AttributeError):  # it is not there, or is older than 4.10
        return None
    except cv2.error:
        return None


def rgb_of(image: "Image") -> npt.NDArray[np.uint8]:
    """Return the pixels of a PIL image as ``decode_image`` has them.

    Raises:
        ValueError: Its values cannot be said with 8 bits.
    """
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if sixteen_bits:
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are 32-bit {kind}, expected 8 or 16 bits; store them as npy, or use images='pil'")
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # Pillow warns of the direct way to RGB
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _check_pixels(size: tuple[int, ...], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ValueError(f"it claims {width:,} x {height:,} pixels, the limit is max_pixels={max_pixels:,}")


def _check_png(data: bytes) -> None:
    """Raise unless all chunks are there and the critical ones undamaged; with all rows, Pillow looks at neither."""
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
    """Raise unless all blocks and the trailer are there; Pillow takes a file that is cut after its first image."""
    try:
        at = 13 + _palette_bytes(data[10])
        while (kind := data[at]) != 0x3B:  # the trailer
            # An image has a descriptor of 9 bytes, perhaps a palette, and a byte on its coding; an extension a label.
            at += 1 + (10 + _palette_bytes(data[at + 9]) if kind == 0x2C else 1)
            while length := data[at]:
                at += 1 + length
            at += 1
    except IndexError:
        raise ValueError(f"it is cut: {len(data):,} bytes of a GIF without its end") from None


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height as the first chunk has them."""
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
