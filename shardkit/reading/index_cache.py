"""The indexes of a dataset's shards: read when they are first needed, once, and kept within a memory bound.

So a dataset of any size opens quickly and takes little memory. Threads and forked processes may share these objects.
Pickling drops the cached data.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import DatasetError, ShardError, TruncatedShardError
from shardkit.format.index import GROUP_ROWS_1, PARTS, BlockTable, ShardIndex, open_index
from shardkit.format.manifest import Manifest
from shardkit.format.side_files import BlockFile
from shardkit.order.plan import IntArray
from shardkit.reading.extents import REQUEST_BYTES, Parts, member_bounds
from shardkit.reading.lru import BoundedCache, SharedWork
from shardkit.sample import KEY
from shardkit.storage.base import Storage, is_remote, join

if TYPE_CHECKING:
    import pyarrow as pa

V = TypeVar("V")

BLOCK_TABLE_BYTES = 64_000_000
"""The most bytes of block tables that are kept: enough for 1.5 million blocks."""
ROW_BYTES = 128_000_000
"""The most bytes of indexes' rows that are kept: enough for about 2 million samples with two fields."""

_MAX_FRAME_BYTES = 1 << 32  # the format of a seek table has 32 bits for the size of a frame
_OBJECT_BYTES = 700  # taken by the Python objects that hold the arrays (sys.getsizeof, CPython 3.11)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of an index.

    Attributes:
        keys: The samples' keys.
        members: For each field, offset, size and CRC-32 of its data: int64, (rows,) each; -1 where it is missing.
        columns: The index columns that were asked for.
    """

    keys: "pa.ChunkedArray"
    members: dict[str, tuple[IntArray, ...]]
    columns: "dict[str, pa.ChunkedArray]"

    @property
    def nbytes(self) -> int:
        """The size of the rows in memory, in bytes."""
        arrays = [self.keys, *self.columns.values(), *(array for arrays in self.members.values() for array in arrays)]
        return sum(int(array.nbytes) for array in arrays) + _OBJECT_BYTES * (1 + len(self.members))


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """The blocks of a shard.

    Attributes:
        table: Where the blocks lie.
        in_parts: Whether to fetch only the wanted fields of each block: bool, (blocks,); empty if no block is.
    """

    table: BlockTable
    in_parts: npt.NDArray[np.bool_]


class Indexes:
    """The indexes of a dataset, each compared with the manifest.

    Args:
        manifest: The dataset.
        storage: Reads them.
        fields: The fields that may be asked for; others are not read.
        columns: The index columns that may be asked for.
        has_parts: Whether blocks may be fetched in parts.
    """

    def __init__(
        self, manifest: Manifest, storage: Storage, *, fields: Sequence[str], columns: Sequence[str], has_parts: bool
    ) -> None:
        self.storage = storage
        self._manifest = manifest
        self._fields = tuple(fields)
        self._columns = tuple(columns)
        self._has_parts = has_parts and len(self._fields) < len(manifest.fields)
        self._blocks: BoundedCache[ShardBlocks] = BoundedCache(BLOCK_TABLE_BYTES)
        self._rows: BoundedCache[Rows] = BoundedCache(ROW_BYTES)
        self._reading = SharedWork()
        self._block_file = BlockFile(manifest, storage)

    def url(self, shard: int) -> str:
        """Return where a shard is."""
        return join(self._manifest.url, self._manifest.shards[shard].url)

    def index_url(self, shard: int) -> str:
        """Return where a shard's index is."""
        return join(self._manifest.url, self._manifest.shards[shard].index_url)

    def open(self, shard: int) -> ShardIndex:
        """Open a shard's index, compared with the manifest.

        Raises:
            DatasetError: It is damaged, or belongs to another shard.
            StorageError: It is missing, or cannot be read.
        """
        index = open_index(self.storage, self._manifest.url, self._manifest.shards[shard])
        facts, manifest = index.facts, self._manifest
        if facts.block_samples != manifest.block_samples:
            problem = f"its blocks have {facts.block_samples:,} samples, the manifest says {manifest.block_samples:,}"
        elif unknown := sorted({*facts.fields, *index.columns}.difference(manifest.fields, manifest.columns)):
            problem = f"it has {', '.join(unknown)}, which the manifest does not list"
        else:
            return index
        raise damaged_index(index.url, problem)

    def blocks(self, shard: int) -> ShardBlocks:
        """Return where a shard's blocks lie.

        Raises:
            DatasetError: The index is damaged or belongs to another shard, or the shard cannot be read by blocks.
            ShardError: The shard has another size than the manifest says.
            StorageError: The shard or its index is missing, or cannot be read.
        """
        return self._read_once(self._blocks, shard, lambda: self._read_blocks(shard, None))

    def _read_once(self, kept: BoundedCache[V], place: Hashable, read: Callable[[], V]) -> V:
        """Return the kept value, or read it once for all threads that want it, even if some ask just afterwards."""
        return kept.get(place) or self._reading.do(place, lambda: kept.get(place) or read())

    def _read_blocks(self, shard: int, index: ShardIndex | None) -> ShardBlocks:
        if self._manifest.version > 1:
            table, url = self._block_file.table(shard), self._block_file.url
        else:
            index = index or self.open(shard)
            table, url = index.blocks, index.url
        self._check_table(shard, table, url)
        blocks = ShardBlocks(table, self._find_parts(shard, table, index))
        self._blocks.put(shard, blocks, 41 * len(table) + _OBJECT_BYTES)
        return blocks

    def _find_parts(self, shard: int, table: BlockTable, index: ShardIndex | None) -> npt.NDArray[np.bool_]:
        """Return which blocks to fetch in parts: those where it saves at least the cost of a request."""
        entry = self._manifest.shards[shard]
        if not self._has_parts or entry.compression != "none" or not entry.samples:
            return np.zeros(0, dtype=np.bool_)
        index = index or self.open(shard)
        groups = [self._read_rows(index, group) for group in range(index.num_groups)]
        members = _joined([rows.members for rows in groups])
        firsts = np.arange(len(table)) * index.facts.block_samples
        wanted = sum((np.add.reduceat(sizes.clip(0), firsts) for _, sizes, _ in members.values()), np.zeros(len(table)))
        in_parts: npt.NDArray[np.bool_] = wanted + REQUEST_BYTES <= table.size
        for number in np.flatnonzero(in_parts).tolist():
            rows = slice(firsts[number], firsts[number] + index.facts.block_samples)
            bounds = member_bounds({field: tuple(part[rows] for part in parts) for field, parts in members.items()})
            in_parts[number] = Parts(*bounds, gap=REQUEST_BYTES).pay(int(table.size[number]))
        if not in_parts.any():
            return np.zeros(0, dtype=np.bool_)
        for group, found in enumerate(groups):  # the blocks' rows are needed next
            self._rows.put((shard, group), found, found.nbytes)
        return in_parts

    def _check_table(self, shard: int, table: BlockTable, index_url: str) -> None:
        """Check that blocks lie within their shard, before memory is taken for their sizes."""
        entry, url = self._manifest.shards[shard], self.url(shard)
        if not table.is_readable:
            raise cannot_read_blocks(self._manifest.url, url, entry.compression)
        sizes = {
            len(array) for array in (table.offset, table.size, table.crc32, table.stored_offset, table.stored_size)
        }
        starts = np.minimum(table.offset, table.stored_offset)
        is_right = (
            sizes == {len(table)}
            and (starts >= 0).all()
            and (np.minimum(table.size, table.stored_size) > 0).all()
            and (table.offset <= entry.tar_size - table.size).all()
            and (table.stored_offset <= entry.file_size - table.stored_size).all()
            and (entry.compression != "none" or (table.size == table.stored_size).all())
            and (entry.compression == "none" or (table.size < _MAX_FRAME_BYTES).all())
        )
        if not is_right:
            raise DatasetError(
                f"{index_url}: has blocks that cannot be in its shard; make it again with 'shardkit index'",
                url=index_url,
            )
        if is_remote(url):
            return  # blocks have checksums anyway, and this would be one more request for each shard
        size = self.storage.info(url).size
        if size != entry.file_size:
            kind = TruncatedShardError if size < entry.file_size else ShardError
            raise kind(
                f"shard {url}: has {size:,} bytes, its manifest says {entry.file_size:,}; it was cut or replaced, so "
                "fetch or write it again",
                url=url,
            )

    def group_rows(self, shard: int) -> int:
        """Return how many rows of a shard's index are read together."""
        index = self._manifest.shards[shard].index
        return index.group_rows if index else GROUP_ROWS_1

    def rows(self, shard: int, group: int) -> Rows:
        """Return a group of an index's rows: those from ``group * group_rows(shard)`` on.

        Raises:
            DatasetError: The index is not usable.
            ShardError: The shard has another size than the manifest says.
        """
        return self._read_once(self._rows, (shard, group), lambda: self._find_rows(shard, group))

    def _find_rows(self, shard: int, group: int) -> Rows:
        index = self.open(shard)
        if self._blocks.get(shard) is None:  # the row's block is asked for next, and the index is open now
            self._read_blocks(shard, index)
        rows = self._rows.get((shard, group)) or self._read_rows(index, group)
        self._rows.put((shard, group), rows, rows.nbytes)
        return rows

    def _read_rows(self, index: ShardIndex, group: int) -> Rows:
        import pyarrow as pa

        fields = [field for field in self._fields if field in index.facts.fields]
        names = [KEY, *self._columns, *(f"{field}:{part}" for field in fields for part in PARTS)]
        table = index.rows(list(dict.fromkeys(names)), group=group)
        try:
            members = {field: tuple(_integers(table.column(f"{field}:{part}")) for part in PARTS) for field in fields}
            columns = {name: table.column(name) for name in self._columns if name in table.column_names}
            rows = Rows(table.column(KEY), members, columns)
        except (KeyError, pa.ArrowException) as error:
            raise damaged_index(index.url, str(error)) from error
        return rows

    def key(self, shard: int, row: int) -> str:
        """Return a sample's key. Raises as ``rows`` does."""
        group, at = divmod(row, self.group_rows(shard))
        key: str = self.rows(shard, group).keys[at].as_py()
        return key

    def members(self, shard: int, start: int, stop: int) -> tuple[list[str], dict[str, tuple[IntArray, ...]]]:
        """Return the keys of some samples of a shard, and for each field, offset, size and CRC-32, as in ``Rows``.

        Raises as ``rows`` does.
        """
        keys: list[str] = []
        members: list[dict[str, tuple[IntArray, ...]]] = []
        for rows, part in self._slices(shard, start, stop):
            keys += rows.keys[part].to_pylist()
            members.append({field: tuple(array[part] for array in arrays) for field, arrays in rows.members.items()})
        return keys, _joined(members)

    def column_values(self, shard: int, start: int, stop: int) -> dict[str, list[object]]:
        """Return the index columns of some samples of a shard; None where the shard's index does not have one.

        Raises as ``rows`` does.
        """
        values: dict[str, list[object]] = {name: [] for name in self._columns}
        for rows, part in self._slices(shard, start, stop):
            for name in values:
                is_there = name in rows.columns
                values[name] += rows.columns[name][part].to_pylist() if is_there else [None] * (part.stop - part.start)
        return values

    def _slices(self, shard: int, start: int, stop: int) -> Iterator[tuple[Rows, slice]]:
        group_rows = self.group_rows(shard)
        while start < stop:
            group, at = divmod(start, group_rows)
            count = min(stop - start, group_rows - at)
            yield self.rows(shard, group), slice(at, at + count)
            start += count


