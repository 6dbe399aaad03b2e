"""The index of a shard: where each sample and member lies, what its bytes' checksums are, and the shard's block table.

It is a Parquet file beside the shard, with one row a sample: ``__key__``, ``__offset__`` and ``__size__`` of the
whole sample, for every field ``<field>:offset``, ``<field>:size`` and ``<field>:crc32``, the columns that the user
promotes, and ``__source__`` where the sample was made of a file. Offsets count from the start of the uncompressed
tar. What concerns the whole shard, the block table among it, is JSON in the Parquet footer, so that it is read
without the rows.
"""

import io
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardkit.errors import ArgumentError, DatasetError, MissingFileError, StorageError
from shardkit.sample import KEY, SOURCE
from shardkit.storage.base import RangeFile, Storage, is_remote, read_right

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_VERSION = 1
METADATA_KEY = b"shardkit"
OFFSET = "__offset__"
SIZE = "__size__"
PARTS = ("offset", "size", "crc32")
ROW_GROUP_ROWS = 65_536

MAX_BLOCK_SAMPLES = 1024

_SMALL_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where the blocks of one shard lie. Block ``i`` holds the samples from ``i * block_samples`` on.

    Attributes:
        offset: Of the block in the uncompressed tar: int64, (blocks,).
        size: In bytes, uncompressed: int64, (blocks,).
        crc32: Of the uncompressed bytes: int64, (blocks,).
        stored_offset: Of the block's bytes in the shard file: int64, (blocks,). Empty if blocks cannot be read on
            their own.
        stored_size: In bytes, as stored: int64, (blocks,). Empty likewise.
    """

    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.int64]
    stored_offset: npt.NDArray[np.int64]
    stored_size: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offset)


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What an index says of its shard as a whole.

    Attributes:
        shard: The shard's file name.
        samples: How many it has.
        file_size: The shard's size as stored, in bytes.
        tar_size: The uncompressed tar's size, in bytes.
        sha256: Of the uncompressed tar, in hexadecimal.
        compression: ``none``, ``zst``, ``gz``, ``bz2`` or ``xz``.
        block_samples: How many samples a block has; the last may have fewer.
        fields: The fields that occur, sorted.
        plan: The digest of the pack that wrote the shard; empty if there was none.
    """

    shard: str
    samples: int
    file_size: int
    tar_size: int
    sha256: str
    compression: str
    block_samples: int
    fields: tuple[str, ...]
    plan: str = ""


