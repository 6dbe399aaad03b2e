"""JPEGs of every kind that decoders distinguish, small enough to be damaged at every place."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from simplejpeg import encode_jpeg

HEIGHT, WIDTH = 200, 160
_RNG = np.random.default_rng(0)
_SMOOTH = Image.fromarray(_RNG.integers(0, 256, (12, 10, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
PICTURE = Image.fromarray(np.asarray(_SMOOTH) ^ _RNG.integers(0, 32, (HEIGHT, WIDTH, 3), dtype=np.uint8))
# Made by "jpegtran -arithmetic", also with -progressive and -restart; Pillow and simplejpeg only read such files.
ARITHMETIC = Path(__file__).parents[1] / "data" / "jpeg"


def saved(image, **options):
    """Return the bytes of a JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60, **options)
    return file.getvalue()


def segment(marker, content):
    """Return a segment of a JPEG."""
    return b"\xff" + bytes([marker]) + struct.pack(">H", 2 + len(content)) + content


def colours_one_after_the_other(across, down, **options):
    """Return a JPEG of three scans, one per colour, of which the second and third have fewer pixels."""
    sides = [(WIDTH, HEIGHT), *[(-(-WIDTH // across), -(-HEIGHT // down))] * 2]
    channels = [channel.resize(size) for channel, size in zip(PICTURE.convert("YCbCr").split(), sides, strict=True)]
    files = [saved(channel, **options) for channel in channels]
    frame, scan = (files[0].index(marker) for marker in (b"\xff\xc0", b"\xff\xda"))
    factors = bytes([1, across << 4 | down, 0, 2, 0x11, 0, 3, 0x11, 0])
    data = files[0][:frame] + segment(0xC0, struct.pack(">BHHB", 8, HEIGHT, WIDTH, 3) + factors)
    data += files[0][frame + 13 : scan]  # the tables, which are the same for all
    for number, file in enumerate(files, 1):
        data += b"".join(
            segment(0xDD, file[at + 4 : at + 6]) for at in [file.find(b"\xff\xdd")] if at > 0
        )  # the restart interval, in blocks of the scan
        data += segment(0xDA, bytes([1, number, 0, 0, 63, 0])) + file[file.index(b"\xff\xda") + 10 : -2]
    return data + b"\xff\xd9"


def of_scans(number, *, height=16, width=16, before=b""):
    """Return a valid grey, progressive JPEG with the given number of scans, up to 896."""
    orders = [(k, k, high, high - 1) for k in range(64) for high in range(14, 0, -1)]
    steps = [(first, last, 0 if high == 14 else high, low) for first, last, high, low in orders][:number]
    blocks = -(-height // 8) * -(-width // 8)
    zeros = bytes(blocks // 8) + (bytes([0xFF >> blocks % 8]) if blocks % 8 else b"")
    table = bytes([1, *[0] * 15, 0])  # a table with one code, a single bit
    data = b"\xff\xd8" + before + segment(0xDB, bytes([0, *[1] * 64]))
    data += segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + bytes([1, 0x11, 0]))
    data += segment(0xC4, b"\0" + table) + segment(0xC4, b"\x10" + table)
    for first, last, high, low in steps:
        data += segment(0xDA, bytes([1, 1, 0, first, last, high << 4 | low])) + zeros
    return data + b"\xff\xd9"


def _with_thumbnail(data):
    thumbnail = saved(PICTURE.resize((40, 50)), restart_marker_rows=1)
    return data[:2] + segment(0xE1, b"Exif\0\0" + thumbnail) + segment(0xFE, b"\xff\xda\xff\xd9" * 5) + data[2:]


def _with_garbage(data, at):
    return data[:at] + b"\1\2\3" + data[at:]


def _kinds():
    restarts = {"": {}, " restart rows": {"restart_marker_rows": 1}, " restart blocks": {"restart_marker_blocks": 3}}
    for restart, options in restarts.items():
        for name, subsampling in (("4:4:4", 0), ("4:2:2", 1), ("4:2:0", 2)):
            yield f"{name}{restart}", saved(PICTURE, subsampling=subsampling, **options)
            yield f"progressive {name}{restart}", saved(PICTURE, subsampling=subsampling, progressive=True, **options)
        yield f"grey{restart}", saved(PICTURE.convert("L"), **options)
        for name, across, down in (("4:4:4", 1, 1), ("4:2:0", 2, 2), ("4:4:0", 1, 2), ("4:1:1", 4, 1)):
            yield f"three scans {name}{restart}", colours_one_after_the_other(across, down, **options)
    for name in ("440", "411"):
        yield name, encode_jpeg(np.ascontiguousarray(PICTURE), quality=60, colorsubsampling=name)
    for path in sorted(ARITHMETIC.glob("*.jpg")):
        yield path.stem, path.read_bytes()
    for kind in ({}, {"restart_marker_rows": 1}, {"progressive": True}):
        data = saved(PICTURE, **kind)
        yield f"thumbnail {kind}", _with_thumbnail(data)
        yield f"garbage before the end {kind}", _with_garbage(data, len(data) - 2)
        yield f"garbage before the tables {kind}", _with_garbage(data, 20)
        yield f"garbage before the last scan {kind}", _with_garbage(data, data.rindex(b"\xff\xda"))
        yield f"filled {kind}", b"\xff\xd8\xff\xff" + data[2:]
        yield f"two images {kind}", data * 2
    yield "cmyk", saved(PICTURE.convert("CMYK"))


JPEGS = dict(_kinds())
"""JPEGs of ``HEIGHT`` and ``WIDTH`` by kind."""
