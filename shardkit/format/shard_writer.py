"""Samples -> one shard.

``ShardFile`` writes the bytes. One helper thread hashes blocks, and another compresses and writes them, while the next
block is assembled. ``OpenShard`` publishes the index of the finished file, and then gives the file its name.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

import numpy as np
from isal.isal_zlib import crc32

from shardkit.codecs.compress import Compression, Compressor, compress_frame, gzip_writer, parse_compression, seek_table
from shardkit.codecs.registry import Codec, encode
from shardkit.errors import SampleError
from shardkit.format.columns import promoted_columns
from shardkit.format.index import BlockTable, IndexBuilder, ShardFacts, ShardIndex, describe_shard, publish_index
from shardkit.format.manifest import Shard
from shardkit.format.parquet import FileFacts
from shardkit.format.tar import END_OF_ARCHIVE, MAX_MEMBER_BYTES, member_header, member_size
from shardkit.sample import KEY, SOURCE, check_fields, check_key, fields_of
from shardkit.storage.base import Storage, format_bytes, join

if TYPE_CHECKING:
    import pyarrow as pa

_PADDING = bytes(512)
_BLOCKS_IN_FLIGHT = 4  # two to six are equally fast; with one, the helper threads are often idle
_AUTO_BYTES = 8_000_000  # of payload that are compressed to decide
_AUTO_RATIO = 0.9


class EncodedSample(NamedTuple):
    """A sample ready to write: its key, its fields' names and bytes sorted by name, and the file it was made from."""

    key: str
    members: tuple[tuple[str, bytes], ...]
    source: str | None = None


class WrittenShard(NamedTuple):
    """A complete shard's entry in the manifest, and more facts of the shard.

    Attributes:
        shard: The manifest's entry.
        fields: For each field, the number of samples that have it.
        columns: The promoted columns and their Arrow types.
    """

    shard: Shard
    fields: dict[str, int]
    columns: "pa.Schema"
    blocks: BlockTable


def encode_sample(sample: Mapping[str, Any], *, codecs: Mapping[str, Codec] | None = None) -> EncodedSample:
    """Return a sample with its fields encoded as bytes.

    Args:
        sample: Its ``__key__`` and its fields' values.
        codecs: The registered codecs, by default those of this process.

    Raises:
        SampleError: Its key or one of its fields would not be read back unchanged, or is larger than a reader accepts.
        CodecError: A value cannot be encoded.

    Example:
        >>> encode_sample({"__key__": "0001", "cls": 7}).members
        (('cls', b'7'),)
    """
    key = check_key(check_sample(sample).get(KEY))
    fields = fields_of(sample)
    check_fields(key, fields)
    members = []
    for field in fields:
        value = sample[field]
        data = value if type(value) is bytes else encode(field, value, key=key, codecs=codecs)
        if len(data) > MAX_MEMBER_BYTES:
            raise SampleError(
                f"sample {key!r}: field {field!r} has {format_bytes(len(data))}, readers accept "
                f"{format_bytes(MAX_MEMBER_BYTES)}; split it into several samples",
                key=key,
                field=field,
            )
        members.append((field, data))
    source = sample.get(SOURCE)
    if source is not None:  # a file's name may not be UTF-8, but text in Parquet must be
        source = str(source).encode("utf-8", "backslashreplace").decode()
    return EncodedSample(key, tuple(members), source)