@dataclass
class IndexBuilder:
    """Collects the rows of one shard's index, a row group at a time, so that it stays small beside the shard."""

    fields: set[str] = field(default_factory=set)
    _keys: list[str] = field(default_factory=list)
    _places: "array[int]" = field(default_factory=lambda: array("q"))  # offset and size of every sample
    _members: "dict[str, array[int]]" = field(default_factory=dict)  # by field: row, offset, size and CRC-32
    _others: dict[str, list[Any]] = field(default_factory=dict)  # source and promoted columns
    _tables: list["pa.Table"] = field(default_factory=list)

    def add(
        self,
        key: str,
        offset: int,
        size: int,
        members: Sequence[tuple[str, int, int, int]],
        *,
        columns: Mapping[str, object] | None = None,
        source: str | None = None,
    ) -> None:
        """Add the next sample.

        Args:
            key: Its key.
            offset: Where it begins, in bytes of the uncompressed tar.
            size: From there to the end of its last member's padding.
            members: For each field its name, and its data's offset, size and CRC-32.
            columns: Values of the promoted columns.
            source: The file that it was made of.
        """
        row = len(self._keys)
        self._keys.append(key)
        self._places.extend((offset, size))
        for name, data_offset, data_size, crc in members:
            places = self._members.get(name)
            if places is None:
                places = self._members[name] = array("q")
                self.fields.add(name)
            places.extend((row, data_offset, data_size, crc))
        if columns or source is not None or self._others:
            self._add_others({**(columns or {}), SOURCE: source})
        if row + 1 == ROW_GROUP_ROWS:
            self._flush()

    def _add_others(self, values: Mapping[str, object]) -> None:
        row = len(self._keys) - 1
        for name in values.keys() - self._others.keys():
            self._others[name] = [None] * row
        for name, column in self._others.items():
            column.append(values.get(name))

    def _flush(self) -> None:
        import pyarrow as pa

        places = np.array(self._places).reshape(-1, 2)
        arrays = {KEY: pa.array(self._keys, type=pa.string()), OFFSET: places[:, 0], SIZE: places[:, 1]}
        for name, numbers in self._members.items():
            rows, *parts = np.array(numbers).reshape(-1, 4).T
            missing = np.ones(len(places), dtype=np.bool_)
            missing[rows] = False
            for part, values in zip(PARTS, parts, strict=True):
                column = np.zeros(len(places), dtype=np.int64)
                column[rows] = values
                kind = pa.uint32() if part == "crc32" else pa.int64()
                arrays[f"{name}:{part}"] = pa.array(column, type=kind, mask=missing)
        for name, others in self._others.items():
            try:
                arrays[name] = pa.array(others, type=pa.string() if name == SOURCE else None)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError) as error:
                raise ArgumentError(
                    f"column {name!r}: its values have no common type, or none of Arrow's ({error}); return one or None"
                ) from error
        if all(source is None for source in self._others.get(SOURCE, ())):
            arrays.pop(SOURCE, None)
        self._tables.append(pa.table(arrays))
        self._keys, self._places, self._members, self._others = [], array("q"), {}, {}

    def table(self) -> "pa.Table":
        """Return all rows. Columns: key, offset and size first, then the fields sorted, then the promoted columns."""
        import pyarrow as pa

        if self._keys or not self._tables:
            self._flush()
        try:
            table = pa.concat_tables(self._tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ArgumentError(
                f"columns: their values have no common type ({error}); return one type, or None"
            ) from error
        parts = [f"{name}:{part}" for name in sorted(self.fields) for part in PARTS]
        first = [KEY, OFFSET, SIZE, *parts]
        return table.select([*first, *sorted(set(table.column_names) - set(first))])


def write_index(file: BinaryIO, table: "pa.Table", facts: ShardFacts, blocks: BlockTable) -> None:
    """Write an index.

    Args:
        file: Where to; a writable binary file.
        table: The rows, from an ``IndexBuilder``.
        facts: What concerns the whole shard.
        blocks: The block table.
    """
    import pyarrow.parquet as pq

    described = {
        "version": INDEX_VERSION,
        **asdict(facts),
        "blocks": {k: v.tolist() for k, v in asdict(blocks).items()},
    }
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(described, sort_keys=True).encode()})
    encodings = {
        name: "DELTA_BYTE_ARRAY" if name in (KEY, SOURCE) else "DELTA_BINARY_PACKED"
        for name in table.column_names
        if name in (KEY, SOURCE, OFFSET, SIZE) or name.endswith((":offset", ":size"))
    }
    pq.write_table(
        table,
        file,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encodings,
        write_page_checksum=True,
    )


