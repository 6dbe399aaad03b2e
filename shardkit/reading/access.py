"""Single blocks and samples of shards, located by the shard's index and compared with it.

If only some fields of a block are wanted, only these are fetched, provided that this saves more than the additional
requests cost. Threads and forked processes may share these objects. Pickling drops the cached data.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from isal.isal_zlib import crc32

from shardkit.codecs.compress import decompress_frame
from shardkit.errors import ArgumentError, ShardError, hide_secrets
from shardkit.format.manifest import Manifest
from shardkit.reading.block import Block, BlockLayout
from shardkit.reading.disk_cache import BlockCache
from shardkit.reading.disk_cache_folder import block_name
from shardkit.reading.extents import REQUEST_BYTES, FieldPlace, Parts
from shardkit.reading.index_cache import Indexes, damaged_index
from shardkit.reading.lru import BoundedCache
from shardkit.reading.memory import Buffers
from shardkit.reading.page_cache import OpenFile, ResidentBlock
from shardkit.sample import COLUMNS, KEY, URL, FieldSelection, Sample
from shardkit.storage.base import is_remote, read_right
from shardkit.storage.registry import storage_for

FRAME_BYTES = 32_000_000
"""The most bytes of whole blocks that are kept for ``dataset[i]``: the requested samples often share a block."""

_FILES = 128  # kept open at most; reopening one takes three microseconds
_LARGE_BYTES = 8000  # a field's average size from which it is cheaper to read each sample than to copy its whole block


class ShardAccess:
    """Reads any block and any sample of a dataset. Data that does not match the index is an error.

    Args:
        manifest: The dataset.
        fields: The fields that may be asked for; others are not read from the indexes.
        columns: The index columns that go into the samples.
        storage_options: Passed to the storage.
        cache: Keeps the blocks that are read; None for no cache.

    Attributes:
        indexes: The shards' indexes.
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
        # A cache keeps whole blocks, as another reader may want other fields.
        self.indexes = Indexes(manifest, self._storage, fields=fields, columns=columns, has_parts=cache is None)
        self._frames: BoundedCache[bytes] = BoundedCache(FRAME_BYTES)
        self._files: BoundedCache[OpenFile] = BoundedCache(_FILES)

    def read_block(self, shard: int, number: int, buffers: Buffers | None = None) -> Block:
        """Read one block as a whole and compare its checksum, or only its wanted fields and compare theirs.

        Args:
            shard: Its shard's number.
            number: Its number in the shard.
            buffers: Provides the memory for a block that is not compressed; by default, new memory is allocated.

        Raises:
            ArgumentError: The shard has no such block.
            ShardError: The block is damaged, or the shard was cut or replaced.
            DatasetError: The index is not usable.
        """
        rows, url = self._rows_of(shard, number), self.indexes.url(shard)
        # Before the blocks, so that the index is opened once for both.
        columns = self.indexes.column_values(shard, rows.start, rows.stop) if self._columns else None
        blocks = self.indexes.blocks(shard)
        layout = None
        if len(blocks.in_parts) and blocks.in_parts[number]:
            data, layout = self._read_parts(shard, number, rows, buffers)
        else:
            data = self._read_whole(shard, number, buffers)
        return Block(
            data,
            url=hide_secrets(url),
            shard=shard,
            number=number,
            offset=int(blocks.table.offset[number]),
            samples=len(rows),
            columns=columns,
            layout=layout,
        )

    def open_block(self, shard: int, number: int, buffers: Buffers) -> Block | ResidentBlock:
        """Return a block to take samples from; one of large samples in the page cache is only opened, others are read.

        The arguments and errors are those of ``read_block``.
        """
        rows = self._rows_of(shard, number)
        if not self._has_large_samples(shard):
            return self.read_block(shard, number, buffers)
        keys, members = self.indexes.members(shard, rows.start, rows.stop)  # before the blocks, as in read_block
        begin, end = self._bounds(shard, number)
        if not self._open_file(shard).is_resident(begin, end - begin):
            return self.read_block(shard, number, buffers)
        for offset, size, _ in members.values():
            places = zip(keys, offset.tolist(), size.tolist(), strict=True)
            self._check_places(shard, number, (place for place in places if place[1] >= 0))
        return ResidentBlock(
            partial(self._open_file, shard),
            partial(self._read_member, shard, number),
            keys,
            members,
            url=hide_secrets(self.indexes.url(shard)),
            columns=self.indexes.column_values(shard, rows.start, rows.stop) if self._columns else None,
        )

    def _rows_of(self, shard: int, number: int) -> range:
        """Return the rows of a shard that are in a block. Raises ArgumentError."""
        entry, block_samples = self._manifest.shards[shard], self._manifest.block_samples
        if not 0 <= number < entry.blocks:
            url = self.indexes.url(shard)
            raise ArgumentError(f"shard {url}: has the blocks 0 to {entry.blocks - 1:,}, not {number:,}")
        return range(number * block_samples, min((number + 1) * block_samples, entry.samples))

    def _has_large_samples(self, shard: int) -> bool:
        """Return whether samples that are in the page cache are read faster one by one than as whole blocks."""
        entry = self._manifest.shards[shard]
        if entry.compression != "none" or self._cache is not None or is_remote(self.indexes.url(shard)):
            return False
        return entry.tar_size >= _LARGE_BYTES * entry.samples * max(1, len(self._fields))

    def _open_file(self, shard: int) -> OpenFile:
        file = self._files.get(shard)
        if file is None:
            file = OpenFile(self.indexes.url(shard))
            self._files.put(shard, file, 1)
        return file

    def _read_member(self, shard: int, number: int, member: FieldPlace) -> bytes:
        return bytes(self._read_members(shard, number, [member], gap=0)[0])

    def _read_parts(
        self, shard: int, number: int, rows: range, buffers: Buffers | None
    ) -> tuple[bytes | memoryview, BlockLayout]:
        """Return the bytes of a block's wanted fields, and where in these bytes each field is."""
        keys, found = self.indexes.members(shard, rows.start, rows.stop)
        members = [
            FieldPlace(row, keys[row], field, *place)
            for field, arrays in found.items()
            for row, place in enumerate(zip(*(array.tolist() for array in arrays), strict=True))
            if place[0] >= 0
        ]
        members.sort(key=lambda member: member.offset)  # a sample's fields come in their order in the shard
        data, places = self._read_members(shard, number, members, gap=REQUEST_BYTES, buffers=buffers)
        layout: BlockLayout = [(key, {}) for key in keys]
        for member, place in zip(members, places, strict=True):
            layout[member.row][1][member.field] = place, place + member.size
        return data, layout

    def _read_members(
        self, shard: int, number: int, members: Sequence[FieldPlace], *, gap: int, buffers: Buffers | None = None
    ) -> tuple[memoryview, list[int]]:
        """Return bytes that contain some checked members of a block, and where each member begins."""
        self._check_places(shard, number, ((m.key, m.offset, m.size) for m in members))
        url = self.indexes.url(shard)
        begins = np.array([member.offset for member in members], dtype=np.int64)
        parts = Parts(begins, begins + np.array([member.size for member in members], dtype=np.int64), gap=gap)
        out = memoryview(bytearray(parts.nbytes)) if buffers is None else buffers.take(parts.nbytes).data
        places = parts.places(begins).tolist()

        def read(*, fresh: bool) -> None:
            at = 0
            for start, stop in zip(parts.starts.tolist(), parts.stops.tolist(), strict=True):
                self._storage.read_into(url, start, out[at : at + stop - start], fresh=fresh)
                at += stop - start
            for member, place in zip(members, places, strict=True):
                member.check(out[place : place + member.size], url)

        read_right(url, read)
        return out, places

    def _read_whole(self, shard: int, number: int, buffers: Buffers | None = None) -> bytes | memoryview:
        table, url = self.indexes.blocks(shard).table, self.indexes.url(shard)
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

    def read_sample(self, shard: int, row: int, selection: FieldSelection) -> Sample:
        """Read one sample: the bytes of the selected fields, under their own names.

        If the shard is compressed or there is a cache, the whole block is read and kept for later samples.

        Raises:
            ShardError: A field is damaged, or the shard was cut or replaced.
            SampleError: A field is missing and not optional.
            DatasetError: The index is not usable.
        """
        group, at = divmod(row, self.indexes.group_rows(shard))
        rows, url = self.indexes.rows(shard, group), self.indexes.url(shard)
        key: str = rows.keys[at].as_py()
        sample: Sample = {KEY: key, URL: hide_secrets(url)}
        if self._columns:
            values = self.indexes.column_values(shard, row, row + 1)
            sample[COLUMNS] = {name: value for name, (value,) in values.items()}
        lie = sorted((int(arrays[0][at]), field) for field, arrays in rows.members.items())
        there = {field: rows.members[field] for offset, field in lie if offset >= 0}
        chosen = selection.choose({**sample, **there}).values() if selection.wanted else there
        fields = [field for field in dict.fromkeys(chosen) if field is not None and field not in sample]
        members = [FieldPlace(at, key, field, *(int(array[at]) for array in there[field])) for field in fields]
        number = row // self._manifest.block_samples
        if self._manifest.shards[shard].compression == "none" and self._cache is None:
            # On a disk a request costs little.
            data, places = self._read_members(shard, number, members, gap=REQUEST_BYTES if is_remote(url) else 0)
            pieces = [bytes(data[place : place + member.size]) for member, place in zip(members, places, strict=True)]
        else:
            pieces = self._cut_members(shard, number, members)
        return sample | {member.field: piece for member, piece in zip(members, pieces, strict=True)}

    def _cut_members(self, shard: int, number: int, members: Sequence[FieldPlace]) -> list[bytes]:
        """Return members of a block that is read whole and kept for later samples; each is compared as above."""
        self._check_places(shard, number, ((m.key, m.offset, m.size) for m in members))
        block = self._frames.get((shard, number))
        if block is None and members:
            block = bytes(self._read_whole(shard, number))
            self._frames.put((shard, number), block, len(block))
        begin, url = int(self.indexes.blocks(shard).table.offset[number]), self.indexes.url(shard)
        pieces = [(block or b"")[m.offset - begin : m.offset - begin + m.size] for m in members]
        for member, piece in zip(members, pieces, strict=True):
            member.check(piece, url)
        return pieces

    def _check_places(self, shard: int, number: int, places: Iterable[tuple[str, int, int]]) -> None:
        """Check that members (key, offset, size) lie within their block, before memory is taken for their sizes."""
        begin, end = self._bounds(shard, number)
        for key, offset, size in places:
            if offset < begin or not 0 <= size <= end - offset:
                raise damaged_index(self.indexes.index_url(shard), f"sample {key!r} is not in its block")

    def _bounds(self, shard: int, number: int) -> tuple[int, int]:
        table = self.indexes.blocks(shard).table  # this also checks the size of the shard
        return int(table.offset[number]), int(table.offset[number] + table.size[number])