def check_sample(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``sample`` if it is a mapping with a key.

    Raises:
        SampleError: It is not a mapping, or has no key.
    """
    if not isinstance(sample, Mapping):
        raise SampleError(
            f"{str(sample)[:80]!r}: is {type(sample).__name__}, expected a dict of '__key__' and fields; of a table, "
            "give the rows, as table.to_dict('records')"
        )
    if KEY not in sample:
        raise SampleError(
            f"a sample of {', '.join(map(repr, sample)) or 'nothing'}: has no '__key__', its name in the dataset; give "
            "each sample one, for example '__key__': f'{i:08d}'"
        )
    return sample


def sample_size(key: str, sizes: Iterable[tuple[str, int]]) -> int:
    """Return the bytes that a sample takes in a tar: headers, data and padding.

    Example:
        >>> sample_size("0001", [("cls", 1), ("jpg", 1000)])
        2560
    """
    return sum(member_size(f"{key}.{field}", size) for field, size in sizes)


def choose_compression(payloads: Iterable[bytes]) -> Compression:
    """Return the compression that ``auto`` means for these payloads: ``zst`` if they shrink by 10 % or more, else none.

    Headers and padding are left out, because they always shrink. At most 8 MB are tried.

    Example:
        >>> choose_compression([b"the same words " * 1000]).name
        'zst'
    """
    zst = parse_compression("zst")
    before = after = 0
    pieces: list[bytes] = []
    for data in payloads:
        pieces.append(data)
        before += len(data)
        if before >= _AUTO_BYTES:
            break
    blob = b"".join(pieces)[:_AUTO_BYTES]
    for start in range(0, len(blob), 1_000_000):
        after += len(compress_frame(blob[start : start + 1_000_000], zst.level))
    return zst if blob and after <= _AUTO_RATIO * len(blob) else parse_compression("none")


class ShardFile:
    """One shard that is being written to a file. ``finish`` completes it; ``close`` abandons it.

    Args:
        file: The file for the shard's bytes; the caller publishes or removes it.
        name: The shard's file name.
        compression: The shard's compression.
        block_samples: The number of samples in a block.
        plan: The digest of the pack that this shard belongs to.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        *,
        compression: Compression,
        block_samples: int,
        plan: str = "",
    ) -> None:
        self.samples = 0
        self.tar_size = 0
        self._file = file
        self._name = name
        self._compression = compression
        self._block_samples = block_samples
        self._plan = plan
        self._index = IndexBuilder()
        self._parts: list[bytes] = []
        self._block_start = 0
        self._offsets = array("q")
        self._sizes = array("q")
        self._crcs = array("q")
        self._stored: list[int] = []
        self._sha256 = hashlib.sha256()
        self._gzip: Compressor | None = gzip_writer(compression.level) if compression.name == "gz" else None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="shardkit-hash")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shardkit-write")
        self._in_flight: deque[tuple[Future[None], Future[tuple[int, int]]]] = deque()

    def add(self, sample: EncodedSample, columns: Mapping[str, object] | None = None) -> None:
        """Write the next sample.

        Args:
            sample: The sample.
            columns: The values of its promoted columns.

        Raises:
            SampleError: It is too large for one zstd frame. It was not written.
            StorageError: The file could not be written, perhaps because the disk is full. The shard must be abandoned.
        """
        key, members, source = sample
        start = position = self.tar_size
        parts = []
        rows = []
        for field, data in members:
            size = len(data)
            header = member_header(f"{key}.{field}", size)
            parts.append(header)
            parts.append(data)
            position += len(header)
            rows.append((field, position, size, crc32(data)))
            position += size
            if rest := -size % 512:
                parts.append(_PADDING[:rest])
                position += rest
        if position - self._block_start >= 1 << 32 and self._compression.name == "zst":
            raise SampleError(
                f"sample {key!r}: its block would have {format_bytes(position - self._block_start)}, and a zstd frame "
                "has less than 4 GiB; pass compression='none', or smaller block_bytes",
                key=key,
            )
        self._index.add(key, start, position - start, rows, columns=columns, source=source)
        self._parts += parts
        self.tar_size = position
        self.samples += 1
        if self.samples % self._block_samples == 0:
            self._end_block()

    def finish(self) -> tuple[ShardFacts, BlockTable, "pa.Table"]:
        """Write the remaining samples and the end of the archive; return the index's contents: facts, blocks and table.

        Raises:
            StorageError: The file could not be written.
        """
        if self._parts:
            self._end_block()
        while self._in_flight:
            self._collect()
        self.tar_size += len(END_OF_ARCHIVE)
        self._sha256.update(END_OF_ARCHIVE)
        _, end_stored = self._store(END_OF_ARCHIVE)
        if self._gzip:
            self._write(self._gzip.flush())
        if self._compression.name == "zst":
            blocks = zip(self._stored, self._sizes, strict=True)
            self._write(seek_table([*blocks, (end_stored, len(END_OF_ARCHIVE))]))
        self.close()
        facts = ShardFacts(
            shard=self._name,
            samples=self.samples,
            file_size=self._file.tell(),
            tar_size=self.tar_size,
            sha256=self._sha256.hexdigest(),
            compression=self._compression.name,
            block_samples=self._block_samples,
            fields=tuple(sorted(self._index.fields)),
            plan=self._plan,
        )
        return facts, self._block_table(), self._index.table()

    def close(self) -> None:
        """End the helper threads; blocks that they have not yet written are dropped. The file stays open."""
        for helper in (self._hasher, self._writer):
            helper.shutdown(wait=True, cancel_futures=True)

    def _end_block(self) -> None:
        self._offsets.append(self._block_start)
        self._sizes.append(self.tar_size - self._block_start)
        data = b"".join(self._parts)
        self._parts = []
        self._block_start = self.tar_size
        if len(self._in_flight) == _BLOCKS_IN_FLIGHT:
            self._collect()
        self._in_flight.append((self._hasher.submit(self._sha256.update, data), self._writer.submit(self._store, data)))

    def _collect(self) -> None:
        hashed, written = self._in_flight.popleft()
        hashed.result()
        crc, stored = written.result()
        self._crcs.append(crc)
        self._stored.append(stored)

    def _store(self, data: bytes) -> tuple[int, int]:
        """Compress and write; return the CRC-32 and the stored size. All of it releases the GIL."""
        crc = crc32(data)
        if self._gzip:
            return crc, self._write(self._gzip.compress(data))
        if self._compression.name == "zst":
            data = compress_frame(data, self._compression.level)
        return crc, self._write(data)

    def _write(self, data: bytes) -> int:
        self._file.write(data)
        return len(data)

    def _block_table(self) -> BlockTable:
        offset, size, crc32 = (np.array(values, dtype=np.int64) for values in (self._offsets, self._sizes, self._crcs))
        if self._compression.name == "none":
            return BlockTable(offset, size, crc32, offset, size)
        stored_size = np.array(self._stored if self._compression.name == "zst" else [], dtype=np.int64)
        stored_offset = np.cumsum(stored_size) - stored_size
        return BlockTable(offset, size, crc32, stored_offset, stored_size)


