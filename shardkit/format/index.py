"""The index of a shard: where each sample and member lies, the checksums of their bytes, and the shard's block table.

It is a Parquet file with one row per sample: ``__key__``, ``__offset__`` and ``__size__`` of the whole sample; for
every field ``<field>:offset``, ``<field>:size`` and ``<field>:crc32``; the columns that the user promotes; and
``__source__`` if the sample was made from a file. Offsets count from the start of the uncompressed tar. The facts of
the whole shard and its block table are in the Parquet footer, so that they can be read without the rows.
"""

import base64
import io
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from shardkit.errors import ArgumentError, DatasetError, MissingFileError
from shardkit.format.manifest import FORMAT_VERSION, INDEX_FOLDER, Shard, index_file_name, read_whole
from shardkit.format.parquet import (
    CheckedParquet,
    FileFacts,
    ParquetError,
    StoredParquet,
    checked_bytes,
    checked_file,
    choose_group_rows,
    damage_of,
    facts_of,
    write_parquet,
)
from shardkit.sample import KEY, SOURCE
from shardkit.storage.base import Storage, join, read_right, split_url

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"shardkit"
BLOCKS_KEY = b"shardkit.blocks"
OFFSET = "__offset__"
SIZE = "__size__"
PARTS = ("offset", "size", "crc32")
GROUP_ROWS_1 = 65_536
"""The number of rows in a row group of format 1."""

MAX_BLOCK_SAMPLES = 1024
MAX_INDEX_BYTES = 1_000_000_000

_FACTS_BYTES = 8_000_000  # of JSON in a footer: some 160,000 blocks of format 1
_BUILDER_ROWS = 65_536  # held as Python objects at a time
BLOCK_TYPE = np.dtype(
    [("offset", "<i8"), ("size", "<i8"), ("crc32", "<u4"), ("stored_offset", "<i8"), ("stored_size", "<i8")]
)
BLOCK_BYTES = BLOCK_TYPE.itemsize
"""The size of a block table's row in bytes."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where the blocks of one shard lie. Block ``i`` holds the samples from ``i * block_samples`` on.

    Attributes:
        offset: Each block's offset in the uncompressed tar: int64, (blocks,).
        size: Each block's uncompressed size in bytes: int64, (blocks,).
        crc32: The CRC-32 of each block's uncompressed bytes: int64, (blocks,).
        stored_offset: Each block's offset in the shard file: int64, (blocks,). Empty if blocks cannot be read on their
            own.
        stored_size: Each block's stored size in bytes: int64, (blocks,). Empty if blocks cannot be read on their own.
    """

    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.int64]
    stored_offset: npt.NDArray[np.int64]
    stored_size: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def is_readable(self) -> bool:
        """Whether each block can be read on its own, without the bytes before it."""
        return len(self.stored_offset) == len(self)

    def to_bytes(self) -> bytes:
        """Return its rows: offset, size, CRC-32, stored offset, stored size; 36 bytes each, little-endian.

        Where blocks cannot be read on their own, the stored size is 0.
        """
        rows = np.zeros(len(self), dtype=BLOCK_TYPE)
        for name in PARTS:
            rows[name] = getattr(self, name)
        if len(self.stored_offset):
            rows["stored_offset"], rows["stored_size"] = self.stored_offset, self.stored_size
        return rows.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "BlockTable":
        """Return the table with these rows. Raises ValueError if the last row is incomplete."""
        rows = np.frombuffer(data, dtype=BLOCK_TYPE)
        columns = {name: rows[name].astype(np.int64) for name in BLOCK_TYPE.names or ()}
        if not columns["stored_size"].any():
            columns["stored_offset"] = columns["stored_size"] = np.zeros(0, dtype=np.int64)
        return cls(**columns)


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The facts that an index records of its whole shard.

    Attributes:
        shard: The shard's file name.
        samples: The number of samples.
        file_size: The shard's size as stored, in bytes.
        tar_size: The uncompressed tar's size, in bytes.
        sha256: The SHA-256 of the uncompressed tar, in hexadecimal.
        compression: ``none``, ``zst``, ``gz``, ``bz2`` or ``xz``.
        block_samples: The number of samples in a block; the last block may have fewer.
        fields: The fields that occur, sorted.
        plan: The digest of the pack that wrote the shard; empty if no pack did.
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
    """Collects the rows of one shard's index, a row group at a time, so that it takes little memory."""

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
            key: The sample's key.
            offset: Its offset in the uncompressed tar, in bytes.
            size: Its size in bytes, up to the end of its last member's padding.
            members: For each field its name, and its data's offset, size and CRC-32.
            columns: Values of the promoted columns.
            source: The file that it was made from.
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
        if row + 1 == _BUILDER_ROWS:
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