def cannot_read_blocks(folder: str, url: str, compression: str) -> DatasetError:
    """Return the error for a shard that can only be read from its beginning, with what to do."""
    return DatasetError(
        f"shard {url}: is {compression} without frames of its blocks, so it cannot be read sample by sample; "
        f"'shardkit pack {folder} NEW_FOLDER --kind shards' makes shards that can be, and ShardStream reads these",
        url=url,
    )


def damaged_index(url: str, problem: str) -> DatasetError:
    """Return the error for a damaged index."""
    return DatasetError(f"{url}: is damaged ({problem}); make it again with 'shardkit index'", url=url)


def _integers(column: Any) -> IntArray:
    """Return a column as int64, with -1 for null. pyarrow's own conversion would import pandas, which takes 0.1 s.

    Example:
        >>> import pyarrow as pa
        >>> _integers(pa.chunked_array([[7, 8, None], [9]], pa.uint32()).slice(1)).tolist()
        [8, -1, 9]
    """
    import pyarrow as pa

    array = column.cast(pa.int64()).combine_chunks()
    bitmap, values = array.buffers()
    part = slice(array.offset, array.offset + len(array))
    numbers: IntArray = np.frombuffer(values or b"", np.int64)[part]
    if array.null_count:
        is_there = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[part]
        numbers = np.where(is_there, numbers, -1)
    return numbers


def _joined(members: Sequence[dict[str, tuple[IntArray, ...]]]) -> dict[str, tuple[IntArray, ...]]:
    """Return the members of several groups of rows as one."""
    if len(members) == 1:
        return members[0]
    return {
        field: tuple(np.concatenate(parts) for parts in zip(*(one[field] for one in members), strict=True))
        for field in members[0]
    }
