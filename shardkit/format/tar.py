"""Members <-> bytes: reading tar strictly and writing it deterministically.

The reader accepts the formats that tar programs write (v7, ustar, GNU long names, PAX, base-256 sizes) and verifies
them. It verifies every header's checksum and bounds every size before use. An archive is whole only if it has its
end-of-archive mark (two blocks of zeros) and only zeros follow. Anything else is an error that gives its offset. A
member is yielded whole or not at all. A tar has no checksums of members' data or of the bodies of PAX and long-name
headers, so damage in them cannot be found here.

The writer produces ustar with integer times and a fixed owner and mode, so that the same members give the same bytes.
It writes a PAX header only where ustar cannot hold a name or a size.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

from shardkit.errors import ShardError, TruncatedShardError
from shardkit.format.tar_header import (
    BLOCK_BYTES,
    COMMON_FIELDS,
    END_OF_ARCHIVE,
    EXTENSION_TYPES,
    MAX_EXTENSION_BYTES,
    REGULAR_TYPES,
    SKIPPED_TYPES,
    UNREADABLE_TYPES,
    expected_adler32,
    has_valid_checksum,
    member_header,
    member_size,
    padding,
    read_name,
    read_number,
    read_records,
    unreadable_record,
)
from shardkit.storage.base import ByteStream

__all__ = ["END_OF_ARCHIVE", "MAX_MEMBER_BYTES", "Member", "member_header", "member_size", "padding", "read_members"]

MAX_MEMBER_BYTES = 4 << 30
"""The largest member that is read by default."""
MAX_TRAILING_BYTES = 64 << 20
"""The most zeros after the end-of-archive mark, in bytes. Tar programs pad their last record, by default to 10 KiB, but
a compressed stream could continue with zeros forever."""

_MIN_READ = 4 << 10
_MAX_READ = (
    512 << 10
)  # the fastest of 64 KiB to 4 MiB on a memory file system: the data is still in the CPU's cache when it is copied
_ZEROS = bytes(BLOCK_BYTES)
_NUL = b"\0"


class Member(NamedTuple):
    """One file of a tar.

    Attributes:
        name: Its name, UTF-8 with surrogateescape.
        header_offset: The offset of its first header, extended headers included, in bytes from the archive's start.
        data_offset: The offset of its data.
        size: The size of its data in bytes.
        data: The data; None if the caller did not want it.
    """

    name: str
    header_offset: int
    data_offset: int
    size: int
    data: bytes | None


def read_members(
    stream: ByteStream,
    *,
    wanted: Callable[[str], bool] | None = None,
    max_member_bytes: int = MAX_MEMBER_BYTES,
    skipped: Callable[[str, str], None] | None = None,
) -> Iterator[Member]:
    """Yield the regular files of a tar, whole and in order, and raise unless the archive is whole up to its end.

    Damage is found when it is reached: an archive is known to be whole only when the iterator has ended by itself. The
    stream is not closed. Up to 512 KiB beyond the current member are held in memory, and a large member is briefly held
    twice while it is assembled.

    Args:
        stream: An uncompressed tar, from its first byte.
        wanted: Returns for a member's name whether its data is to be read. Large unwanted data is skipped in the
            stream, and is not read from local files; damage in it is not found.
        max_member_bytes: The largest member that is accepted, wanted or not.
        skipped: Called with the name and the kind of every directory, link, device, FIFO and volume label, which are
            not yielded.

    Yields:
        The members; ``data`` is None if it was not wanted.

    Raises:
        TruncatedShardError: The stream ends before the end of the end-of-archive mark.
        ShardError: A header, a size or a name is wrong, there are bytes between or after the members that are not part
            of the archive, or a member is of a kind that cannot be read here (sparse, multi-volume, unknown). The
            members yielded before are whole.

    Example:
        >>> from types import SimpleNamespace
        >>> from io import BytesIO
        >>> shard = BytesIO(member_header("0001.cls", 1) + b"7" + bytes(padding(1)) + END_OF_ARCHIVE)
        >>> stream = SimpleNamespace(url="train.tar", size=None, read=shard.read)
        >>> [(member.name, member.data) for member in read_members(stream)]
        [('0001.cls', b'7')]
    """
    archive = _Archive(stream, wanted, max_member_bytes, skipped)
    window = archive.window
    common_fields, new = COMMON_FIELDS.unpack_from, tuple.__new__
    while True:
        # This loop handles the common case, a plain header, in about 1.5 microseconds. It accepts only headers that are
        # certainly valid, and leaves all others, errors included, to the archive.
        data, at, start = window.data, window.at, window.start
        end = len(data)
        last_header = -1 if archive.global_records else end - BLOCK_BYTES
        while at <= last_header:
            digits, terminator, stored, kind, prefix = common_fields(data, at)
            begin = at + BLOCK_BYTES
            header = data[at:begin]
            name_end = header.find(0)
            try:
                size = int(digits, 8)
                name = header[:name_end].decode()
                is_intact = adler32(header) & 0xFFFF == expected_adler32(stored)
            except ValueError:
                break
            if (
                not is_intact
                or kind != 0x30  # "0", a regular file
                or prefix
                or not digits.isdigit()  # int() also takes signs, spaces and underscores
                or terminator & ~0x20  # neither a NUL nor a space
                or not 0 < name_end <= 100
                or size > max_member_bytes
            ):
                break
            following = begin + size + -size % BLOCK_BYTES
            if following <= end:
                content = data[begin : begin + size] if wanted is None or wanted(name) else None
                member = new(Member, (name, start + at, start + begin, size, content))  # half the time of Member(...)
                at = following
            else:
                window.at = begin
                member = archive.read_member(name, start + at, size)
                data, at, start = window.data, window.at, window.start
                end = len(data)
                last_header = end - BLOCK_BYTES
            yield member
        window.at = at
        found = archive.next_member()
        if found is None:
            return
        yield found


class _Window:
    """The part of a stream that is in memory. Reads grow during sequential reading, and are small after a skip."""

    def __init__(self, stream: ByteStream) -> None:
        self.data = b""
        #: the first byte of data that is not used yet; beyond its end if the rest of a block is not read yet
        self.at = 0
        #: the offset of data in the stream
        self.start = 0
        self._stream = stream
        self._read_bytes = _MIN_READ

    @property
    def offset(self) -> int:
        return self.start + self.at

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the stream's end, and go to the beginning of the next block."""
        end = self.at + size
        if end <= len(self.data):
            part = self.data[self.at : end]
            self.at = end + padding(size)
            return part
        parts = [self.data[self.at :]]
        missing = size - len(parts[0])
        self.at += len(parts[0])
        while missing:
            self.start += len(self.data)
            self.at -= len(self.data)
            # A size is only a claim until the data is read, so no read is much larger than the data read before it.
            self.data = self._stream.read(max(self._read_bytes, min(missing, _MAX_READ)))
            self._read_bytes = min(2 * self._read_bytes, _MAX_READ)
            if not self.data:
                self.at = 0  # so that the offset is the stream's end
                return b"".join(parts)
            part = self.data[self.at : self.at + missing]
            self.at += len(part)
            missing -= len(part)
            parts.append(part)
        self.at += padding(size)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Go to the beginning of the block after the next ``size`` bytes, without reading what is not in memory."""
        self.at += size + padding(size)
        beyond = self.at - len(self.data)
        if beyond > 0:
            self._stream.skip(beyond)
            self.start, self.data, self.at = self.offset, b"", 0
            self._read_bytes = _MIN_READ


class _Archive:
    """A tar being read: everything except the common case, and all errors."""

    def __init__(
        self,
        stream: ByteStream,
        wanted: Callable[[str], bool] | None,
        max_member_bytes: int,
        skipped: Callable[[str, str], None] | None,
    ) -> None:
        self.window = _Window(stream)
        self.global_records: dict[bytes, bytes] = {}  # for all later members
        self._stream = stream
        self._wanted = wanted
        self._max_member_bytes = max_member_bytes
        self._skipped = skipped

    def next_member(self) -> Member | None:
        """Return the next regular member, or None after the end of the archive."""
        begin = self.window.offset
        extensions: dict[str, dict[bytes, bytes]] = {}  # for the next member
        while True:
            offset = self.window.offset
            header = self._take(BLOCK_BYTES, "a header")
            if header == _ZEROS:
                if extensions:
                    raise self._error(begin, "has an extended header without a member; write it again")
                self._check_end()
                return None
            if not has_valid_checksum(header, header[148:156]):
                raise self._error(offset, "has no tar header, or one whose checksum is wrong; fetch or write it again")
            kind = chr(header[156])
            if kind in EXTENSION_TYPES:
                if kind in extensions:
                    raise self._error(offset, f"has a second header of type {kind!r} for one member; write it again")
                extensions[kind] = self._read_extension(header, offset)
                self.global_records |= extensions.pop("g", {})
                continue
            records = self.global_records
            if extensions:
                records = records | extensions.get("L", {}) | extensions.get("x", {})
            name = self._name(header, records, offset)
            if kind == "\0" and name.endswith("/"):
                kind = "5"  # v7 marked directories by a slash
            if kind in SKIPPED_TYPES:
                if self._skipped is not None:
                    self._skipped(name, SKIPPED_TYPES[kind])
                begin = self.window.offset
                extensions = {}
                continue
            if kind not in REGULAR_TYPES:
                unknown = f"of the unknown type {kind!r}; write it again with tar --format=ustar"
                raise self._error(offset, f"has a member {name!r} that is {UNREADABLE_TYPES.get(kind, unknown)}")
            return self.read_member(name, begin, self._size(name, header, records, offset))

    def read_member(self, name: str, begin: int, size: int) -> Member:
        data_offset = self.window.offset
        end = data_offset + size
        data = None
        held = end
        if self._stream.size is not None and end > self._stream.size:
            held = self._stream.size
        elif self._wanted is None or self._wanted(name):
            data = self.window.take(size)
            held = data_offset + len(data)
        else:
            self.window.skip(size)
        if held < end:
            raise self._truncated(held, f"the data of member {name!r} up to byte {end:,}")
        return Member(name, begin, data_offset, size, data)

    def _read_extension(self, header: bytes, offset: int) -> dict[bytes, bytes]:
        """Return the records ``path`` and ``size`` of an extended header; nothing else in it matters here."""
        size = read_number(header[124:136])
        if size is None or size > MAX_EXTENSION_BYTES:
            says = f"{header[124:136]!r} bytes" if size is None else f"{size:,} bytes"
            expected = f"expected at most {MAX_EXTENSION_BYTES:,}; fetch or write it again"
            raise self._error(offset, f"has an extended header of {says}, {expected}")
        body = self._take(size, "the body of an extended header")
        if header[156:157] == b"K":
            return {}  # links are skipped
        if header[156:157] == b"L":
            return {b"path": body.rstrip(_NUL) or _NUL}  # an empty name becomes a NUL, which is refused too
        records, end = read_records(body)
        if end < len(body):
            problem = "has a malformed PAX record, expected 'length keyword=value'; fetch or write it again"
            raise self._error(offset + BLOCK_BYTES + end, problem)
        for keyword, value in records:
            if problem := unreadable_record(keyword, value):
                raise self._error(offset, f"has a member that {problem}")
        return {keyword: value for keyword, value in records if keyword in (b"path", b"size")}

    def _name(self, header: bytes, records: dict[bytes, bytes], offset: int) -> str:
        name = records.get(b"path") or read_name(header)  # an empty record cancels an earlier one
        if not name or _NUL in name:
            raise self._error(offset, f"has a member whose name is {name!r}, expected one without NULs; write it again")
        return name.decode("utf-8", "surrogateescape")

    def _size(self, name: str, header: bytes, records: dict[bytes, bytes], offset: int) -> int:
        text = records.get(b"size")
        if text:
            size = int(text) if text.isdigit() and len(text) <= 20 else None
        else:
            text = header[124:136]
            size = read_number(text)
        if size is None:
            problem = f"has a member {name!r} of {text!r} bytes, expected a number; fetch or write it again"
            raise self._error(offset, problem)
        if size > self._max_member_bytes:
            problem = f"has a member {name!r} of {size:,} bytes, expected at most {self._max_member_bytes:,}"
            raise self._error(offset, f"{problem}; fetch or write it again, in smaller members")
        return size

    def _check_end(self) -> None:
        """Verify the second block of the end-of-archive mark, and that nothing but zeros follows."""
        offset = self.window.offset
        if self._take(BLOCK_BYTES, "the second zero block of the end-of-archive mark") != _ZEROS:
            problem = "continues after a single block of zeros, expected two and the end; fetch or write it again"
            raise self._error(offset, problem)
        left = MAX_TRAILING_BYTES
        while left >= 0 and (zeros := self.window.take(_MIN_READ)):
            left -= len(zeros)
            if something := zeros.lstrip(_NUL):
                problem = (
                    "continues after its end-of-archive mark, expected zeros; join archives with tar --concatenate"
                )
                raise self._error(self.window.offset - len(something), problem)
        if left < 0:
            problem = f"still has zeros, expected at most {MAX_TRAILING_BYTES:,} of them after the end; cut them off"
            raise self._error(self.window.offset, problem)

    def _take(self, size: int, expected: str) -> bytes:
        data = self.window.take(size)
        if len(data) < size:
            raise self._truncated(self.window.offset, expected)
        return data

    def _truncated(self, offset: int, expected: str) -> TruncatedShardError:
        # After a skip in a stream of unknown size, the stream's end can be before the offset.
        if self._stream.size is not None:
            offset = min(offset, self._stream.size)
        ends = f"ends at or before byte {offset:,}" if offset else "is empty"
        message = f"shard {self._stream.url}: {ends}, expected {expected}; fetch or write it again"
        return TruncatedShardError(message, url=self._stream.url, offset=offset)

    def _error(self, offset: int, problem: str) -> ShardError:
        url = self._stream.url
        return ShardError(f"shard {url}: at byte {offset:,} it {problem}", url=url, offset=offset)
