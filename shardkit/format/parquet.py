"""Parquet files whose checksums are verified before anything is parsed, and whose decoded size is bounded.

Without this, a flipped bit would give wrong values, and a few bytes that decode to gigabytes would fill the memory. So
the footer is compared with the CRC-32 in the manifest, and each column chunk with its CRC-32 in the footer's metadata
``shardkit.chunks``. The headers of a chunk's pages give its decompressed size and its number of values before it is
decompressed. Files of format 1 have no such checksums; their sizes and counts are checked too.

The layout of Parquet: https://parquet.apache.org/docs/file-format/. Page headers are structs of Thrift's compact
protocol.
"""

import hashlib
import io
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from isal.isal_zlib import crc32

from shardkit.errors import DatasetError, ShardError, StorageError
from shardkit.storage.base import Storage, format_bytes, is_remote, read_right

if TYPE_CHECKING:
    import pyarrow as pa

CHUNKS = b"shardkit.chunks"
"""The footer's metadata entry about its column chunks, row group by row group. Each has 28 hexadecimal digits: 12 for
its offset, 8 for its size and 8 for its CRC-32."""
MAX_FOOTER_BYTES = 32_000_000
MAX_ROWS_BYTES = 128_000_000
"""The largest decompressed size of the rows of one read, in bytes."""

_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")  # the footer's length and the magic
_PLAIN = 0
_LARGEST_NUMBER_BITS = 128
_VALUES_PER_BYTE = 8  # in a column of lists: a value takes at least one bit
_MOST_COLUMNS = 10_000
_CHUNK_DIGITS = 28
_LEAST_GROUP_ROWS = 4096
_MOST_GROUP_ROWS = 65_536
_MOST_GROUPS = 1024
_GROUP_BYTES = MAX_ROWS_BYTES // 4
_PIECE_BYTES = 1 << 20
_MAX_DEPTH = 16  # of structs and lists in a footer; real footers have six
_UNPARSABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
_SMALL_BYTES = 1 << 22  # remote files up to this size are fetched as a whole


class ParquetError(Exception):
    """A file does not match its checksums or counts, or exceeds a bound; the caller adds the file's name."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The facts that a manifest records of an index or a side file.

    Attributes:
        size: The file's size in bytes.
        sha256: The SHA-256 of the whole file, in hexadecimal.
        footer_size: The size in bytes of the footer, which is read first; 0 if it is not a Parquet file.
        footer_crc32: The CRC-32 of the footer.
        group_rows: The number of rows in a row group; the last may have fewer.
    """

    size: int
    sha256: str
    footer_size: int = 0
    footer_crc32: int = 0
    group_rows: int = 0


class _Chunk(NamedTuple):
    """The place of a leaf's column chunk, and its CRC-32, which is None in format 1."""

    offset: int
    size: int
    crc32: int | None


def choose_group_rows(rows: int, size: int) -> int:
    """Return the number of rows in a row group: few, because reading a row reads its group, but not too many groups.

    Args:
        rows: The number of all rows.
        size: Their size in bytes.

    Example:
        >>> choose_group_rows(10_000, 700_000), choose_group_rows(10_000_000, 700_000_000)
        (4096, 16384)
    """
    chosen = _LEAST_GROUP_ROWS
    while chosen < _MOST_GROUP_ROWS and rows > _MOST_GROUPS * chosen:
        chosen *= 2
    while chosen > 1 and size * chosen > _GROUP_BYTES * rows:
        chosen //= 2
    return chosen