class OpenShard:
    """A shard that is being written into a folder; it gets its name after it has an index, or leaves nothing.

    Args:
        storage: Serves the folder.
        folder: The dataset's folder.
        stem: The shard's name without suffixes.
        compression: The shard's compression.
        block_samples: The number of samples in a block.
        plan: The digest of the pack that it belongs to.
        overwrite: Replace an existing file of its name.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        stem: str,
        *,
        compression: Compression,
        block_samples: int,
        plan: str = "",
        overwrite: bool = False,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._stack = ExitStack()
        name = stem + compression.suffix
        file = self._stack.enter_context(self._storage.create(join(folder, name), overwrite=overwrite))
        self.file = ShardFile(file, name, compression=compression, block_samples=block_samples, plan=plan)
        self._stack.callback(self.file.close)

    def publish(self) -> WrittenShard:
        """Finish the shard, publish its index, and then give it its name, so that every shard has an index."""
        with self._stack:
            facts, blocks, table = self.file.finish()
            shard = publish_index(self._storage, self._folder, facts.shard, table, facts, blocks)
        fields = _count_fields(table, facts.fields)
        return WrittenShard(shard, fields, promoted_columns(table.schema), blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the shard if it was not published."""
        self._stack.__exit__(kind or GeneratorExit, error or GeneratorExit(), traceback)


def written_shard(index: ShardIndex, facts: FileFacts) -> WrittenShard:
    """Return a complete shard's facts from its index, and from the facts of that index's file."""
    shard = describe_shard(index.facts.shard, index.facts, index.blocks, facts)
    sizes = index.rows([f"{field}:size" for field in index.facts.fields])
    return WrittenShard(shard, _count_fields(sizes, index.facts.fields), promoted_columns(index.schema), index.blocks)


def _count_fields(table: "pa.Table", fields: Iterable[str]) -> dict[str, int]:
    """Return, for each field, the number of samples that have it."""
    return {field: len(table) - table.column(f"{field}:size").null_count for field in fields}