def encode_index(table: "pa.Table", facts: ShardFacts, blocks: BlockTable) -> tuple[bytes, FileFacts]:
    """Return an index's content, and the facts that a manifest records of it.

    Args:
        table: The rows, from an ``IndexBuilder``.
        facts: The facts of the whole shard.
        blocks: The block table.

    Raises:
        ArgumentError: The values of a promoted column are too large for an index.
    """
    encodings = {
        name: "DELTA_BYTE_ARRAY" if name in (KEY, SOURCE) else "DELTA_BINARY_PACKED"
        for name in table.column_names
        if name in (KEY, SOURCE, OFFSET, SIZE) or name.endswith((":offset", ":size"))
    }
    group_rows = choose_group_rows(len(table), table.nbytes)
    metadata = {
        METADATA_KEY.decode(): json.dumps(
            {"version": FORMAT_VERSION, "group_rows": group_rows, **asdict(facts)}, sort_keys=True
        ),
        BLOCKS_KEY.decode(): base64.b64encode(blocks.to_bytes()).decode(),
    }
    file = io.BytesIO()
    groups = (table.slice(start, group_rows) for start in range(0, len(table), group_rows))
    try:
        written = write_parquet(
            file, groups, table.schema.remove_metadata(), metadata, group_rows=group_rows, encodings=encodings
        )
    except ParquetError as error:
        raise ArgumentError(f"shard {facts.shard}: its index cannot be written: {error}") from error
    return file.getvalue(), written


def publish_index(
    storage: Storage, folder: str, name: str, table: "pa.Table", facts: ShardFacts, blocks: BlockTable
) -> Shard:
    """Write the index of a shard into a dataset's folder, and return the manifest's entry for the shard.

    Args:
        storage: Serves the folder.
        folder: The dataset's folder.
        name: The shard's name in the manifest.
        table: The rows, from an ``IndexBuilder``.
        facts: The facts of the whole shard.
        blocks: The block table.
    """
    data, index = encode_index(table, facts, blocks)
    shard = describe_shard(name, facts, blocks, index)
    with storage.create(join(folder, shard.index_url), overwrite=True) as file:
        file.write(data)
    return shard


def describe_shard(name: str, facts: ShardFacts, blocks: BlockTable, index: FileFacts | None) -> Shard:
    """Return the manifest's entry for a shard; without ``index``, an entry of format 1."""
    return Shard(
        url=name,
        samples=facts.samples,
        file_size=facts.file_size,
        tar_size=facts.tar_size,
        sha256=facts.sha256,
        compression=facts.compression,
        blocks=len(blocks),
        blocks_crc32=crc32(blocks.to_bytes()) if index else None,
        index=index,
    )