def write_parquet(
    file: BinaryIO,
    groups: Iterable["pa.Table"],
    schema: "pa.Schema",
    metadata: Mapping[str, str],
    *,
    group_rows: int,
    encodings: Mapping[str, str] | None = None,
) -> FileFacts:
    """Write a Parquet file with checksums of its column chunks, and return the facts that a manifest records of it.

    Args:
        file: An empty file, opened for writing and reading.
        groups: Its row groups, of ``group_rows`` rows each except the last.
        schema: The schema of each group.
        metadata: More metadata for its footer.
        group_rows: The number of rows in a row group.
        encodings: The encodings of columns, by name; other columns are encoded plainly.
    """
    import pyarrow.parquet as pq

    count = 0
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict(encodings) if encodings else None,
        write_page_checksum=True,
    ) as writer:
        for group in groups:
            if len(group):
                writer.write_table(group, row_group_size=len(group))
                count += 1
        # The checksums are known only after everything is written, and only the footer has the chunks' offsets. So the
        # footer is written with placeholders, which are filled in afterwards.
        room = b"?" * (_CHUNK_DIGITS * count * sum(map(len, _leaves_of(schema).values())))
        writer.add_key_value_metadata({**metadata, CHUNKS.decode(): room.decode()})
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _TAIL.size)
    footer_size = _TAIL.unpack(file.read(_TAIL.size))[0] + _TAIL.size
    if footer_size > MAX_FOOTER_BYTES:
        raise ParquetError(f"its footer would have {format_bytes(footer_size)}, readers accept {MAX_FOOTER_BYTES:,}")
    file.seek(size - footer_size)
    footer = bytearray(file.read(footer_size))
    digits = b"".join(
        b"%012x%08x%08x" % (chunk.offset, chunk.size, _crc32_of(file, chunk.offset, chunk.size))
        for chunk in _read_chunks(bytes(footer))
    )
    at = footer.index(room, footer.index(CHUNKS)) if room else 0
    footer[at : at + len(digits)] = digits
    file.seek(size - footer_size)
    file.write(footer)
    file.flush()
    sha256 = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        sha256.update(piece)
    return FileFacts(size, sha256.hexdigest(), footer_size, crc32(footer), group_rows)


def facts_of(data: bytes, group_rows: int) -> FileFacts:
    """Return the facts of a file with this content and ``group_rows`` rows in a row group."""
    footer_size = _TAIL.unpack(data[-_TAIL.size :])[0] + _TAIL.size
    sha256 = hashlib.sha256(data).hexdigest()
    return FileFacts(len(data), sha256, footer_size, crc32(data[-footer_size:]), group_rows)


def _crc32_of(file: BinaryIO, offset: int, size: int) -> int:
    crc = 0
    file.seek(offset)
    while size > 0 and (piece := file.read(min(size, _PIECE_BYTES))):
        crc = crc32(piece, crc)
        size -= len(piece)
    return crc


