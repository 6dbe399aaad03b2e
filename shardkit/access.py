"""Blocks and samples of shards, each read on its own: by the shard's index, and compared with it.

What indexes say is read when it is first needed and kept within bounds, so that a dataset of any size opens at once and
stays small. Threads and forked processes may share it; a pickle of it has nothing of what is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from shardkit.blocks import Block
from shardkit.buffers import Buffers
from shardkit.cache import BlockCache
from shardkit.cachedir import block_name
from shardkit.compress import decompress_frame
from shardkit.errors import ArgumentError, DatasetError, ShardError, TruncatedShardError, hide_secrets
from shardkit.index import PARTS, ROW_GROUP_ROWS, BlockTable, ShardIndex, read_index
from shardkit.manifest import Manifest
from shardkit.recent import BoundedCache
from shardkit.sample import COLUMNS, KEY, URL, FieldSelection, Sample
from shardkit.schemes import storage_for
from shardkit.storage import is_remote, join, read_right

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_TABLE_BYTES = 64_000_000
"""The most bytes of block tables that are kept: of 1.5 million blocks."""
ROW_BYTES = 128_000_000
"""The most bytes of indexes' rows that are kept: of some 2 million samples with two fields."""
FRAME_BYTES = 32_000_000
"""The most bytes of decompressed blocks that are kept for single samples, many of which lie in one block."""