class ShardIndex:
    """The index of one shard; its facts and block table are read at once, its rows on request.

    Args:
        open_file: Opens the file. It is called with ``fresh``, and again with ``fresh=True`` if the data is wrong.
        url: The index.
        fresh: The value of ``fresh`` in the first call.

    Attributes:
        url: The index.
        version: The version of its format.
        facts: The facts of the whole shard.
        blocks: The block table.
        group_rows: The number of rows in a row group, the unit of reading; the last group may have fewer.

    Raises:
        DatasetError: It is damaged, or of an unknown version.

    Example:
        >>> builder = IndexBuilder()
        >>> builder.add("a", 0, 1024, [("txt", 512, 3, 907060870)])
        >>> facts = ShardFacts("x.tar", 1, 2048, 2048, "00" * 32, "none", 1, ("txt",))
        >>> none = np.zeros(0, dtype=np.int64)
        >>> data, _ = encode_index(builder.table(), facts, BlockTable(none, none, none, none, none))
        >>> ShardIndex.from_bytes(data, "x.parquet").sample_keys()
        ['a']
    """

    def __init__(self, open_file: Callable[..., CheckedParquet], url: str, *, fresh: bool = False) -> None:
        self.url = url
        with damage_of(url, "is not an index of shardkit"):
            self._stored = StoredParquet(open_file, url, fresh=fresh)
            parquet = self._stored.file
            described = _parse_facts(parquet.metadata[METADATA_KEY])
            self.version = described.pop("version")
            if self.version not in (1, FORMAT_VERSION):
                raise DatasetError(
                    f"{url}: is an index of version {self.version!r}, this shardkit reads versions 1 to "
                    f"{FORMAT_VERSION}; upgrade shardkit, or make the index again with 'shardkit index'",
                    url=url,
                )
            if self.version == 1:
                blocks = dict(described.pop("blocks"))
                self.blocks = BlockTable(**{name: np.array(values, dtype=np.int64) for name, values in blocks.items()})
                self.group_rows = GROUP_ROWS_1
            else:
                self.blocks = BlockTable.from_bytes(base64.b64decode(parquet.metadata[BLOCKS_KEY], validate=True))
                self.group_rows = described.pop("group_rows")
                if type(self.group_rows) is not int or not 0 < self.group_rows <= GROUP_ROWS_1:
                    raise ValueError(f"has groups of {self.group_rows!r:.50} rows")
            self.facts = ShardFacts(**{**described, "fields": tuple(described["fields"])})
            _check_types(self.facts, self.blocks)
            parquet.check_groups(self.facts.samples, self.group_rows)
        parts = (f"{field}:{part}" for field in self.facts.fields for part in PARTS)
        missing = {KEY, OFFSET, SIZE, *parts}.difference(self.schema.names)
        if missing:
            raise DatasetError(
                f"{url}: lacks {', '.join(sorted(missing))}, which an index of its fields must have; it is damaged, so "
                "fetch it again, or make it again with 'shardkit index'",
                url=url,
            )

    @classmethod
    def from_bytes(cls, data: bytes, url: str, facts: FileFacts | None = None) -> Self:
        """Return the index with this content. Raises DatasetError."""
        return cls(lambda *, fresh: checked_bytes(data, facts), url)  # noqa: ARG005 - there is nothing to fetch

    @property
    def num_groups(self) -> int:
        """The number of row groups."""
        return -(-self.facts.samples // self.group_rows)

    @property
    def schema(self) -> "pa.Schema":
        """The columns of its rows and their types."""
        return self._stored.file.schema

    @cached_property
    def columns(self) -> dict[str, str]:
        """The promoted columns and their Arrow types as text."""
        schema = self.schema
        return {
            name: str(schema.field(name).type)
            for name in schema.names
            if ":" not in name and name not in (KEY, OFFSET, SIZE, SOURCE)
        }

    @property
    def has_source(self) -> bool:
        """Whether the samples name the files that they were made from."""
        return SOURCE in self.schema.names

    def rows(self, columns: Sequence[str] | None = None, *, group: int | None = None) -> "pa.Table":
        """Return the rows, or some columns of them; a column that the shard does not have is left out.

        Args:
            columns: The columns' names, by default all.
            group: The number of a row group, whose first row is ``group * group_rows``. By default all groups.

        Raises:
            DatasetError: The rows are damaged, or would take too much memory.
        """
        import pyarrow as pa

        schema = self.schema
        known = dict.fromkeys(schema.names)
        wanted = [name for name in (known if columns is None else dict.fromkeys(columns)) if name in known]
        if not self.facts.samples:
            return schema.empty_table().select(wanted)
        if group is None:
            return pa.concat_tables(self.rows(columns, group=number) for number in range(self.num_groups))
        return self._stored.read(wanted, group, lambda table: _check_rows(table, self.facts.fields, self.url))

    def sample_keys(self) -> list[str]:
        """Return the samples' keys, in order."""
        keys: list[str] = self.rows([KEY]).column(KEY).to_pylist()
        return keys


def _parse_facts(text: bytes) -> dict[str, Any]:
    if len(text) > _FACTS_BYTES:
        raise ValueError(f"says {len(text):,} bytes about its shard, expected at most {_FACTS_BYTES:,}")
    return dict(json.loads(text))


def _check_rows(table: "pa.Table", names: Sequence[str], url: str) -> None:
    """Check that offsets, sizes and checksums are numbers, and that no sample has only some of them for a field.

    Args:
        table: Some columns of the index.
        names: The shard's fields.
        url: The index.

    Raises:
        DatasetError: One is not a number, or is missing.
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
    """Check the types and ranges of an index's facts and block table. Raises TypeError or ValueError."""
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


def read_index(storage: Storage, url: str, facts: FileFacts | None = None) -> ShardIndex:
    """Open an index and read its footer; a small index that is not on this machine is read as a whole.

    Args:
        storage: Serves it.
        url: The index.
        facts: The facts that a manifest of format 2 records of it; without them, it is compared only with its own
            checksums and counts.

    Raises:
        MissingFileError: The index does not exist.
        StorageError: It cannot be read.
        DatasetError: It is damaged, or of an unknown version.
    """

    def open_file(*, fresh: bool) -> CheckedParquet:
        return checked_file(storage, url, facts, fresh=fresh)

    try:
        return read_right(url, lambda *, fresh: ShardIndex(open_file, url, fresh=fresh))
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{url}: this index is missing; fetch it again, or make it again with 'shardkit index'", url=url
        ) from error