class CheckedParquet:
    """A Parquet file whose footer is verified and parsed at once, and whose rows are on request.

    Args:
        read: Called as ``read(offset, size)``; returns ``size`` bytes of the file that begin at ``offset``.
        size: The file's size in bytes.
        facts: The facts that the manifest records of it; None if no manifest has checksums of it.

    Raises:
        ParquetError: The footer does not match the facts, or is too large.
        pyarrow.ArrowException: It cannot be parsed.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, facts: FileFacts | None) -> None:
        import pyarrow.parquet as pq

        self._read = read
        if facts is not None and facts.size != size:
            raise ParquetError(f"it has {size:,} bytes, expected {facts.size:,}")
        footer_size = facts.footer_size if facts else self._footer_size(size)
        if not _TAIL.size <= footer_size <= min(size, MAX_FOOTER_BYTES):
            raise ParquetError(f"its footer has {footer_size:,} bytes, expected at most {MAX_FOOTER_BYTES:,}")
        footer = read(size - footer_size, footer_size)
        if facts is not None and crc32(footer) != facts.footer_crc32:
            raise ParquetError(f"its footer has the CRC-32 {crc32(footer):08x}, expected {facts.footer_crc32:08x}")
        self._metadata: pq.FileMetaData = pq.read_metadata(io.BytesIO(footer))
        if self._metadata.num_columns > _MOST_COLUMNS:
            raise ParquetError(f"it has {self._metadata.num_columns:,} columns, expected at most {_MOST_COLUMNS:,}")
        self._file = _Chunks(size)
        # pyarrow must not start threads: threads that still run when a short program ends abort it ("terminate called
        # without an active exception", 1 of 100 runs of `shardkit cat`, pyarrow 26).
        self._parquet = pq.ParquetFile(
            self._file, metadata=self._metadata, page_checksum_verification=True, pre_buffer=False
        )
        self._schema: pa.Schema = self._parquet.schema_arrow.remove_metadata()
        self._leaves = _leaves_of(self._schema)
        if len(self._leaves) != len(self._schema):
            raise ParquetError("it has two columns with the same name")
        for field in self._schema:
            if _has_dictionary(field.type):
                raise ParquetError(
                    f"column {field.name!r} has values in a dictionary, which take more memory when they are decoded"
                )
        digits = self.metadata.get(CHUNKS)
        if digits is not None:
            self._chunks = [
                _Chunk(*(int(digits[at + a : at + b], 16) for a, b in ((0, 12), (12, 20), (20, 28))))
                for at in range(0, len(digits), _CHUNK_DIGITS)
            ]
        elif facts is None:
            self._chunks = _read_chunks(footer)
        else:
            raise ParquetError("its footer has no checksums of its column chunks")
        if len(self._chunks) != self._metadata.num_row_groups * self._metadata.num_columns:
            raise ParquetError(f"its footer has the places of {len(self._chunks):,} column chunks, which are not all")

    def _footer_size(self, size: int) -> int:
        if size < _TAIL.size:
            raise ParquetError(f"it has {size:,} bytes, too few for a Parquet file")
        length, magic = _TAIL.unpack(self._read(size - _TAIL.size, _TAIL.size))
        if magic != _MAGIC:
            raise ParquetError(f"it ends with {magic!r}, expected {_MAGIC!r} as in a Parquet file")
        return int(length) + _TAIL.size

    @property
    def metadata(self) -> Mapping[bytes, bytes]:
        """The other metadata of the footer."""
        return self._metadata.metadata or {}

    @property
    def schema(self) -> "pa.Schema":
        """The columns and their types."""
        return self._schema

    @property
    def num_groups(self) -> int:
        """The number of row groups."""
        return int(self._metadata.num_row_groups)

    def check_groups(self, rows: int, group_rows: int) -> None:
        """Check that it has ``rows`` rows in groups of ``group_rows`` except the last. Raises ParquetError."""
        found = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        last = rows - (len(found) - 1) * group_rows
        if found and (found[:-1] != [group_rows] * (len(found) - 1) or found[-1] != last or last > group_rows):
            raise ParquetError(f"it has {sum(found):,} rows in {len(found):,} groups, expected {rows:,}")
        if not found and rows:
            raise ParquetError(f"it has no rows, expected {rows:,}")

    def read(self, columns: Sequence[str], group: int) -> "pa.Table":
        """Return some columns of a row group.

        Raises:
            ParquetError: They do not match their checksums or the footer, or would take too much memory.
            pyarrow.ArrowException: They cannot be parsed.
        """
        import pyarrow as pa

        expected = self._metadata.row_group(group).num_rows
        if expected > _MOST_GROUP_ROWS:
            raise ParquetError(f"row group {group:,} has {expected:,} rows, expected at most {_MOST_GROUP_ROWS:,}")
        total = 0
        parts = {}
        for name in columns:
            largest, is_plain = 0, True
            for leaf in self._leaves[name]:
                size, plain = self._load(group, leaf, expected)
                largest, is_plain = largest + size, is_plain and plain
            total += largest
            if total > MAX_ROWS_BYTES:
                raise self._too_large(name, total)
            parts[name] = self._decode(group, name, MAX_ROWS_BYTES - total, largest, is_plain=is_plain)
            self._file.clear()
            total += max(0, parts[name].nbytes - largest)
            if total > MAX_ROWS_BYTES:
                raise self._too_large(name, total)
            if len(parts[name]) != expected:
                raise ParquetError(f"column {name!r} has {len(parts[name]):,} rows, expected {expected:,}")
        return pa.table(parts) if parts else pa.table({"": pa.nulls(expected)}).select([])  # which keeps the rows

    def _decode(self, group: int, name: str, room: int, size: int, *, is_plain: bool) -> "pa.ChunkedArray":
        """Return a column whose pages are loaded.

        Values that are encoded by what they share with others may become any number of times larger, but each is at
        most as large as all encoded data. So they are decoded a few at a time, and their sizes are added up.
        """
        import pyarrow as pa

        if is_plain or not _may_grow(self._schema.field(name).type):
            return self._parquet.read_row_group(group, columns=[name], use_threads=False).column(name)
        arrays = []
        taken = 0
        few = max(1, _GROUP_BYTES // max(1, size))
        for batch in self._parquet.iter_batches(few, row_groups=[group], columns=[name], use_threads=False):
            taken += batch.nbytes
            if taken > room + size:
                raise self._too_large(name, taken)
            arrays.append(batch.column(name))
        return pa.chunked_array(arrays, self._schema.field(name).type)

    def _too_large(self, name: str, size: int) -> ParquetError:
        return ParquetError(
            f"column {name!r} takes {format_bytes(size)} and more for a group of rows with the columns before it, "
            f"expected at most {format_bytes(MAX_ROWS_BYTES)}"
        )

    def _load(self, group: int, leaf: int, rows: int) -> tuple[int, bool]:
        """Read a column chunk and verify it; return its decompressed size, and whether its values are plain."""
        chunk = self._chunks[group * self._metadata.num_columns + leaf]
        path = self._metadata.schema.column(leaf).path
        if not 0 <= chunk.size <= MAX_ROWS_BYTES or chunk.offset < 0:
            raise ParquetError(f"column {path!r} says that it has {chunk.size:,} bytes from byte {chunk.offset:,}")
        data = self._read(chunk.offset, chunk.size)
        if chunk.crc32 is not None and crc32(data) != chunk.crc32:
            raise ParquetError(
                f"column {path!r} has the CRC-32 {crc32(data):08x} from byte {chunk.offset:,} on, expected "
                f"{chunk.crc32:08x}"
            )
        size = values = 0
        is_plain = True
        for page in _pages(data):
            size += page.size
            values += page.values
            is_plain = is_plain and page.encoding == _PLAIN
        if values != rows and self._metadata.schema.column(leaf).max_repetition_level == 0:
            raise ParquetError(f"column {path!r} has {values:,} values, expected {rows:,}")
        if values > max(rows, _VALUES_PER_BYTE * size) or size > MAX_ROWS_BYTES:
            raise self._too_large(path, max(size, values))
        self._file.put(chunk.offset, data)
        return size, is_plain


def checked_bytes(data: bytes, facts: FileFacts | None) -> CheckedParquet:
    """Return a Parquet file with this content. Raises the same errors as ``CheckedParquet``."""
    if facts is not None and (found := hashlib.sha256(data).hexdigest()) != facts.sha256:
        raise ParquetError(f"it has the SHA-256 {found[:16]}..., expected {facts.sha256[:16]}...")
    return CheckedParquet(lambda offset, count: data[offset : offset + count], len(data), facts)


def checked_file(storage: Storage, url: str, facts: FileFacts | None, *, fresh: bool) -> CheckedParquet:
    """Open a Parquet file and read its footer; a small remote file is read as a whole.

    Args:
        storage: Serves it.
        url: The file.
        facts: The facts that the manifest records of it; None if no manifest has checksums of it.
        fresh: Take nothing from a cache.

    Raises:
        OSError: It cannot be read.
        ParquetError: As from ``CheckedParquet``.
        pyarrow.ArrowException: As from ``CheckedParquet``.
    """
    size = facts.size if facts else None
    if is_remote(url) and (size or 0) <= _SMALL_BYTES:
        stream = storage.open(url, fresh=fresh)
        try:
            size = stream.size if facts is None else size
            if size is not None and size <= _SMALL_BYTES:
                return checked_bytes(stream.read(size), facts)
        finally:
            stream.close()

    def read(offset: int, count: int) -> bytes:
        return storage.read_range(url, offset, count, fresh=fresh)

    return CheckedParquet(read, storage.info(url).size if size is None else size, facts)


@contextmanager
def damage_of(url: str, problem: str = "is damaged") -> Iterator[None]:
    """Turn errors that show damage into a DatasetError that names the file; errors of reading pass unchanged."""
    import pyarrow as pa

    try:
        yield
    except (StorageError, PermissionError, FileNotFoundError):
        raise
    except (pa.ArrowException, ParquetError, ShardError, OSError, *_UNPARSABLE) as error:
        raise DatasetError(
            f"{url}: {problem} ({type(error).__name__}: {error}); fetch it again, or make it again with "
            "'shardkit index'",
            url=url,
        ) from error


class StoredParquet:
    """A Parquet file that is opened again if its data is wrong.

    Args:
        open_file: Opens it; called with ``fresh``.
        url: Its name in messages.
        fresh: The value of ``fresh`` in the first call.

    Attributes:
        file: The file from the last call of ``open_file``.

    It raises the errors of ``open_file``.
    """

    def __init__(self, open_file: Callable[..., CheckedParquet], url: str, *, fresh: bool = False) -> None:
        self._open_file = open_file
        self._url = url
        self.file = open_file(fresh=fresh)

    def read(self, columns: Sequence[str], group: int, check: Callable[["pa.Table"], None] | None = None) -> "pa.Table":
        """Return some columns of a row group; if they are wrong, open the file again.

        Args:
            columns: The columns' names.
            group: The number of the group.
            check: Raises DatasetError if the columns are wrong.

        Raises:
            DatasetError: They are damaged.
            OSError: They cannot be read.
        """

        def read(*, fresh: bool) -> "pa.Table":
            with damage_of(self._url):
                if fresh:
                    self.file = self._open_file(fresh=True)
                table = self.file.read(columns, group)
            if check:
                check(table)
            return table

        return read_right(self._url, read)


class _Chunks(io.RawIOBase):
    """The column chunks that were read, as a file for pyarrow."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._chunks: dict[int, bytes] = {}
        self._position = 0

    def put(self, offset: int, data: bytes) -> None:
        self._chunks[offset] = data

    def clear(self) -> None:
        self._chunks.clear()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        for start, data in self._chunks.items():
            at = self._position - start
            if at >= 0 and at + size <= len(data):
                self._position += size
                return data[at : at + size]
        raise OSError(f"bytes {self._position:,} to {self._position + size:,} belong to no requested column")


