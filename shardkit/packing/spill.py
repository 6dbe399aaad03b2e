"""Samples of unknown size, encoded once into plain shards, so that a plan can be made from their sizes.

A segment of a spill is a tar of some samples in their original order, and a table of their sizes, the hashes of their
keys, their offsets and their CRC-32s. Only the tables are kept in memory: 32 bytes per sample. After the plan is made,
each segment is written again in the order of the plan. So each shard needs one range of each segment, which is read in
a few large pieces. No segment stays open: a worker opens one at a time, however many there are.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from shardkit.errors import ShardError, SourceError
from shardkit.format.manifest import read_whole, write_whole
from shardkit.format.shard_writer import EncodedSample, sample_size
from shardkit.format.tar import END_OF_ARCHIVE, member_header, padding, read_members
from shardkit.hashing import UInt64Array, hash_key
from shardkit.packing.records import ListedPart
from shardkit.packing.workers import StopSign, until
from shardkit.packing.writer import STAGING_FOLDER, too_large
from shardkit.sample import SOURCE
from shardkit.storage.base import Storage, is_remote, join, read_right, split_url
from shardkit.storage.local import absolute_url, local_path, remove_temporary_files, temporary_folder
from shardkit.storage.os_errors import open_file
from shardkit.storage.registry import storage_for
from shardkit.storage.spool import spooled

SEGMENT_BYTES = 256_000_000
_AHEAD_BYTES = 4_000_000  # that a worker reads ahead from all segments together
_COPY_BYTES = 1 << 20
_OWN_NAME = re.compile(r"[0-9a-f]{16}-\d{6,}(?:(?:-sorted)?\.tar|\.table)")
_ROW = struct.Struct("<qQqII")
_TABLE = np.dtype([("tar", "<i8"), ("hash", "<u8"), ("offset", "<i8"), ("source", "<u4"), ("crc32", "<u4")])

Table = npt.NDArray[np.void]


class Staging:
    """The folder of a pack's spill.

    Args:
        folder: The pack's folder.
        storage: Serves it.
        is_shared: Put the spill in ``__staging__`` of that folder, where every machine can read it, not in ``TMPDIR``.
    """

    def __init__(self, folder: str, storage: Storage, *, is_shared: bool) -> None:
        self.url = join(absolute_url(folder), STAGING_FOLDER) if is_shared else str(temporary_folder(folder))
        self.storage = storage if is_shared else storage_for(self.url)
        self._is_shared = is_shared

    def clear(self, *, keep: str | None = None) -> set[str]:
        """Delete the files of earlier calls, except names that begin with ``keep``; return these."""
        names = {name for name in self.storage.list(self.url) if _OWN_NAME.fullmatch(name)}
        kept = {name for name in names if keep is not None and name.startswith(keep)}
        for name in names - kept:
            self.storage.delete(join(self.url, name))
        if not is_remote(self.url):
            remove_temporary_files(self.url)
            folder = local_path(self.url)
            for emptied in [folder] if self._is_shared else [folder, folder.parent]:
                with contextlib.suppress(OSError):  # it does not exist, or is not empty
                    emptied.rmdir()
        return kept


@dataclass(frozen=True, slots=True)
class Segment:
    """Some samples of a spill.

    Attributes:
        url: Its tar's URL without ``.tar``.
        fields: The fields that occur in it.
        table: A structured array in the samples' original order: ``tar``, the bytes that the sample takes in a shard;
            ``hash`` of its key; ``offset`` in the segment's tar; ``source``, the additional bytes for its source in
            the segment; ``crc32`` of its bytes in the segment; (samples,).
        is_sorted: Its tar is in the order of the plan.
    """

    url: str
    fields: tuple[str, ...]
    table: Table
    is_sorted: bool = False

    @property
    def tar_url(self) -> str:
        """The URL of its tar."""
        return _tar_url(self.url, is_sorted=self.is_sorted)

    def save(self, storage: Storage) -> None:
        """Save its table and its facts for a later call of the same pack."""
        content = json.dumps([self.fields, self.is_sorted]).encode() + b"\n" + self.table.tobytes()
        write_whole(storage, f"{self.url}.table", hashlib.sha256(content).digest() + content, overwrite=True)


def read_segment(storage: Storage, url: str, there: Container[str]) -> Segment | None:
    """Return a segment that was saved before; None if a part of it is missing, or its table is damaged."""
    if split_url(f"{url}.table")[1] not in there:
        return None
    data = read_whole(storage, f"{url}.table")
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    described, _, table = data[32:].partition(b"\n")
    fields, is_sorted = json.loads(described)
    segment = Segment(url, tuple(fields), np.frombuffer(table, dtype=_TABLE), is_sorted)
    return segment if split_url(segment.tar_url)[1] in there else None


def write_segment(storage: Storage, url: str, samples: Iterable[EncodedSample], *, shard_bytes: int) -> Segment:
    """Write one segment; it gets its name only when it is complete.

    Raises:
        SampleError: A sample is larger than a shard. No segment is left.
        OSError: It could not be written. No segment is left.
    """
    rows = bytearray()
    fields: set[str] = set()
    offset = 0
    with storage.create(f"{url}.tar", overwrite=True) as file:
        for sample in samples:
            size = sample_size(sample.key, ((name, len(data)) for name, data in sample.members))
            if size + len(END_OF_ARCHIVE) > shard_bytes:
                raise too_large(sample.key, size, shard_bytes)
            record = _to_tar(sample)
            file.write(record)
            rows += _ROW.pack(size, hash_key(sample.key), offset, len(record) - size, crc32(record))
            fields.update(name for name, _ in sample.members)
            offset += len(record)
        file.write(END_OF_ARCHIVE)
    return Segment(url, tuple(sorted(fields)), np.frombuffer(rows, dtype=_TABLE))


def write_segments(
    storage: Storage, url: str, samples: Iterable[EncodedSample], *, shard_bytes: int
) -> Iterator[Segment]:
    """Write samples to as many segments as they need, and yield each segment when it is complete."""
    iterator = iter(samples)
    for number, first in enumerate(iterator):
        segment = _up_to(SEGMENT_BYTES, first, iterator)
        yield write_segment(storage, segment_url(url, number), segment, shard_bytes=shard_bytes)


def _up_to(size: int, first: EncodedSample, rest: Iterator[EncodedSample]) -> Iterator[EncodedSample]:
    yield first
    total = sum(len(data) for _, data in first.members)
    while total < size:
        sample = next(rest, None)
        if sample is None:
            return
        yield sample
        total += sum(len(data) for _, data in sample.members) + 512


def segment_url(url: str, number: int) -> str:
    """Return the URL of a spill's segment, without suffix."""
    return f"{url}-{number:06d}"


