"""PNG, TIFF and PNM files of every kind that can hold an array without loss, written without any library."""

import struct
import zlib

import numpy as np


def chunk(kind, content):
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _packed(rows, bits):
    """Return rows of numbers as bytes, with the most significant bit first; each row starts at a byte boundary."""
    if bits >= 8:
        flat = rows.reshape(len(rows), -1).astype(f">u{bits // 8}")
        return np.ascontiguousarray(flat).view(np.uint8).reshape(len(rows), -1)
    each = (rows[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(each.reshape(len(rows), -1).astype(np.uint8), axis=1)


def _paeth(left, above, corner):
    estimate = left + above - corner
    distances = [abs(estimate - one) for one in (left, above, corner)]
    return np.select([distances[0] <= np.minimum(*distances[1:]), distances[1] <= distances[2]], [left, above], corner)


def _filtered(rows, step, kinds):
    """Return the bytes of rows, each filtered in one of the five ways of PNG."""
    padded = np.pad(rows.astype(np.int64), ((1, 0), (step, 0)))
    here, above = padded[1:, step:], padded[:-1, step:]
    left, corner = padded[1:, : -step or None], padded[:-1, : -step or None]
    made = [here, here - left, here - above, here - (left + above) // 2, here - _paeth(left, above, corner)]
    lines = []
    for number in range(len(rows)):
        kind = kinds[number % len(kinds)]
        lines.append(bytes([kind]) + (made[kind][number] % 256).astype(np.uint8).tobytes())
    return b"".join(lines)


def png_of(pixels, colour, bits, *, filters=(0,), interlaced=False, extra=b""):
    """Return a PNG.

    Args:
        pixels: (height, width) or (height, width, channels), numbers of ``bits`` bits.
        colour: Its colour type: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha.
        bits: The number of bits of each number.
        filters: The filters of the rows, in turns.
        interlaced: Whether it is stored in seven passes.
        extra: Chunks before the pixels.
    """
    height, width = pixels.shape[:2]
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    step = max(1, channels * bits // 8)
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [pixels[top::down, left::across] for top, left, down, across in passes]
    data = b"".join(_filtered(_packed(part, bits), step, filters) for part in parts if part.size)
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 and bits == 8 else b""
    if colour == 3 and bits < 8:
        palette = chunk(b"PLTE", bytes(3 * (255 - i) % 256 for i in range(3 << bits)))
    chunks = chunk(b"IHDR", header) + palette + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff_of(pixels, photometric=1, *, bits=None, order="<", deflated=False, planar=False, extra=None):
    """Return a TIFF with one strip, or with one for each channel.

    Args:
        pixels: (height, width) or (height, width, channels), of any type of numbers.
        photometric: 1 for grey, 2 for RGB, 3 for a palette, 5 for CMYK.
        bits: The number of bits of each number, if it is less than its type has.
        order: The byte order, "<" or ">".
        deflated: Whether it is compressed.
        planar: Whether the channels are stored one after the other.
        extra: The meaning of the last channel if it is not a colour: 0 unspecified, 1 premultiplied alpha, 2 alpha.
    """
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    bits_each = bits or 8 * pixels.dtype.itemsize
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    planes = np.moveaxis(pixels, 2, 0) if planar else [pixels]
    strips = [
        _packed(plane, bits).tobytes() if bits else plane.astype(plane.dtype.newbyteorder(order)).tobytes()
        for plane in planes
    ]
    if deflated:
        strips = [zlib.compress(strip) for strip in strips]
    entries = {256: [width], 257: [height], 258: [bits_each] * channels, 259: [8 if deflated else 1]}
    entries |= {262: [photometric], 273: [0] * len(strips), 277: [channels], 278: [height]}
    entries |= {279: [len(strip) for strip in strips], 284: [2 if planar else 1]}
    if photometric == 3:
        entries[320] = [257 * (255 - i) for i in range(1 << bits_each)] * 3
    if extra is not None:
        entries[338] = [extra]
    entries[339] = [kind] * channels
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    start = 8 + 2 + 12 * len(entries) + 4  # of the values that do not fit into the entries; the strips follow
    at = start + sum(4 * len(values) for values in entries.values() if len(values) > 1)
    for number, strip in enumerate(strips):
        entries[273][number] = at
        at += len(strip)
    directory, values_behind = struct.pack(f"{order}H", len(entries)), b""
    for tag, values in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            packed, values_behind = struct.pack(f"{order}I", start + len(values_behind)), values_behind + packed
        directory += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed
    head = magic + struct.pack(f"{order}I", 8) + directory + bytes(4) + values_behind
    return head + b"".join(strips)


def pnm_of(pixels, largest, *, is_plain=False, comment=b""):
    """Return a PGM or a PPM.

    Args:
        pixels: (height, width) or (height, width, 3), numbers up to ``largest``.
        largest: The number for white, from 1 to 65535.
        is_plain: Whether numbers are written as text.
        comment: The separator between the numbers of the header, and of the text.
    """
    magic = {(2, False): b"P5", (3, False): b"P6", (2, True): b"P2", (3, True): b"P3"}[pixels.ndim, is_plain]
    header = b"%s\n%s%d %d\n%s%d\n" % (magic, comment, pixels.shape[1], pixels.shape[0], comment, largest)
    if is_plain:
        return header + comment.join(b"%d\n" % number for number in pixels.ravel().tolist())
    return header + pixels.astype(">u2" if largest > 255 else np.uint8).tobytes()