class ShardIndex:
    """The index of one shard: its facts and block table at once, its rows when they are asked for.

    Example:
        >>> import io
        >>> builder = IndexBuilder()
        >>> builder.add("a", 0, 1024, [("txt", 512, 3, 907060870)])
        >>> facts = ShardFacts("x.tar", 1, 2048, 2048, "00" * 32, "none", 1, ("txt",))
        >>> none = np.zeros(0, dtype=np.int64)
        >>> write_index(file := io.BytesIO(), builder.table(), facts, BlockTable(none, none, none, none, none))
        >>> ShardIndex(file, "x.parquet").sample_keys()
        ['a']
    """

    def __init__(
        self,
        file: io.RawIOBase | io.BytesIO,
        url: str,
        *,
        fetch: Callable[[], io.RawIOBase | io.BytesIO] | None = None,
    ) -> None:
        import pyarrow as pa

        self.url = url
        self._fetch = fetch  # the file anew, if what came of it is wrong
        try:
            self._parquet = _open_parquet(file)
            described = dict(json.loads((self._parquet.schema_arrow.metadata or {})[METADATA_KEY]))
            version = described.pop("version")
            if version != INDEX_VERSION:
                raise DatasetError(
                    f"{url}: is an index of version {version!r}, this shardkit reads version {INDEX_VERSION}; "
                    "upgrade shardkit, or make the index again with 'shardkit index'",
                    url=url,
                )
            blocks = dict(described.pop("blocks"))
            self.blocks = BlockTable(**{name: np.array(values, dtype=np.int64) for name, values in blocks.items()})
            self.facts = ShardFacts(**{**described, "fields": tuple(described["fields"])})
            _check_types(self.facts, self.blocks)
        except (PermissionError, StorageError):
            raise
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DatasetError(
                f"{url}: is not an index of shardkit ({type(error).__name__}: {error}); "
                "make it again with 'shardkit index'",
                url=url,
            ) from error
        parts = (f"{field}:{part}" for field in self.facts.fields for part in ("offset", "size", "crc32"))
        missing = {KEY, OFFSET, SIZE, *parts}.difference(self._parquet.schema_arrow.names)
        if missing:
            raise DatasetError(
                f"{url}: lacks {', '.join(sorted(missing))}, which it should have for its fields; it is damaged, so "
                "fetch it again, or make it again with 'shardkit index'",
                url=url,
            )
        if self._parquet.metadata.num_rows != self.facts.samples:
            raise DatasetError(
                f"{url}: has {self._parquet.metadata.num_rows:,} rows for {self.facts.samples:,} samples; "
                "make it again with 'shardkit index'",
                url=url,
            )

    @cached_property
    def columns(self) -> dict[str, str]:
        """The promoted columns and their Arrow types as text."""
        schema = self._parquet.schema_arrow
        return {
            name: str(schema.field(name).type)
            for name in schema.names
            if ":" not in name and name not in (KEY, OFFSET, SIZE, SOURCE)
        }

    @property
    def has_source(self) -> bool:
        """Whether the samples name the files that they were made of."""
        return SOURCE in self._parquet.schema_arrow.names

    def rows(self, columns: Sequence[str] | None = None, *, group: int | None = None) -> "pa.Table":
        """Return the rows, or some columns of them; a column that the shard does not have is left out.

        Args:
            columns: Their names, by default all.
            group: The number of a row group: the rows from ``group * ROW_GROUP_ROWS`` on, as many as there are, up to
                ``ROW_GROUP_ROWS``. By default all groups.

        Raises:
            DatasetError: The rows are damaged.
        """
        import pyarrow as pa

        names = self._parquet.schema_arrow.names
        wanted = None if columns is None else [name for name in columns if name in names]

        def read(*, fresh: bool) -> pa.Table:
            try:
                if fresh and self._fetch is not None:
                    self._parquet = _open_parquet(self._fetch())
                table = (
                    self._parquet.read(columns=wanted, use_threads=False)
                    if group is None
                    else self._parquet.read_row_group(group, columns=wanted, use_threads=False)
                )
            except StorageError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(
                    f"{self.url}: is damaged ({error}); make it again with 'shardkit index'", url=self.url
                ) from error
            _check_rows(table, self.facts.fields, self.url)
            return table

        return read_right(self.url, read)

    def sample_keys(self) -> list[str]:
        """Return the samples' keys, in order."""
        keys: list[str] = self.rows([KEY]).column(KEY).to_pylist()
        return keys


