"""One pass over a shard, from its first byte to its last: it checks the shard and collects its index's content."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from shardkit.codecs.compress import decompress_frame, open_decompressed, read_seek_table
from shardkit.errors import ShardError
from shardkit.format.columns import ColumnMaker
from shardkit.format.index import (
    MAX_BLOCK_SAMPLES,
    BlockTable,
    IndexBuilder,
    ShardFacts,
    ShardIndex,
    choose_block_samples,
)
from shardkit.format.tar import Member, padding, read_members
from shardkit.hashing import UInt64Array
from shardkit.sample import RESERVED, split_name
from shardkit.storage.base import ByteStream, Storage, split_url

if TYPE_CHECKING:
    import pyarrow as pa

_SKIP_BYTES = 1 << 20


class ShardScan:
    """One pass over all bytes of a shard, which collects its index's content, up to an error if there is one.

    Args:
        storage: Serves the shard.
        url: The shard.
        block_samples: The number of samples in a block.
        columns: Computes the promoted columns.
        holds_data: Whether all members from ``samples`` have their data; otherwise only those that columns need.
        fresh: Fetch the shard again, because its cached data was wrong.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        block_samples: int,
        columns: ColumnMaker | None = None,
        holds_data: bool = False,
        fresh: bool = False,
    ) -> None:
        self.keys: list[str] = []
        self.fields: set[str] = set()
        self.compression = ""
        self._storage = storage
        self._url = url
        self._fresh = fresh
        self._holds_data = holds_data
        self._block_samples = block_samples
        self._columns = columns or ColumnMaker(None)
        self._builder = IndexBuilder()
        self._blocks: list[tuple[int, int, int]] = []  # offset, end, CRC-32
        self._tar_size = 0
        self._sha256 = ""
        self.file_size = storage.info(url).size

    def run(self) -> None:
        """Read the shard. Raises the same errors as ``samples``."""
        deque(self.samples(), maxlen=0)

    def samples(self) -> Iterator[tuple[str, dict[str, Member]]]:
        """Read the shard, and yield every sample's key and its members by field.

        Raises:
            ShardError: It is damaged, a sample has a field twice, or a name is not UTF-8.
            CodecError: A column cannot be computed.
        """
        stream = self._storage.open(self._url, fresh=self._fresh)
        try:
            opened = open_decompressed(stream)
            self.compression = opened.compression
            tape = _Tape(opened)
            members = read_members(tape, wanted=self._wants)
            for key, sample in group_members(members, self._url):
                self._add(key, sample, tape)
                yield key, sample
        finally:
            stream.close()
        self._tar_size = tape.end
        self._sha256 = tape.sha256.hexdigest()

    def _wants(self, name: str) -> bool:
        """Return whether a member's data must be held in memory; its checksum is computed without that."""
        parts = split_name(name)
        return parts is not None and (self._holds_data or self._columns.needs(parts[1]))

    def _add(self, key: str, sample: dict[str, Member], tape: "_Tape") -> None:
        members = list(sample.values())
        offset = members[0].header_offset
        end = members[-1].data_offset + members[-1].size + padding(members[-1].size)
        if len(self.keys) % self._block_samples == 0:
            tape.crc32(offset)  # bytes between two blocks belong to neither
            self._blocks.append((offset, offset, 0))
        block_offset, _, crc = self._blocks[-1]
        rows = []
        for field, member in sample.items():
            crc = tape.crc32(member.data_offset, crc)
            found = tape.crc32(member.data_offset + member.size)
            crc = crc32_combine(crc, found, member.size)
            rows.append((field, member.data_offset, member.size, found))
        self._blocks[-1] = (block_offset, end, tape.crc32(end, crc))
        values = self._columns.values(key, ((field, m.data) for field, m in sample.items() if m.data is not None))
        self._builder.add(key, offset, end - offset, rows, columns=values)
        self.keys.append(key)
        self.fields.update(sample)

    def facts(self) -> ShardFacts:
        """Return the facts of the whole shard."""
        return ShardFacts(
            split_url(self._url)[1],
            len(self.keys),
            self.file_size,
            self._tar_size,
            self._sha256,
            self.compression,
            self._block_samples,
            tuple(sorted(self.fields)),
        )

    def table(self) -> "pa.Table":
        """Return the index's rows."""
        return self._builder.table()

    def blocks(self) -> BlockTable:
        """Return the block table.

        Raises:
            ShardError: The shard's seek table is damaged.
        """
        offset, end, crc32 = np.array(self._blocks, dtype=np.int64).reshape(-1, 3).T
        size = end - offset
        if self.compression == "none":
            return BlockTable(offset, size, crc32, offset, size)
        frames = content_frames(self._storage, self._url, self.file_size) if self.compression == "zst" else {}
        stored = [frames.get(block) for block in zip(offset.tolist(), size.tolist(), strict=True)]
        found = [frame for frame in stored if frame]
        stored_offset, stored_size = (
            np.array(found if len(found) == len(stored) else [], dtype=np.int64).reshape(-1, 2).T
        )
        return BlockTable(offset, size, crc32, stored_offset, stored_size)


