"""Frames and compressed streams: standard tools can open what is written, and no claim in what is read is trusted.

A ``.tar.zst`` has one zstd frame per block, each with its content's size and a checksum. After the frames comes a seek
table: a skippable frame in zstd's seekable format, which lists the position of every frame and which decoders ignore. A
``.tar.gz`` is one gzip member. Files that other programs compressed are read whatever their names say: gz, bz2, xz and
zst with any number of members or frames.

Reading a stream takes little more memory than the bytes that the caller asks for. The caller bounds the total number of
bytes that it reads.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shardkit.codecs.decompress import FORMATS, GZIP_WBITS, MAGIC_BYTES, Decompressor, Format, load_zstd, start_zst
from shardkit.errors import ArgumentError, ShardError, TruncatedShardError
from shardkit.storage.base import ByteStream, Storage

MAX_FRAMES = 1 << 20
"""The largest number of frames that a seek table may list: one tebibyte in blocks of 1 MiB."""

_LEVELS = {"none": (0, 0, 0), "zst": (1, 3, 22), "gz": (1, 6, 9)}  # lowest, default, highest
_SUFFIXES = {"none": ".tar", "zst": ".tar.zst", "gz": ".tar.gz"}

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_SKIPPABLE_HEADER = struct.Struct("<II")  # magic, bytes that follow
_SEEK_ENTRY = struct.Struct("<II")  # a frame's compressed size, its content's size
_SEEK_FOOTER = struct.Struct("<IBI")  # number of frames, descriptor, magic
_ENTRIES_HAVE_CHECKSUMS = 0x80
_RESERVED_BITS = 0x7C
_TAIL_BYTES = 1 << 14  # holds the seek table of 2,000 frames, so that most are read with one request

_READ_BYTES = 1 << 17


class Compression(NamedTuple):
    """How shards are compressed.

    Attributes:
        name: ``none``, ``zst`` or ``gz``.
        level: The compression level: 1 to 22 for zst, 1 to 9 for gz, 0 for none.
    """

    name: str
    level: int

    @property
    def suffix(self) -> str:
        """The file name suffix of such shards."""
        return _SUFFIXES[self.name]


def parse_compression(text: str) -> Compression:
    """Parse a compression such as ``"none"``, ``"zst"``, ``"zst:9"``, ``"gz"`` or ``"gz:9"``.

    Raises:
        ArgumentError: It is not a known compression, or there is no such level.

    Example:
        >>> parse_compression("zst"), parse_compression("gz:9").suffix
        (Compression(name='zst', level=3), '.tar.gz')
    """
    name, colon, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name in _LEVELS:
        lowest, default, highest = _LEVELS[name]
        levels = {str(level): level for level in range(lowest, highest + 1)} if highest else {}
        level = levels.get(digits) if colon else default
        if level is not None:
            return Compression(name, level)
    raise ArgumentError(
        f"compression {text!r} is not known; write 'none', 'zst' or 'gz', and if you like a level: "
        "'zst:1' to 'zst:22', 'gz:1' to 'gz:9'"
    )


class Compressor(Protocol):
    """Compresses data piece by piece."""

    def compress(self, data: bytes, /) -> bytes:
        """Add data, and return the compressed bytes that are ready, possibly none."""
        ...

    def flush(self) -> bytes:
        """Return the remaining compressed bytes. Nothing can be added afterwards."""
        ...


def gzip_writer(level: int) -> Compressor:
    """Return a compressor that makes one gzip member, without a file name or a timestamp.

    The same input gives the same bytes, as long as the build of zlib is the same.

    Example:
        >>> import gzip
        >>> writer = gzip_writer(6)
        >>> gzip.decompress(writer.compress(b"a shard") + writer.flush())
        b'a shard'
    """
    return zlib.compressobj(level, zlib.DEFLATED, GZIP_WBITS)


def compress_frame(data: bytes | memoryview, level: int) -> bytes:
    """Return one zstd frame that states its content's size and ends with a checksum. The GIL is released.

    Example:
        >>> decompress_frame(compress_frame(b"a block", 3), 7, url="a.tar.zst", offset=0)
        b'a block'
    """
    zstd = load_zstd()
    options = {zstd.CompressionParameter.compression_level: level, zstd.CompressionParameter.checksum_flag: 1}
    frame: bytes = zstd.ZstdCompressor(options=options).compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return frame


def decompress_frame(data: bytes, size: int, *, url: str, offset: int) -> bytes:
    """Return the content of exactly one zstd frame, exactly ``size`` bytes. The GIL is released.

    A frame that states another size is refused without being decompressed. One that holds more than it states is
    refused as soon as its content exceeds ``size``: no more memory than that is used.

    Args:
        data: The frame.
        size: The required size of its content in bytes.
        url: The shard, for messages.
        offset: Where its content begins in the uncompressed shard, for messages.

    Raises:
        ShardError: It is not one complete, undamaged frame of that size.
    """

    def bad(fault: str) -> ShardError:
        return ShardError(
            f"shard {url}: the zstd frame of the block at byte {offset:,} {fault}; fetch or write the shard again, "
            "or, if it is what it should be, index it again",
            url=url,
            offset=offset,
        )

    zstd = load_zstd()
    try:
        said = zstd.get_frame_info(data).decompressed_size
        if said is not None and said != size:
            raise bad(f"says that it holds {said:,} bytes, expected {size:,}")
        frame = start_zst()
        content = frame.decompress(data, size)
        if not frame.eof and frame.decompress(b"", 1):
            raise bad(f"holds more than the {size:,} bytes expected")
    except zstd.ZstdError as error:
        raise bad(f"is damaged ({error})") from error
    if not frame.eof:
        raise bad(f"is cut after {len(data):,} bytes")
    if frame.unused_data:
        raise bad(f"ends {len(frame.unused_data):,} bytes early, expected {len(data):,}")
    if len(content) != size:
        raise bad(f"holds {len(content):,} bytes, expected {size:,}")
    return content


def seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the seek table that follows the last frame.

    Args:
        frames: For each frame, its compressed size and its content's size, in bytes.

    Raises:
        ArgumentError: A frame has 4 GiB or more, or there are more than ``MAX_FRAMES``.

    Example:
        >>> seek_table([(700, 1000)]).hex()
        '5e2a4d1811000000bc020000e80300000100000000b1ea928f'
    """
    if len(frames) > MAX_FRAMES:
        raise ArgumentError(f"a zst shard can have {MAX_FRAMES:,} blocks, not {len(frames):,}; choose larger blocks")
    try:
        entries = b"".join(_SEEK_ENTRY.pack(stored_size, size) for stored_size, size in frames)
    except struct.error as error:
        raise ArgumentError("a zst shard's blocks must be smaller than 4 GiB; use compression='none'") from error
    header = _SKIPPABLE_HEADER.pack(_SKIPPABLE_MAGIC, len(entries) + _SEEK_FOOTER.size)
    return header + entries + _SEEK_FOOTER.pack(len(frames), 0, _SEEKABLE_MAGIC)


