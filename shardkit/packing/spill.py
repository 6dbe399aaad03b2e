"""Samples of unknown size, encoded once into files on disk, so that a plan can be made from their sizes.

A spill is a few segments. A segment is a file of records, each a JSON header (key, source, fields and sizes) and the
fields' bytes, followed by a table: where each record begins, the sample's size in a tar, the hash of its key. Only
the tables are kept in memory: 24 bytes a sample.
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.errors import SourceError
from shardkit.format.shard_writer import EncodedSample, sample_size
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.hashing import UInt64Array, hash_key
from shardkit.packing.writer import too_large
from shardkit.storage.base import TEMPORARY_PREFIX, join
from shardkit.storage.local import local_path
from shardkit.storage.os_errors import open_file, os_errors
from shardkit.storage.registry import storage_for

SPILL_NAME = f"{TEMPORARY_PREFIX}spill"
SEGMENT_BYTES = 256_000_000
_HEADER = struct.Struct("<I")
_FOOTER = struct.Struct("<QQ64s64s")  # where the table begins, number of samples, content, fingerprint
_DTYPE = np.dtype([("offset", "<i8"), ("tar", "<i8"), ("hash", "<u8")])


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a spill.

    Attributes:
        url: The file.
        content: SHA-256 of its records, in hexadecimal.
        fingerprint: What it was made of: SHA-256 in hexadecimal; empty if that is not known.
        end: Where the last record ends.
        samples: The table, a structured array: offset, tar, hash; (samples,).
    """

    url: str
    content: str
    fingerprint: str
    end: int
    samples: npt.NDArray[np.void]


def write_segment(url: str, samples: Iterable[EncodedSample], *, shard_bytes: int, fingerprint: str = "") -> Segment:
    """Write one segment; it has its name only when it is complete.

    Raises:
        SampleError: A sample is larger than a shard. There is no segment then.
        OSError: It could not be written. Likewise.
    """
    content = hashlib.sha256()
    rows: list[tuple[int, int, int]] = []
    parts: list[npt.NDArray[np.void]] = []
    end = 0
    with storage_for(url).create(url, overwrite=True) as file:
        for key, members, source in samples:
            sizes = [(name, len(data)) for name, data in members]
            size = sample_size(key, sizes)
            if size + len(END_OF_ARCHIVE) > shard_bytes:
                raise too_large(key, size, shard_bytes)
            header = json.dumps([key, source, sizes]).encode()
            record = b"".join([_HEADER.pack(len(header)), header, *(data for _, data in members)])
            content.update(record)
            file.write(record)
            rows.append((end, size, hash_key(key)))
            end += len(record)
            if len(rows) == 1 << 16:
                parts.append(np.array(rows, dtype=_DTYPE))
                rows = []
        parts.append(np.array(rows, dtype=_DTYPE))
        table = np.concatenate(parts)
        file.write(table.tobytes())
        file.write(_FOOTER.pack(end, len(table), content.hexdigest().encode(), fingerprint.encode()))
    return Segment(url, content.hexdigest(), fingerprint, end, table)


def read_segment(url: str) -> Segment | None:
    """Return a segment that was written before; None if there is none."""
    try:
        with os_errors(url), os.fdopen(open_file(local_path(url), url), "rb") as file:
            file.seek(-_FOOTER.size, io.SEEK_END)
            end, count, content, fingerprint = _FOOTER.unpack(file.read())
            file.seek(end)
            table = np.frombuffer(file.read(count * _DTYPE.itemsize), dtype=_DTYPE)
    except FileNotFoundError:
        return None
    return Segment(url, content.decode(), fingerprint.rstrip(b"\0").decode(), end, table)


def write_segments(folder: str, samples: Iterable[EncodedSample], *, shard_bytes: int) -> Iterator[Segment]:
    """Write samples to as many segments as they need; yields each when it is complete."""
    iterator = iter(samples)
    for number, first in enumerate(iterator):
        segment = _up_to(SEGMENT_BYTES, first, iterator)
        yield write_segment(segment_url(folder, number), segment, shard_bytes=shard_bytes)


def _up_to(size: int, first: EncodedSample, rest: Iterator[EncodedSample]) -> Iterator[EncodedSample]:
    yield first
    total = sum(len(data) for _, data in first.members)
    while total < size:
        sample = next(rest, None)
        if sample is None:
            return
        yield sample
        total += sum(len(data) for _, data in sample.members) + 512


def segment_url(folder: str, number: int) -> str:
    """Return where a segment lies in the spill's folder."""
    return join(folder, f"{number:06d}.segment")


class Spill:
    """Encoded samples on disk, read by position.

    Attributes:
        tar_sizes: The bytes that each sample takes in a tar: int64, (samples,).
        hashes: ``hash_key`` of each key: uint64, (samples,).
        digest: A hash of all samples and their order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._urls = [segment.url for segment in segments]
        self._ends = np.array([segment.end for segment in segments], dtype=np.int64)
        self._last = np.cumsum([len(segment.samples) for segment in segments], dtype=np.int64) - 1
        self._table = np.concatenate([np.zeros(0, dtype=_DTYPE), *(segment.samples for segment in segments)])
        self.tar_sizes: npt.NDArray[np.int64] = self._table["tar"]
        self.hashes: UInt64Array = self._table["hash"]
        self.digest = hashlib.sha256("".join(segment.content for segment in segments).encode()).hexdigest()

    def take(self, positions: npt.NDArray[np.int64]) -> "SpillPart":
        """Return some of the samples, in that order."""
        segment = np.searchsorted(self._last, positions)
        is_last = self._last[segment] == positions
        following = self._table["offset"][np.where(is_last, 0, positions + 1)]
        begin = self._table["offset"][positions]
        size = np.where(is_last, self._ends[segment], following) - begin
        return SpillPart(self._urls, segment.astype(np.int32), begin, size)

    def key(self, position: int) -> str:
        """Return a sample's key."""
        return next(iter(self.take(np.array([position])))).key


@dataclass(frozen=True, slots=True)
class SpillPart:
    """Some samples of a spill: for each its segment, and its record's offset and size."""

    urls: Sequence[str]
    segments: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __iter__(self) -> Iterator[EncodedSample]:
        """Yield the samples, one read each."""
        descriptors: list[int] = []
        try:
            descriptors += (open_file(local_path(url), url) for url in self.urls)
            segments, offsets, sizes = self.segments.tolist(), self.offsets.tolist(), self.sizes.tolist()
            for segment, offset, size in zip(segments, offsets, sizes, strict=True):
                with os_errors(self.urls[segment]):
                    record = os.pread(descriptors[segment], size, offset)
                if len(record) != size:
                    raise SourceError(f"{self.urls[segment]}: was cut while it was in use; run the pack again")
                yield _parse(record)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _parse(record: bytes) -> EncodedSample:
    (header_size,) = _HEADER.unpack_from(record)
    at = _HEADER.size + header_size
    key, source, sizes = json.loads(record[_HEADER.size : at])
    members = []
    for name, size in sizes:
        members.append((name, record[at : at + size]))
        at += size
    return EncodedSample(key, tuple(members), source)