def group_members(members: Iterable[Member], url: str) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield every sample's key and its members by field: adjacent members with one key, except those readers skip.

    Raises:
        ShardError: A sample has a field twice, or a name is not UTF-8, which an index cannot hold.

    Example:
        >>> members = [Member(name, 0, 512, 0, b"") for name in ("a.jpg", "a.CLS", "__meta__/x.txt", "b.jpg")]
        >>> [(key, list(sample)) for key, sample in group_members(members, "train.tar")]
        [('a', ['jpg', 'cls']), ('b', ['jpg'])]
    """
    current = None
    sample: dict[str, Member] = {}
    for member in members:
        parts = split_name(member.name)
        if parts is None:
            continue
        key, field = parts
        problem = ""
        if not member.name.isascii() and any("\ud800" <= c <= "\udfff" for c in member.name):
            problem = "whose name is not UTF-8, which an index cannot hold; write the shard again with other names"
        elif key != current:
            if current is not None:
                yield current, sample
            current, sample = key, {}
        if not problem and (field in sample or field in RESERVED):
            problem = f"that would be {'a second' if field in sample else 'the'} field {field!r} of sample {key!r}, "
            problem += f"expected each once and none of {', '.join(sorted(RESERVED))}; pack it again under other names"
        if problem:
            raise ShardError(
                f"shard {url}: at byte {member.header_offset:,} it has a member {member.name!r} {problem}",
                url=url,
                offset=member.header_offset,
                key=key,
                field=field,
            )
        sample[field] = member
    if current is not None:
        yield current, sample


def count_repeated_keys(hashes: Sequence[UInt64Array], keys_of: Callable[[int], Sequence[str]]) -> int:
    """Return how many samples have a key that an earlier sample of the dataset has.

    Only keys whose hashes occur twice are read, so it takes 8 bytes of memory per sample, and the repeated keys.

    Args:
        hashes: For each shard the hashes of its keys.
        keys_of: Returns the keys of a shard, by its position in ``hashes``.

    Example:
        >>> from shardkit.hashing import hash_keys
        >>> keys = [["a", "b"], ["b", "c", "b"]]
        >>> count_repeated_keys([hash_keys(k) for k in keys], lambda i: keys[i])
        2
    """
    if not hashes:
        return 0
    everything = np.sort(np.concatenate(hashes))
    suspects = np.unique(everything[1:][everything[1:] == everything[:-1]])
    seen: set[str] = set()
    repeated = 0
    for i, shard in enumerate(hashes):
        positions = np.flatnonzero(np.isin(shard, suspects))
        keys = keys_of(i) if len(positions) else []
        for position in positions.tolist():
            key = keys[position]
            repeated += key in seen
            seen.add(key)
    return repeated


def content_frames(storage: Storage, url: str, file_size: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the stored offsets and sizes of a zst shard's frames, by the offsets and sizes of their contents.

    Frames without content are left out. The result is empty if the shard has no seek table.

    Raises:
        ShardError: The seek table is damaged.
    """
    frames = {}
    offset = 0
    for stored_offset, stored_size, size in read_seek_table(storage, url, file_size) or ():
        if size:
            frames[offset, size] = (stored_offset, stored_size)
        offset += size
    return frames