def read_seek_table(storage: Storage, url: str, file_size: int) -> list[tuple[int, int, int]] | None:
    """Return each frame's offset, compressed size and content size; None if there is no seek table.

    The sizes in the table add up to the file's size. Whether a frame really has the listed sizes is known only when it
    is decompressed. Frames without content, such as other programs' skippable frames, are listed too.

    Args:
        storage: Reads the file.
        url: The file.
        file_size: Its size in bytes.

    Raises:
        ShardError: There is a seek table, but it is damaged or describes another file.
    """

    def bad(fault: str) -> ShardError:
        return ShardError(f"shard {url}: its seek table {fault}; fetch the shard again, or pack it again", url=url)

    around = _SKIPPABLE_HEADER.size + _SEEK_FOOTER.size
    if file_size < around:
        return None
    tail = storage.read_range(url, max(0, file_size - _TAIL_BYTES), min(file_size, _TAIL_BYTES))
    count, descriptor, magic = _SEEK_FOOTER.unpack_from(tail, len(tail) - _SEEK_FOOTER.size)
    if magic != _SEEKABLE_MAGIC:
        return None
    step = _SEEK_ENTRY.size + (4 if descriptor & _ENTRIES_HAVE_CHECKSUMS else 0)
    size = around + count * step
    if descriptor & _RESERVED_BITS or count > MAX_FRAMES or size > file_size:
        raise bad(
            f"claims {count:,} frames (descriptor {descriptor:#04x}), which a file of {file_size:,} bytes cannot have"
        )
    table = tail[-size:] if size <= len(tail) else storage.read_range(url, file_size - size, size)
    if _SKIPPABLE_HEADER.unpack_from(table) != (_SKIPPABLE_MAGIC, size - _SKIPPABLE_HEADER.size):
        raise bad(f"does not begin {size:,} bytes before its end, where {count:,} frames would put it")
    frames = []
    stored_offset = 0
    for at in range(_SKIPPABLE_HEADER.size, size - _SEEK_FOOTER.size, step):
        stored_size, content_size = _SEEK_ENTRY.unpack_from(table, at)
        frames.append((stored_offset, stored_size, content_size))
        stored_offset += stored_size
    if stored_offset != file_size - size:
        raise bad(f"describes {stored_offset:,} bytes of frames, expected the {file_size - size:,} that are before it")
    return frames


class DecompressedStream(ByteStream, Protocol):
    """A ``ByteStream`` that knows how its source is compressed. It can skip without reading only if it is uncompressed.

    Attributes:
        compression: ``none``, ``zst``, ``gz``, ``bz2`` or ``xz``.
    """

    compression: str


