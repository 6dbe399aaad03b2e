"""Samples of unknown size, encoded once into files on disk, so that a plan can be made from their sizes.

A spill is a few segments. A segment is a file of records, each a JSON header (key, source, fields and sizes) and the
fields' bytes, followed by three arrays: the records' sizes, the samples' sizes in a tar, the hashes of their keys.
Only the arrays are kept in memory: 24 bytes a sample.
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.errors import SourceError
from shardkit.hashing import UInt64Array, hash_key
from shardkit.shards import EncodedSample, sample_size
from shardkit.storage import TEMPORARY_PREFIX, join, local_path, storage_for
from shardkit.tar import END_OF_ARCHIVE
from shardkit.writer import too_large

SPILL_NAME = f"{TEMPORARY_PREFIX}spill"
SEGMENT_BYTES = 256_000_000
_HEADER = struct.Struct("<I")
_FOOTER = struct.Struct("<QQ64s64s")  # where the arrays begin, number of samples, content, fingerprint
_DTYPE = np.dtype([("record", "<u8"), ("tar", "<u8"), ("hash", "<u8")])


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a spill.

    Attributes:
        url: The file.
        content: SHA-256 of its records, in hexadecimal.
        fingerprint: What it was made of: SHA-256 in hexadecimal; empty if that is not known.
        samples: Sizes and hashes, a structured array: record, tar, hash; (samples,).
    """

    url: str
    content: str
    fingerprint: str
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
            rows.append((len(record), size, hash_key(key)))
            if len(rows) == 1 << 16:
                parts.append(np.array(rows, dtype=_DTYPE))
                rows = []
        parts.append(np.array(rows, dtype=_DTYPE))
        table = np.concatenate(parts)
        end = file.tell()
        file.write(table.tobytes())
        file.write(_FOOTER.pack(end, len(table), content.hexdigest().encode(), fingerprint.encode()))
    return Segment(url, content.hexdigest(), fingerprint, table)


def read_segment(url: str) -> Segment | None:
    """Return a segment that was written before; None if there is none."""
    try:
        with local_path(url).open("rb") as file:
            file.seek(-_FOOTER.size, io.SEEK_END)
            end, count, content, fingerprint = _FOOTER.unpack(file.read())
            file.seek(end)
            table = np.frombuffer(file.read(count * _DTYPE.itemsize), dtype=_DTYPE)
    except FileNotFoundError:
        return None
    return Segment(url, content.decode(), fingerprint.rstrip(b"\0").decode(), table)


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


@dataclass
class Spill:
    """Encoded samples on disk, read by position. It is small to pickle after ``take``.

    Attributes:
        tar_sizes: The bytes that each sample takes in a tar: int64, (samples,).
        hashes: ``hash_key`` of each key: uint64, (samples,).
        digest: A hash of all samples and their order.
    """

    urls: Sequence[str]
    _segment: npt.NDArray[np.int32] = field(repr=False)
    _offset: npt.NDArray[np.int64] = field(repr=False)
    _size: npt.NDArray[np.int64] = field(repr=False)
    tar_sizes: npt.NDArray[np.int64] = field(repr=False)
    hashes: UInt64Array = field(repr=False)
    digest: str = ""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Spill":
        """Return the spill that segments make, in their order."""
        counts = [len(s.samples) for s in segments]
        sizes = [s.samples["record"].astype(np.int64) for s in segments]
        nothing = np.zeros(0, dtype=_DTYPE)
        digest = hashlib.sha256("".join(s.content for s in segments).encode()).hexdigest()
        return cls(
            urls=[s.url for s in segments],
            _segment=np.repeat(np.arange(len(segments), dtype=np.int32), counts),
            _offset=np.concatenate([np.zeros(0, np.int64), *(np.cumsum(size) - size for size in sizes)]),
            _size=np.concatenate([np.zeros(0, np.int64), *sizes]),
            tar_sizes=np.concatenate([nothing["tar"], *(s.samples["tar"] for s in segments)]).astype(np.int64),
            hashes=np.concatenate([nothing["hash"], *(s.samples["hash"] for s in segments)]),
            digest=digest,
        )

    def __len__(self) -> int:
        return len(self._size)

    def take(self, positions: npt.NDArray[np.int64]) -> "Spill":
        """Return some of the samples, in that order."""
        return Spill(
            self.urls,
            self._segment[positions],
            self._offset[positions],
            self._size[positions],
            np.zeros(0, np.int64),
            np.zeros(0, np.uint64),
        )

    def key(self, position: int) -> str:
        """Return a sample's key."""
        sample = next(iter(self.take(np.array([position]))))
        return sample.key

    def __iter__(self) -> Iterator[EncodedSample]:
        """Yield the samples, one read each."""
        descriptors = [os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC) for url in self.urls]
        try:
            segments, offsets, sizes = self._segment.tolist(), self._offset.tolist(), self._size.tolist()
            for segment, offset, size in zip(segments, offsets, sizes, strict=True):
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