def find_block_samples(storage: Storage, shard_urls: Sequence[str], block_bytes: int) -> int:
    """Choose the number of samples in a block from the first shard that has samples; only its headers are read."""
    for url in shard_urls:
        stream = storage.open(url)
        try:
            opened = open_decompressed(stream)
            groups = group_members(read_members(opened, wanted=lambda _: False), url)
            offsets = [next(iter(sample.values())).header_offset for _, sample in groups]
        finally:
            stream.close()
        if not offsets:
            continue
        info = storage.info(url)
        if opened.compression == "none":
            return choose_block_samples(len(offsets), info.size, block_bytes)
        frames = content_frames(storage, url, info.size) if opened.compression == "zst" else {}
        ends = [offset + size for offset, size in frames]
        first = sum(offset < ends[0] for offset in offsets) if ends else 0
        if 0 < first <= MAX_BLOCK_SAMPLES and offsets[first : first + 1] in ([], ends[:1]):
            return first  # one frame per block, as shardkit writes them
        return choose_block_samples(len(offsets), offsets[-1] + (offsets[-1] - offsets[0]) // len(offsets), block_bytes)
    return choose_block_samples(0, 0, block_bytes)


def range_reader(storage: Storage, url: str, index: ShardIndex, *, fresh: bool = False) -> Callable[[int, int], bytes]:
    """Return a function that reads bytes of the uncompressed tar on their own, by offset and size.

    If the shard is compressed, the function reads the whole block and keeps it for the next call. It raises ShardError
    if the shard is damaged or does not have these bytes, and always if blocks cannot be read on their own.
    """
    blocks, facts = index.blocks, index.facts
    cached: tuple[int, bytes] = (-1, b"")

    def read(offset: int, size: int) -> bytes:
        nonlocal cached
        if not 0 <= offset <= offset + size <= facts.tar_size or not blocks.is_readable:
            raise ShardError(f"shard {url}: bytes {offset:,} to {offset + size:,} cannot be read on their own", url=url)
        if facts.compression == "none":
            return storage.read_range(url, offset, size, fresh=fresh)
        i = int(np.searchsorted(blocks.offset, offset, side="right")) - 1
        if i != cached[0]:
            start, stored_size = int(blocks.stored_offset[i]), int(blocks.stored_size[i])
            frame = storage.read_range(url, start, stored_size, fresh=fresh)
            cached = (i, decompress_frame(frame, int(blocks.size[i]), url=url, offset=int(blocks.offset[i])))
        start = offset - int(blocks.offset[i])
        return cached[1][start : start + size]

    return read


class _Tape:
    """A stream that hashes all bytes read from it, and keeps them until their checksum is taken.

    Only the CRC-32 of skipped bytes is kept, so that a member of any size takes little memory.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.url = stream.url
        self.size = stream.size
        self.sha256 = hashlib.sha256()
        self.end = 0  # the number of bytes read
        self._stream = stream
        self._kept: deque[bytes | memoryview | tuple[int, int]] = deque()  # or the size and CRC-32 of skipped bytes
        self._start = 0  # the offset of the first byte that is kept

    def read(self, n: int, /) -> bytes:
        data = self._stream.read(n)
        self.sha256.update(data)
        self._kept.append(data)
        self.end += len(data)
        return data

    def skip(self, n: int, /) -> None:
        size = crc = 0
        while n - size > padding(1) and (piece := self._stream.read(min(n - size - padding(1), _SKIP_BYTES))):
            self.sha256.update(piece)
            crc = crc32(piece, crc)
            size += len(piece)
        if size:
            self._kept.append((size, crc))
            self.end += size
        while size < n and (piece := self.read(n - size)):  # the padding, which does not belong to the data
            size += len(piece)

    def close(self) -> None:
        self._stream.close()

    def crc32(self, end: int, crc: int = 0) -> int:
        """Return the CRC-32 of the kept bytes up to ``end``, continued from ``crc``, and drop these bytes."""
        while self._start < end:
            kept = self._kept.popleft()
            if isinstance(kept, tuple):  # it ends before the padding, and so never after ``end``
                crc = crc32_combine(crc, kept[1], kept[0])
                self._start += kept[0]
                continue
            piece = memoryview(kept)
            part, rest = piece[: end - self._start], piece[end - self._start :]
            crc = crc32(part, crc)
            self._start += len(part)
            if rest:
                self._kept.appendleft(rest)
        return crc