def open_decompressed(stream: ByteStream) -> DecompressedStream:
    """Return a stream of another's content, decompressed if its first bytes, not its name, show a compressed format.

    Consecutive members or frames, as ``cat`` and parallel compressors produce them, are read as one stream; anything
    else after them is an error. Uncompressed data and an empty stream are returned unchanged. Closing the result
    closes ``stream``.

    Args:
        stream: Positioned at its first byte.

    Raises:
        TruncatedShardError: From here or from ``read``: the stream ends inside a member or a frame. An end between two
            of them cannot be detected here; the tar reader detects it by the missing end-of-archive mark.
        ShardError: From ``read``: the stream is damaged, demands too much memory, or is followed by something else.
            All data before the fault has been returned, except for up to one read's length.

    Example:
        >>> from io import BytesIO
        >>> from shardkit.storage.local import LocalStream
        >>> stream = open_decompressed(LocalStream(BytesIO(compress_frame(b"a shard", 3)), "a.tar", None))
        >>> stream.compression, stream.read(100)
        ('zst', b'a shard')
    """
    head = stream.read(MAGIC_BYTES)
    for form in FORMATS:
        if head.startswith(form.magics):
            return _Decompressed(stream, head, form)
        if head and len(head) < MAGIC_BYTES and any(magic.startswith(head) for magic in form.magics):
            raise _cut(stream.url, form.name, len(head), 0)
    return _Plain(stream, head)


class _Plain:
    """An uncompressed stream whose first bytes have already been read."""

    def __init__(self, stream: ByteStream, head: bytes) -> None:
        self.url = stream.url
        self.size = stream.size
        self.compression = "none"
        self._stream = stream
        self._head = head

    def read(self, n: int, /) -> bytes:
        if not self._head:
            return self._stream.read(n)
        head, self._head = self._head[:n], self._head[n:]
        return head + self._stream.read(n - len(head)) if n > len(head) else head

    def skip(self, n: int, /) -> None:
        in_head = min(n, len(self._head))
        self._head = self._head[in_head:]
        self._stream.skip(n - in_head)

    def close(self) -> None:
        self._stream.close()


class _Decompressed:
    """The content of consecutive members or frames."""

    def __init__(self, stream: ByteStream, head: bytes, form: Format) -> None:
        self.url = stream.url
        self.size: int | None = None
        self.compression = form.name
        self._stream = stream
        self._format = form
        self._member: Decompressor | None = None
        self._input = head  # read from the stream, not yet given to the member
        self._stored = len(head)  # bytes read from the stream
        self._offset = 0  # bytes of content returned
        self._error: ShardError | None = None

    def read(self, n: int, /) -> bytes:
        pieces: list[bytes] = []
        while n > 0 and not self._error:
            try:
                piece = self._read_some(n)
            except ShardError as error:
                self._error = error  # raised only when reached: the data before it may complete a sample
                break
            if not piece:
                break
            pieces.append(piece)
            n -= len(piece)
            self._offset += len(piece)
        if self._error and not pieces:
            raise self._error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, n: int, /) -> None:
        while n > 0 and (piece := self.read(min(n, _READ_BYTES))):
            n -= len(piece)

    def close(self) -> None:
        self._stream.close()

    def _read_some(self, n: int) -> bytes:
        """Return 1 to ``n`` bytes, or no bytes at the end."""
        while member := self._member or self._start_member():
            data = b""
            if member.needs_input:
                if not self._input and not self._fill():
                    raise _cut(self.url, self.compression, self._stored, self._offset)
                data, self._input = self._input, b""
            try:
                content = member.decompress(data, n)
            except MemoryError:
                raise
            except Exception as error:  # each format has its own exceptions, and only damage makes it raise one
                raise self._bad(f"is damaged ({error}), fetch or write it again") from error
            if member.eof:
                self._member = None
                self._input = member.unused_data
            if content:
                return content
        return b""

    def _start_member(self) -> Decompressor | None:
        """Return a decompressor for the next member, or None at the end of the stream."""
        while True:
            if self._format.zeros_may_follow:
                self._input = self._input.lstrip(b"\0")
            if len(self._input) >= MAGIC_BYTES or not self._fill():
                break
        if not self._input:
            return None
        if not self._input.startswith(self._format.magics):
            if any(magic.startswith(self._input) for magic in self._format.magics):
                raise _cut(self.url, self.compression, self._stored, self._offset)
            raise self._bad(f"what follows is not {self.compression}, cut it off or fetch or write the shard again")
        self._member = self._format.start()
        return self._member

    def _fill(self) -> bool:
        data = self._stream.read(_READ_BYTES)
        self._stored += len(data)
        self._input += data
        return bool(data)

    def _bad(self, fault: str) -> ShardError:
        place = f"byte {self._stored - len(self._input):,} of the {self.compression} file"
        return ShardError(f"shard {self.url}: at or before {place}, {fault}", url=self.url, offset=self._offset)


def _cut(url: str, name: str, stored: int, offset: int) -> TruncatedShardError:
    return TruncatedShardError(
        f"shard {url}: ends at byte {stored:,} in the middle of its {name} data; fetch or write it again",
        url=url,
        offset=offset,
    )