def _check_rows(table: "pa.Table", names: Sequence[str], url: str) -> None:
    """Check that what says where samples and their fields lie is numbers, and that of no field a part of it is missing.

    Args:
        table: Some columns of the index.
        names: The shard's fields.
        url: The index.

    Raises:
        DatasetError: They are not.
    """
    import pyarrow as pa

    problem = ""
    for name in (KEY, OFFSET, SIZE):
        column = table.column(name) if name in table.column_names else None
        if column is not None and column.null_count:
            problem = f"a sample has no {name}"
        if column is not None and not (pa.types.is_string if name == KEY else pa.types.is_integer)(column.type):
            problem = f"{name} is {column.type}"
    for name in names:
        parts = {part: f"{name}:{part}" for part in PARTS if f"{name}:{part}" in table.column_names}
        missing = []
        for part in parts.values():
            column = table.column(part)
            if not pa.types.is_integer(column.type):
                problem = f"{part} is {column.type}"
            missing.append(column.is_null() if column.null_count else None)
        if any(other != missing[0] for other in missing[1:]):
            problem = f"a sample has one of {', '.join(parts.values())} and lacks another"
    if problem:
        raise DatasetError(f"{url}: is damaged ({problem}); make it again with 'shardkit index'", url=url)


def _check_types(facts: ShardFacts, blocks: BlockTable) -> None:
    """Check that what an index says is what it should be. Raises TypeError or ValueError."""
    texts = [facts.shard, facts.sha256, facts.compression, facts.plan, *facts.fields]
    numbers = [facts.samples, facts.file_size, facts.tar_size, facts.block_samples]
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a name is not text, or a number is not an integer")
    if min(numbers) < 0 or max(numbers) >= 1 << 63 or facts.block_samples == 0:
        raise ValueError("a number is out of range")
    one, stored = blocks.offset.shape, blocks.stored_offset.shape
    alike = one == blocks.size.shape == blocks.crc32.shape and stored == blocks.stored_size.shape
    if not alike or len(one) != 1 or stored not in (one, (0,)):
        raise ValueError("its block table is not one of columns of equal lengths")
    if any((getattr(blocks, part.name) < 0).any() for part in fields(blocks)):
        raise ValueError("its block table has a negative number")


def read_index(storage: Storage, url: str) -> ShardIndex:
    """Open an index; only its footer is read.

    Raises:
        MissingFileError: There is none.
        StorageError: It cannot be read.
        DatasetError: It is damaged, or of an unknown version.
    """

    def read(*, fresh: bool) -> ShardIndex:
        return ShardIndex(_open(storage, url, fresh=fresh), url, fetch=partial(_open, storage, url, fresh=True))

    try:
        return read_right(url, read)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{url}: this index is missing; fetch it again, or make it again with 'shardkit index'", url=url
        ) from error


def _open_parquet(file: io.RawIOBase | io.BytesIO) -> Any:
    import pyarrow.parquet as pq

    # Neither here nor in ShardIndex.rows may pyarrow start threads: those that are left when a short program ends abort
    # it ("terminate called without an active exception", 1 of 100 runs of `shardkit cat`, pyarrow 26).
    return pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)


def _open(storage: Storage, url: str, *, fresh: bool) -> RangeFile | io.BytesIO:
    """Return an index as a file. One that is far away and small comes whole, by one request instead of four."""
    if is_remote(url):
        stream = storage.open(url, fresh=fresh)
        try:
            if stream.size is not None and stream.size <= _SMALL_BYTES:
                return io.BytesIO(stream.read(stream.size))
        finally:
            stream.close()
    return RangeFile(storage, url, fresh=fresh)


def choose_block_samples(num_samples: int, total_bytes: int, block_bytes: int) -> int:
    """Return how many samples a block has, so that it is about ``block_bytes``: between 1 and 1 024.

    Example:
        >>> choose_block_samples(1000, 60_000_000, 1_000_000)
        17
    """
    mean = total_bytes / num_samples if num_samples else block_bytes
    return int(min(max(1, round(block_bytes / mean)), MAX_BLOCK_SAMPLES))