_MAX_FRAME_BYTES = 1 << 32  # what a seek table can say of a frame
_OBJECT_BYTES = 700  # what the objects around some arrays take (sys.getsizeof, CPython 3.11)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of an index.

    Attributes:
        keys: The samples' keys.
        members: For each field offset, size and CRC-32 of its data: int64, (rows,) each; -1 where it is missing.
        columns: The index columns that were asked for.
    """

    keys: "pa.ChunkedArray"
    members: dict[str, tuple[npt.NDArray[np.int64], ...]]
    columns: "dict[str, pa.ChunkedArray]"

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        arrays = [self.keys, *self.columns.values(), *(array for arrays in self.members.values() for array in arrays)]
        return sum(int(array.nbytes) for array in arrays) + _OBJECT_BYTES * (1 + len(self.members))


class ShardAccess:
    """Reads any block and any sample of a dataset. All that is read is compared with the index, or is an error.

    Args:
        manifest: The dataset.
        fields: The fields that may be asked for; others are not looked for in the indexes.
        columns: The index columns that go into the samples.
        storage_options: Passed to the storage.
        cache: Where blocks are kept that are read, or None.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        fields: Sequence[str],
        columns: Sequence[str],
        storage_options: Mapping[str, object] | None,
        cache: BlockCache | None = None,
    ) -> None:
        self._manifest = manifest
        self._fields = tuple(fields)
        self._columns = tuple(columns)
        self._storage = storage_for(manifest.url, storage_options)
        self._cache = cache
        self._tables: BoundedCache[BlockTable] = BoundedCache(BLOCK_TABLE_BYTES)
        self._rows: BoundedCache[Rows] = BoundedCache(ROW_BYTES)
        self._frames: BoundedCache[bytes] = BoundedCache(FRAME_BYTES)

    def url(self, shard: int) -> str:
        """Return where a shard is."""
        return join(self._manifest.url, self._manifest.shards[shard].url)

    def index(self, shard: int) -> ShardIndex:
        """Open a shard's index, compared with the manifest.

        Raises:
            DatasetError: It is damaged, or is another shard's.
            FileNotFoundError: There is none.
        """
        entry = self._manifest.shards[shard]
        url = join(self._manifest.url, entry.index_url)
        try:
            index = read_index(self._storage, url)
        except FileNotFoundError as error:
            error.add_note(f"The manifest promises this index of {self.url(shard)}. Fetch it, or run 'shardkit index'")
            raise
        facts, expected = index.facts, (entry.sha256, entry.samples, entry.compression, entry.tar_size)
        block_samples = self._manifest.block_samples
        if (facts.sha256, facts.samples, facts.compression, facts.tar_size) != expected or (
            facts.block_samples != block_samples
            or len(index.blocks) != entry.blocks
            or entry.blocks != -(-entry.samples // block_samples)
        ):
            raise DatasetError(
                f"{url}: is the index of another shard than the manifest lists as {self.url(shard)}; fetch both "
                "again, or make them again with 'shardkit index'",
                url=url,
            )
        return index

    def table(self, shard: int) -> BlockTable:
        """Return where a shard's blocks lie.

        Raises:
            DatasetError: The index is damaged or another shard's, or the shard's blocks cannot be read on their own.
            ShardError: The shard has another size than the manifest says.
            FileNotFoundError: There is no such shard, or no index of it.
        """
        table = self._tables.get(shard)
        if table is None:
            index = self.index(shard)
            table = index.blocks
            self._check_table(shard, table, index.url)
            self._tables.put(shard, table, 40 * len(table) + _OBJECT_BYTES)
        return table

    def _check_table(self, shard: int, table: BlockTable, index_url: str) -> None:
        """Check that blocks lie within their shard before their sizes are believed."""
        entry, url = self._manifest.shards[shard], self.url(shard)
        if len(table.stored_offset) != len(table):
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
            return  # the blocks' checksums say as much, and it would be a request for each shard
        size = self._storage.info(url).size
        if size != entry.file_size:
            kind = TruncatedShardError if size < entry.file_size else ShardError
            raise kind(
                f"shard {url}: has {size:,} bytes, its manifest says {entry.file_size:,}; it was cut or replaced, so "
                "fetch or write it again",
                url=url,
            )

    def read_block(self, shard: int, number: int, buffers: Buffers | None = None) -> Block:
        """Read one block, in one piece, and compare its checksum.

        Args:
            shard: Its shard's number.
            number: Its number in the shard.
            buffers: Where it is read to, if it is not compressed; by default into memory of its own.

        Raises:
            ArgumentError: The shard has no such block.
            ShardError: The block is damaged, or the shard was cut or replaced.
            DatasetError: The index is not usable.
        """
        data = self._read(shard, number, buffers)
        entry, block_samples = self._manifest.shards[shard], self._manifest.block_samples
        first = number * block_samples
        samples = min(block_samples, entry.samples - first)
        return Block(
            data,
            url=hide_secrets(self.url(shard)),
            shard=shard,
            number=number,
            offset=int(self.table(shard).offset[number]),
            samples=samples,
            columns=self._column_values(shard, first, first + samples) if self._columns else None,
        )

    def _read(self, shard: int, number: int, buffers: Buffers | None = None) -> bytes | memoryview:
        table, url = self.table(shard), self.url(shard)
        if not 0 <= number < len(table):
            raise ArgumentError(f"shard {url}: has the blocks 0 to {len(table) - 1:,}, not {number:,}")
        start, stored_size = int(table.stored_offset[number]), int(table.stored_size[number])
        offset, size, expected = int(table.offset[number]), int(table.size[number]), int(table.crc32[number])
        entry = self._manifest.shards[shard]
        is_plain = entry.compression == "none"
        out = buffers.take(size).data if is_plain and buffers is not None else None

        def checked(stored: bytes | memoryview) -> bytes | memoryview:
            data = stored if is_plain else decompress_frame(bytes(stored), size, url=url, offset=offset)
            found = crc32(data)
            if found != expected:
                raise ShardError(
                    f"shard {url}: block {number:,} at byte {offset:,} has the CRC-32 {found:08x}, its index says "
                    f"{expected:08x}; it is damaged or was replaced, so fetch or write it again ('shardkit verify' "
                    "says which samples are whole)",
                    url=url,
                    offset=offset,
                )
            return data

        def read(*, fresh: bool) -> tuple[bytes | memoryview, bytes | memoryview]:
            stored: bytes | memoryview
            if out is not None:
                stored = out
                self._storage.read_into(url, start, out, fresh=fresh)
            else:
                stored = self._storage.read_range(url, start, stored_size, fresh=fresh)
            return stored, checked(stored)

        if self._cache is None:
            return read_right(url, read)[1]
        name = block_name(entry.sha256, entry.compression, start, stored_size)
        kept = self._cache.get(name, stored_size, out)
        if kept is not None:
            try:
                return checked(kept)
            except ShardError:
                self._cache.drop(name)
        stored, data = read_right(url, read)
        self._cache.put(name, stored)
        return data

    def rows(self, shard: int, group: int) -> Rows:
        """Return a group of an index's rows: those from ``group * ROW_GROUP_ROWS`` on.

        Raises:
            DatasetError: The index is not usable.
        """
        rows = self._rows.get((shard, group))
        if rows is None:
            rows = self._read_rows(shard, group)
            self._rows.put((shard, group), rows, rows.nbytes)
        return rows

    def _read_rows(self, shard: int, group: int) -> Rows:
        import pyarrow as pa

        index = self.index(shard)
        fields = [field for field in self._fields if field in index.facts.fields]
        names = [KEY, *self._columns, *(f"{field}:{part}" for field in fields for part in PARTS)]
        table = index.rows(list(dict.fromkeys(names)), group=group)
        expected = min(ROW_GROUP_ROWS, index.facts.samples - group * ROW_GROUP_ROWS)
        try:
            members = {field: tuple(_integers(table.column(f"{field}:{part}")) for part in PARTS) for field in fields}
            columns = {name: table.column(name) for name in self._columns if name in table.column_names}
            rows = Rows(table.column(KEY), members, columns)
        except (KeyError, pa.ArrowException) as error:
            raise _damaged(index.url, str(error)) from error
        if len(table) != expected:
            raise _damaged(index.url, f"row group {group:,} has {len(table):,} rows, expected {expected:,}")
        return rows

    def _column_values(self, shard: int, start: int, stop: int) -> dict[str, list[object]]:
        """Return the index columns of some samples of a shard; None where the shard's index does not have one."""
        values: dict[str, list[object]] = {name: [] for name in self._columns}
        while start < stop:
            group, at = divmod(start, ROW_GROUP_ROWS)
            count = min(stop - start, ROW_GROUP_ROWS - at)
            columns = self.rows(shard, group).columns
            for name in values:
                values[name] += columns[name].slice(at, count).to_pylist() if name in columns else [None] * count
            start += count
        return values

    def key(self, shard: int, row: int) -> str:
        """Return a sample's key. Raises as ``rows`` does."""
        group, at = divmod(row, ROW_GROUP_ROWS)
        key: str = self.rows(shard, group).keys[at].as_py()
        return key

    def read_sample(self, shard: int, row: int, selection: FieldSelection) -> Sample:
        """Read one sample: the bytes of the fields that are selected, under their own names, and of no others.

        Of a compressed shard, and where there is a cache, its block is read, and kept for samples to come.

        Raises:
            ShardError: A field is damaged, or the shard was cut or replaced.
            SampleError: A field is missing and not optional.
            DatasetError: The index is not usable.
        """
        group, at = divmod(row, ROW_GROUP_ROWS)
        rows = self.rows(shard, group)
        key: str = rows.keys[at].as_py()
        sample: Sample = {KEY: key, URL: hide_secrets(self.url(shard))}
        if self._columns:
            sample[COLUMNS] = {name: rows.columns[name][at].as_py() for name in rows.columns}
            sample[COLUMNS] = {name: sample[COLUMNS].get(name) for name in self._columns}
        members = {field: arrays for field, arrays in rows.members.items() if arrays[0][at] >= 0}
        chosen = selection.choose({**sample, **members}).values() if selection.wanted else members
        for field in chosen:
            if field is not None and field not in sample:
                place = [int(array[at]) for array in members[field]]
                sample[field] = self._read_field(shard, row, key, field, place)
        return sample

    def _read_field(self, shard: int, row: int, key: str, field: str, place: Sequence[int]) -> bytes:
        offset, size, expected = place
        table, url = self.table(shard), self.url(shard)  # the table says that the shard is whole
        number = row // self._manifest.block_samples
        begin = offset - int(table.offset[number])
        if begin < 0 or not 0 <= size <= int(table.size[number]) - begin:
            raise _damaged(self.index(shard).url, f"sample {key!r} is not in its block")
        is_read_alone = self._manifest.shards[shard].compression == "none" and self._cache is None
        block = None if is_read_alone else self._frames.get((shard, number))
        if not is_read_alone and block is None:
            block = bytes(self._read(shard, number))
            self._frames.put((shard, number), block, len(block))

        def read(*, fresh: bool) -> bytes:
            if block is not None:
                data = block[begin : begin + size]
            else:
                data = self._storage.read_range(url, offset, size, fresh=fresh) if size else b""
            found = crc32(data)
            if found != expected:
                raise ShardError(
                    f"shard {url}: field {field!r} of sample {key!r} at byte {offset:,} has the CRC-32 {found:08x}, "
                    f"its index says {expected:08x}; it is damaged or was replaced, so fetch or write it again",
                    url=url,
                    offset=offset,
                    key=key,
                    field=field,
                )
            return data

        return read_right(url, read)


def cannot_read_blocks(folder: str, url: str, compression: str) -> DatasetError:
    """Return the error that says what to do with shards that can only be read from their beginning."""
    return DatasetError(
        f"shard {url}: is {compression} without frames of its blocks, so it cannot be read sample by sample; "
        f"'shardkit pack {folder} NEW_FOLDER --kind shards' makes shards that can be, and ShardStream reads these",
        url=url,
    )


def _damaged(url: str, problem: str) -> DatasetError:
    return DatasetError(f"{url}: is damaged ({problem}); make it again with 'shardkit index'", url=url)


def _integers(column: Any) -> npt.NDArray[np.int64]:
    """Return a column as int64, with -1 for null."""
    import pyarrow as pa

    numbers: npt.NDArray[np.int64] = column.cast(pa.int64()).fill_null(-1).to_numpy()
    return numbers