def _tar_url(url: str, *, is_sorted: bool) -> str:
    return f"{url}-sorted.tar" if is_sorted else f"{url}.tar"


@dataclass(frozen=True)
class SegmentTask:
    """Writes one segment of samples of a listed source."""

    storage: Storage
    url: str
    samples: ListedPart
    shard_bytes: int

    def run(self, stop: StopSign) -> Segment:
        """Write and save the segment. Raises Cancelled soon after ``stop`` is set; nothing is left then."""
        segment = write_segment(self.storage, self.url, until(stop, self.samples), shard_bytes=self.shard_bytes)
        segment.save(self.storage)
        return segment


@dataclass(frozen=True)
class SortTask:
    """Writes a segment again, with its samples in the order of the plan."""

    storage: Storage
    url: str
    number: int
    rows: Table  # the table's rows of its samples, in that order

    def run(self, stop: StopSign) -> int:
        """Write it and return its number. Raises Cancelled soon after ``stop`` is set; nothing is left then."""
        raw = _tar_url(self.url, is_sorted=False)
        columns = (self.rows["offset"], _sizes(self.rows), self.rows["crc32"])
        with (
            _nearby(self.storage, raw) as descriptor,
            self.storage.create(_tar_url(self.url, is_sorted=True), overwrite=True) as file,
        ):
            for offset, size, crc in until(stop, zip(*(column.tolist() for column in columns), strict=True)):
                file.write(_checked(os.pread(descriptor, size, offset), self.storage, raw, offset, size, crc))
            file.write(END_OF_ARCHIVE)
        return self.number


