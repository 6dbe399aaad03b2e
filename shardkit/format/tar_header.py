"""Headers of a tar <-> their fields: the 512-byte block of v7, ustar and GNU tar, and the records of PAX.

This module reads and writes single headers; ``tar`` uses it to read archives. It reports invalid fields by its return
values, because only the caller knows their offset.
"""

import re
from functools import lru_cache
from struct import Struct
from zlib import adler32

from shardkit.errors import ArgumentError

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
"""The end of every tar: two blocks of zeros."""
MAX_EXTENSION_BYTES = 1 << 20
"""The largest body of a PAX or long-name header that is read; real ones have a few hundred bytes."""
MAX_NAME_BYTES = MAX_EXTENSION_BYTES - 100
"""The longest name that is written, so that the reader accepts it."""

REGULAR_TYPES = "07\0"
EXTENSION_TYPES = "xgLK"
"""Headers whose body is about later members: PAX for the next (x) or all (g); GNU long name (L) or link target (K)."""
SKIPPED_TYPES = {
    "1": "hard link",
    "2": "symbolic link",
    "3": "character device",
    "4": "block device",
    "5": "directory",
    "6": "FIFO",
    "V": "volume label",
}
"""Members without data, whatever their size field says."""
UNREADABLE_TYPES = {
    "D": "a folder of an incremental archive; write the archive again without tar's --listed-incremental",
    "S": "a GNU sparse file; store it whole, without tar's --sparse",
    "M": "the rest of a file from an earlier volume; write the archive again without tar's --multi-volume",
}
"""Members whose header is not followed by the file's data."""

COMMON_FIELDS = Struct("124x 11s B 12x 8s B 188x B 166x")
"""The fields of a common header: the digits of the size, the byte that ends them, the checksum, the type and the first
byte of the prefix."""

_MAX_USTAR_SIZE = 0o77777777777  # one byte less than 8 GiB
# The values of hdrcharset that do not change a name's meaning: UTF-8, or bytes.
_CHARACTER_SETS = (b"", b"BINARY", b"ISO-IR 10646 2000 UTF-8")
_PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
_NUL = b"\0"


def read_number(field: bytes) -> int | None:
    r"""Return the number in a header's field; None if it is not a number, or is negative.

    It is in octal digits or, as GNU tar writes large ones, in base-256.

    Example:
        >>> read_number(b"00000000644\0"), read_number(b"\x80" + bytes(9) + b"\2\0"), read_number(b"-0000000644\0")
        (420, 512, None)
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(_NUL)[0].strip(b" ")
    try:
        return int(digits, 8) if digits.isdigit() else None  # int() alone would take signs and underscores too
    except ValueError:
        return None


def read_name(header: bytes) -> bytes:
    """Return the name in the header itself, with its ustar prefix."""
    name = header[:100].partition(_NUL)[0]
    # With any other magic these bytes are not a prefix: GNU tar keeps times and offsets there.
    if name and header[345] and header[257:263] == b"ustar\0":
        return header[345:500].partition(_NUL)[0] + b"/" + name
    return name


def read_records(body: bytes) -> tuple[list[tuple[bytes, bytes]], int]:
    r"""Return the records of a PAX header's body, and their end, which is before ``len(body)`` if one is malformed.

    Example:
        >>> read_records(b"12 path=a/b\n" + b"9 size=1")
        ([(b'path', b'a/b')], 12)
    """
    records = []
    at = 0
    while match := _PAX_RECORD.match(body, at):
        end = at + int(match[1])
        if not match.end() < end <= len(body) or body[end - 1] != 0x0A:
            break
        records.append((match[2], body[match.end() : end - 1]))
        at = end
    return records, at


def unreadable_record(keyword: bytes, value: bytes) -> str:
    """Return why a member with this PAX record cannot be read; empty if it can be."""
    if keyword.startswith(b"GNU.sparse."):
        return f"is {UNREADABLE_TYPES['S']}"
    if keyword in (b"GNU.volume.filename", b"GNU.volume.offset"):
        return f"is {UNREADABLE_TYPES['M']}"
    if keyword == b"hdrcharset" and value not in _CHARACTER_SETS:
        return f"has its name in the character set {value!r}, expected UTF-8; write it again with a name in UTF-8"
    return ""


def has_valid_checksum(header: bytes, stored: bytes) -> bool:
    """Return whether ``stored`` is the sum of a header's bytes: unsigned or, as in some old programs, signed."""
    # The low half of an Adler-32 is one more than the sum of the bytes, at the speed of C. It is modulo 65,521, which
    # is more than the sum in any header but one of mostly non-ASCII bytes.
    try:
        if (adler32(header) - adler32(stored) + 8 * 0x20) & 0xFFFF == int(stored[:6], 8):
            return True
    except ValueError:
        pass
    checksum = read_number(stored)
    summed = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(summed)
    return checksum == unsigned or checksum == unsigned - 256 * sum(byte > 127 for byte in summed)