def open_index(storage: Storage, folder: str, shard: Shard) -> ShardIndex:
    """Open a shard's index, and compare it with the shard's entry in the manifest.

    Args:
        storage: Serves it.
        folder: The manifest's folder.
        shard: The manifest's entry for the shard.

    Raises:
        MissingFileError: The index does not exist.
        StorageError: It cannot be read.
        DatasetError: It is damaged, or another shard's.
    """
    url, shard_url = join(folder, shard.index_url), join(folder, shard.url)
    index = read_index(storage, url, shard.index)
    found = describe_shard(shard.url, index.facts, index.blocks, shard.index)
    if replace(found, file_size=shard.file_size) != shard:  # the file size is compared when the shard itself is read
        raise DatasetError(
            f"{url}: is the index of another shard than the manifest lists as {shard_url}; fetch both again, or make "
            "them again with 'shardkit index'",
            url=url,
        )
    return index


def read_named_index(storage: Storage, folder: str, name: str) -> tuple[ShardIndex, FileFacts]:
    """Read an index that no manifest lists, compare it with the hash in its name, and return its facts too.

    Raises:
        FileNotFoundError: The index does not exist.
        DatasetError: It is damaged.
    """
    url = join(folder, f"{INDEX_FOLDER}/{name}")

    def read(*, fresh: bool) -> tuple[ShardIndex, FileFacts]:
        data = read_whole(storage, url, most=MAX_INDEX_BYTES, fresh=fresh)
        index = ShardIndex.from_bytes(data, url)
        facts = facts_of(data, index.group_rows)
        if name != split_url(index_file_name(index.facts.shard, facts.sha256))[1]:
            raise DatasetError(f"{url}: does not match its name; make it again with 'shardkit index'", url=url)
        return index, facts

    return read_right(url, read)


def choose_block_samples(num_samples: int, total_bytes: int, block_bytes: int) -> int:
    """Return the number of samples in a block so that it has about ``block_bytes``: between 1 and 1,024.

    Example:
        >>> choose_block_samples(1000, 60_000_000, 1_000_000)
        17
    """
    mean = total_bytes / num_samples if num_samples else block_bytes
    return int(min(max(1, round(block_bytes / mean)), MAX_BLOCK_SAMPLES))