class Spill:
    """Encoded samples in segments, read by position.

    Args:
        storage: Serves the segments.
        url: Their URL without numbers.
        segments: All of them, in order.
        is_kept: A later call of the same pack may use them.

    Attributes:
        tar_sizes: The bytes that each sample takes in a shard: int64, (samples,).
        hashes: ``hash_key`` of each key: uint64, (samples,).
        digest: A hash of all samples and their order.
    """

    def __init__(self, storage: Storage, url: str, segments: Sequence[Segment], *, is_kept: bool) -> None:
        self._storage = storage
        self._is_kept = is_kept
        self._url = url
        self._ends = np.cumsum([len(segment.table) for segment in segments], dtype=np.int64)
        self._table = np.concatenate([np.zeros(0, dtype=_TABLE), *(segment.table for segment in segments)])
        parts = np.split(self._table, self._ends[:-1])  # views, so that each table is there once
        self._segments = [replace(segment, table=part) for segment, part in zip(segments, parts, strict=False)]
        self.tar_sizes: npt.NDArray[np.int64] = self._table["tar"]
        self.hashes: UInt64Array = self._table["hash"]
        content = hashlib.sha256()
        for name in ("tar", "hash", "crc32"):
            content.update(np.ascontiguousarray(self._table[name]).data)
        self.digest = content.hexdigest()

    def sort_tasks(self, order: npt.NDArray[np.int64]) -> Iterator[SortTask]:
        """Yield tasks that write the segments again, with each segment's samples adjacent in the given order.

        Segments that an earlier call of the same pack sorted are left out. Pass each result to ``end_sort``.
        """
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        for number, (segment, ranks) in enumerate(zip(self._segments, np.split(rank, self._ends[:-1]), strict=False)):
            if not segment.is_sorted:
                positions = np.argsort(ranks)
                rows = segment.table[positions]
                sizes = _sizes(rows)
                segment.table["offset"][positions] = np.cumsum(sizes) - sizes
                yield SortTask(self._storage, segment.url, number, rows)

    def end_sort(self, number: int) -> int:
        """Record that a segment is sorted, delete the unsorted one, and return its number of samples."""
        segment = self._segments[number]
        self._segments[number] = replace(segment, is_sorted=True)
        if self._is_kept:
            self._segments[number].save(self._storage)
        self._storage.delete(segment.tar_url)
        return len(segment.table)

    def take(self, positions: npt.NDArray[np.int64], /) -> "SpillPart":
        """Return some of the samples, in that order."""
        segments = np.searchsorted(self._ends, positions, side="right").astype(np.int32)
        is_sorted = np.array([segment.is_sorted for segment in self._segments], dtype=np.bool_)
        rows = self._table[positions]
        offsets, sizes = rows["offset"], _sizes(rows)
        by_segment = np.argsort(segments, kind="stable")
        follows = offsets[by_segment][1:] == (offsets + sizes)[by_segment][:-1]
        are_ranges = follows[np.diff(segments[by_segment]) == 0].all()  # one per segment
        ahead = _AHEAD_BYTES if are_ranges else 0
        return SpillPart(self._storage, self._url, is_sorted, segments, offsets, sizes, rows["crc32"], ahead)

    def keys(self) -> Iterator[str]:
        """Yield all keys, in order."""
        for begin, segment in zip(self._ends, self._segments, strict=True):
            by_offset = np.argsort(segment.table["offset"])
            keys = [""] * len(by_offset)
            part = self.take(begin - len(by_offset) + by_offset)
            for row, sample in zip(by_offset.tolist(), part, strict=True):
                keys[row] = sample.key
            yield from keys

    def fields(self) -> Iterator[tuple[str, ...]]:
        """Yield fields that occur together, in some sample or in some segment."""
        return (segment.fields for segment in self._segments)