@lru_cache(4096)  # most headers differ only in name, size and owner, so there are few sums
def expected_adler32(stored: bytes) -> int:
    """Return the low half of the Adler-32 of a header with this checksum: one more than the sum of its bytes.

    The stored sum counts itself as eight spaces. Raises ValueError if it is not a number.
    """
    return (int(stored[:6], 8) - 8 * 0x20 + adler32(stored)) & 0xFFFF


def member_header(name: str, size: int) -> bytes:
    r"""Return a member's header: a ustar header, after a PAX header if ustar cannot hold the name or the size.

    It depends only on the arguments: mode 0444, owner 0, time 0. The member's data and ``padding(size)`` zeros must
    follow it.

    Args:
        name: The member's name. Surrogate escapes become the bytes that they represent.
        size: The size of its data in bytes.

    Raises:
        ArgumentError: The name would be read back as another or not at all: it is empty, has a NUL or surrogates that
            are not escapes, ends with a slash (tar programs treat it as a directory) or is longer than
            ``MAX_NAME_BYTES``. Or the size is negative.

    Example:
        >>> header = member_header("0001.jpg", 60_123)
        >>> len(header), header[:8], header[124:136]
        (512, b'0001.jpg', b'00000165333\x00')
    """
    path = _path_bytes(name)
    if size < 0:
        raise ArgumentError(f"member {name!r}: its size is {size:,} bytes, expected 0 or more")
    if len(path) <= 100 and size <= _MAX_USTAR_SIZE:
        return _ustar_header(path, size)
    prefix, last, records = b"", path, b""
    if len(path) > 100:
        cut = path.rfind(b"/", 0, 156)
        if cut > 0 and len(path) - cut - 1 <= 100:
            prefix, last = path[:cut], path[cut + 1 :]
        else:
            last, records = path[:100], _pax_record(b"path", path)
    if size > _MAX_USTAR_SIZE:
        records += _pax_record(b"size", b"%d" % size)
        size = 0
    header = _ustar_header(last, size, prefix=prefix)
    if not records:
        return header
    return _ustar_header(b"././@PaxHeader", len(records), kind=b"x") + records + bytes(padding(len(records))) + header


def member_size(name: str, size: int) -> int:
    """Return the bytes that a member takes in a tar: headers, data and padding.

    Args:
        name: The member's name; refused as by ``member_header``.
        size: The size of its data in bytes.

    Example:
        >>> member_size("0001.jpg", 60_123)
        60928
    """
    if (
        len(name) <= 100
        and name.isascii()
        and name.isprintable()
        and name[-1:] not in ("", "/")
        and 0 <= size < 1 << 32
    ):
        return BLOCK_BYTES + size + -size % BLOCK_BYTES  # takes a third of the time, for nearly all members
    return len(member_header(name, size)) + size + padding(size)


def padding(size: int) -> int:
    """Return the number of zeros that follow ``size`` bytes of data, up to the next block.

    Example:
        >>> padding(1), padding(512)
        (511, 0)
    """
    return -size % BLOCK_BYTES


_MODE_AND_OWNER = b"0000444\0" + b"0000000\0" * 2
_TIME = b"00000000000\0"
_LINK_TO_DEVICE = bytes(100) + b"ustar\x0000" + bytes(32 + 32 + 8 + 8)  # the names of owner and group are empty
_FIXED_SUM = sum(_MODE_AND_OWNER + _NUL + _TIME + _LINK_TO_DEVICE) + 8 * 0x20


def _path_bytes(name: str) -> bytes:
    """Return a name's bytes. Raises ArgumentError if the name would not be read back unchanged."""
    try:
        path = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        path = b""
    # Escaped bytes that together are valid UTF-8 would be read back as a character.
    same = name.isascii() or path.decode("utf-8", "surrogateescape") == name
    if not same or not path or len(path) > MAX_NAME_BYTES or _NUL in path or path[-1] == 0x2F:
        expected = f"1 to {MAX_NAME_BYTES:,} bytes, UTF-8 or escaped, without NULs and without a slash at the end"
        raise ArgumentError(f"member {name[:200]!r}: cannot have this name, expected {expected}; rename it")
    return path


def _ustar_header(name: bytes, size: int, *, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """Return a ustar header with mode 0444, owner 0 and time 0; name, size and prefix must fit."""
    digits = b"%011o" % size
    checksum = _FIXED_SUM + _byte_sum(name) + _byte_sum(digits) + kind[0] + _byte_sum(prefix)
    return b"".join(
        (
            name.ljust(100, _NUL),
            _MODE_AND_OWNER,
            digits,
            _NUL,
            _TIME,
            b"%06o\0 " % checksum,
            kind,
            _LINK_TO_DEVICE,
            prefix.ljust(155 + 12, _NUL),
        )
    )


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    rest = b" %b=%b\n" % (keyword, value)
    length = len(rest)
    while length != len(rest) + len(str(length)):  # the length counts its own digits
        length = len(rest) + len(str(length))
    return b"%d%b" % (length, rest)


def _byte_sum(data: bytes) -> int:
    """Return the sum of at most 256 bytes."""
    return (adler32(data) & 0xFFFF) - 1
