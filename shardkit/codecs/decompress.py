"""The compressed formats that can be read: how each begins, and a decompressor for one member or frame of it.

No claim in compressed data is trusted: output is produced in steps whose size the caller sets, and the window that the
data may demand is bounded by ``MAX_WINDOW_BYTES``.
"""

import sys
import zlib
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol

from shardkit.errors import CodecError

MAX_WINDOW_BYTES = 1 << 27
"""The most memory that compressed data may demand: 128 MiB, which ``zstd -d`` allows; ``xz -9`` needs half of it."""

GZIP_WBITS = 31
"""Makes zlib write and expect gzip's header and trailer instead of its own."""


def load_zstd() -> ModuleType:
    """Return the standard library's ``compression.zstd``, or its backport before Python 3.14."""
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


class Decompressor(Protocol):
    """Decompresses one member or frame, with the interface of the standard library's ``bz2``, ``lzma`` and ``zstd``."""

    @property
    def eof(self) -> bool:
        """Whether the member has ended and all of its content has been returned."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether ``decompress`` can do nothing without more data."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The data that was given beyond the end of the member."""
        ...

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        """Return up to ``max_length`` bytes; further output is kept for the next call."""
        ...


class _GzipDecompressor:
    """zlib's decompressor with the interface of the others, which keep their unused input themselves."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(GZIP_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def start_zst() -> Decompressor:
    """Return a decompressor for one zstd frame that refuses larger windows than ``MAX_WINDOW_BYTES``."""
    zstd = load_zstd()
    options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_BYTES.bit_length() - 1}
    decompressor: Decompressor = zstd.ZstdDecompressor(options=options)
    return decompressor


def _start_bz2() -> Decompressor:
    import bz2  # some Pythons are built without it

    return bz2.BZ2Decompressor()


def _start_xz() -> Decompressor:
    import lzma  # some Pythons are built without it

    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW_BYTES)


class Format(NamedTuple):
    """A compressed format.

    Attributes:
        name: ``zst``, ``gz``, ``bz2`` or ``xz``.
        magics: The byte sequences that a member can begin with.
        start: Returns a decompressor for one member.
        zeros_may_follow: Whether zeros after a member are padding, as gzip(1) and the xz specification define.
    """

    name: str
    magics: tuple[bytes, ...]
    start: Callable[[], Decompressor]
    zeros_may_follow: bool = False


_ZST_MAGICS = (
    b"\x28\xb5\x2f\xfd",
    *(bytes((first, 0x2A, 0x4D, 0x18)) for first in range(0x50, 0x60)),
)  # and skippable frames
_BZ2_MAGICS = tuple(
    b"BZh%d%b" % (level, block) for level in range(1, 10) for block in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
)

FORMATS = (
    Format("zst", _ZST_MAGICS, start_zst),
    Format("gz", (b"\x1f\x8b\x08",), _GzipDecompressor, zeros_may_follow=True),
    Format("bz2", _BZ2_MAGICS, _start_bz2),
    Format("xz", (b"\xfd7zXZ\x00",), _start_xz, zeros_may_follow=True),
)
MAGIC_BYTES = max(len(magic) for form in FORMATS for magic in form.magics)


def decompress(data: bytes, name: str, max_bytes: int) -> bytes:
    """Return the content of compressed data, with all of its members or frames.

    Args:
        data: A whole file of that format.
        name: ``"gz"``, ``"zst"``, ``"bz2"`` or ``"xz"``.
        max_bytes: The largest permitted size of its content.

    Raises:
        CodecError: It is damaged, cut or empty, something else follows, or it holds more than ``max_bytes``; no more
            memory than that was used.

    Example:
        >>> import gzip
        >>> decompress(gzip.compress(b"a caption"), "gz", 1000)
        b'a caption'
    """
    start = next(form.start for form in FORMATS if form.name == name)
    pieces: list[bytes] = []
    room = max_bytes
    while data or not pieces:
        member = start()
        try:
            pieces.append(member.decompress(data, room + 1))
        except MemoryError:
            raise
        except Exception as error:  # each format has its own exceptions, and only damage makes it raise one
            raise CodecError(f"it is damaged or not {name} data ({error})") from error
        room -= len(pieces[-1])
        if room < 0:
            raise CodecError(f"it holds more than the limit, max_decompressed_bytes={max_bytes:,}")
        if not member.eof:
            raise CodecError(f"it ends in the middle of its {name} data")
        data = member.unused_data
    return b"".join(pieces)