@dataclass(frozen=True, slots=True)
class SpillPart:
    """Some samples of a spill: for each its segment, and its offset, size and CRC-32 there."""

    storage: Storage
    url: str
    is_sorted: npt.NDArray[np.bool_]  # for each segment
    segments: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    crcs: npt.NDArray[np.uint32]
    ahead: int

    def __iter__(self) -> Iterator[EncodedSample]:
        """Yield the samples; each is compared with its CRC-32.

        Raises:
            SourceError: A segment has other bytes than were written.
        """
        numbers = self.segments.tolist()
        ends = dict(
            zip(numbers, (self.offsets + self.sizes).tolist(), strict=True)
        )  # of the wanted bytes of each segment
        ahead = self.ahead // max(1, len(ends))
        pieces: dict[int, tuple[int, bytes]] = {}
        rows = zip(numbers, self.offsets.tolist(), self.sizes.tolist(), self.crcs.tolist(), strict=True)
        for number, offset, size, crc in rows:
            url = _tar_url(segment_url(self.url, number), is_sorted=bool(self.is_sorted[number]))
            start, piece = pieces.pop(number, (0, b""))
            if not start <= offset <= start + len(piece) - size:
                start, piece = offset, _read(self.storage, url, offset, max(size, min(ahead, ends[number] - offset)))
            if offset + size < start + len(piece):
                pieces[number] = start, piece
            record = piece[offset - start : offset - start + size]
            yield _from_tar(_checked(record, self.storage, url, offset, size, crc))


def _sizes(rows: Table) -> npt.NDArray[np.int64]:
    sizes: npt.NDArray[np.int64] = rows["tar"] + rows["source"]
    return sizes


def _to_tar(sample: EncodedSample) -> bytes:
    members = sample.members
    if sample.source is not None:
        members = (*members, (SOURCE, sample.source.encode()))
    parts = []
    for name, data in members:
        parts += [member_header(f"{sample.key}.{name}", len(data)), data, bytes(padding(len(data)))]
    return b"".join(parts)


class _Tar(io.BytesIO):
    url = "a spill"
    size: int | None = None

    def skip(self, n: int) -> None:
        self.seek(n, io.SEEK_CUR)


def _from_tar(record: bytes) -> EncodedSample:
    key, source, members = "", None, []
    for member in read_members(_Tar(record + END_OF_ARCHIVE)):
        folder, slash, name = member.name.rpartition("/")
        stem, _, field = name.partition(".")
        key = folder + slash + stem
        data = member.data or b""
        if field == SOURCE:
            source = data.decode()
        else:
            members.append((field, data))
    return EncodedSample(key, tuple(members), source)


def _read(storage: Storage, url: str, offset: int, size: int) -> bytes:
    """Return a piece of a segment, or no bytes if it cannot be read; ``_checked`` then raises the error."""
    try:
        return storage.read_range(url, offset, size)
    except (FileNotFoundError, ShardError):
        return b""


def _checked(record: bytes, storage: Storage, url: str, offset: int, size: int, crc: int) -> bytes:
    """Return a sample's bytes if they match their CRC-32; otherwise read them again.

    Raises:
        SourceError: They are not the bytes that were written.
    """
    if len(record) == size and crc32(record) == crc:
        return record

    def read(*, fresh: bool) -> bytes:
        data = storage.read_range(url, offset, size, fresh=fresh)
        if crc32(data) != crc:
            raise ShardError(f"{url}: has other bytes at {offset:,} than were written", url=url, offset=offset)
        return data

    try:
        return read_right(url, read)
    except (FileNotFoundError, ShardError) as error:
        raise _lost(url) from error


def _lost(url: str) -> SourceError:
    return SourceError(
        f"{url}: was cut or changed while it was in use (it holds samples until they are packed); pack again", url=url
    )


@contextlib.contextmanager
def _nearby(storage: Storage, url: str) -> Iterator[int]:
    """Provide a descriptor for reading a segment's tar in any order; a remote tar is copied to this machine's disk."""
    if is_remote(url):
        with spooled(url) as file, contextlib.closing(storage.open(url)) as stream:
            while data := stream.read(_COPY_BYTES):
                file.write(data)
            file.flush()
            yield file.fileno()
        return
    try:
        descriptor = open_file(local_path(url), url)
    except FileNotFoundError as error:
        raise _lost(url) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