def _leaves_of(schema: "pa.Schema") -> dict[str, range]:
    """Return the numbers of each column's leaves; only lists and structs have several."""
    leaves = {}
    first = 0
    for field in schema:
        count = _count(field.type)
        leaves[field.name] = range(first, first + count)
        first += count
    return leaves


def _count(kind: "pa.DataType") -> int:
    return sum(_count(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


def _has_dictionary(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    parts = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, parts))


def _may_grow(kind: "pa.DataType") -> bool:
    """Return whether values of a type can take much more memory than their encoded bytes."""
    try:
        return bool(kind.bit_width > _LARGEST_NUMBER_BITS)
    except ValueError:
        return True


def _read_chunks(footer: bytes) -> list[_Chunk]:
    """Return the places of the column chunks from a footer, row group by row group. Raises ParquetError.

    pyarrow has them too, but it aborts the process if the statistics of a column are damaged (26.0).
    """
    try:
        metadata, _ = _read_struct(footer, 0, 0)
        chunks = []
        for group in metadata[4]:
            for column in group[1]:
                told = column[3]
                starts = [told[number] for number in (9, 11) if number in told]  # of the data, and of a dictionary
                chunks.append(_Chunk(min(starts), told[7], None))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ParquetError("its footer does not have the places of its columns") from error
    return chunks


class _Page(NamedTuple):
    """The facts in a page's header: its decompressed size, its number of values, and their encoding."""

    size: int
    values: int
    encoding: int


def _pages(data: bytes) -> Iterator[_Page]:
    """Yield the facts in the headers of a column chunk's pages. Raises ParquetError."""
    at = 0
    while at < len(data):
        try:
            header, at = _read_struct(data, at, 0)
            size, stored = header[2], header[3]
            kinds = [header[number] for number in (5, 7, 8) if number in header]
            (kind,) = kinds
            is_dictionary = 7 in header
            encoding = kind[4] if 8 in header else kind[2]
            page = _Page(size, 0 if is_dictionary else kind[1], -1 if is_dictionary else encoding)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ParquetError(f"a column has no valid page header at byte {at:,}") from error
        at += stored
        if min(size, stored, page.values) < 0 or at > len(data):
            raise ParquetError(f"a page of {stored:,} bytes does not fit into its column")
        yield page


def _read_struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return a struct of Thrift's compact protocol, by the numbers of its fields, and the offset of its end."""
    found: dict[int, Any] = {}
    number = 0
    while byte := data[at]:
        at += 1
        kind = byte & 15
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _read_zigzag(data, at)
        if kind in (1, 2):
            found[number] = kind == 1
        else:
            found[number], at = _read_value(data, at, kind, depth)
    return found, at + 1


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if kind in (4, 5, 6):
        return _read_zigzag(data, at)
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (7, 8):  # texts and fractions are skipped, because none is needed
        length, at = (8, at) if kind == 7 else _read_varint(data, at)
        if at + length > len(data):
            raise IndexError("it ends within a value")
        return None, at + length
    if kind == 12:
        return _read_struct(data, at, depth + 1)
    if kind not in (9, 10):
        raise ValueError(f"type {kind}, which Parquet does not have")
    size, kind = data[at] >> 4, data[at] & 15
    size, at = (size, at + 1) if size < 15 else _read_varint(data, at + 1)
    values = []
    for _ in range(size):
        value, at = _read_value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number does not end")


def _read_zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at
