"""Parts of a block: which byte ranges to fetch if not all of its fields are wanted.

A request costs as much as transferring 300 kB, the amount that arrives during a round trip of 30 ms at 10 MB/s. If
leaving out unwanted fields saves more than that, a loader fetches parts of a block, and compares each field with its
own CRC-32. For texts beside images of 2 MB, that is a thousandth of the bytes. For texts beside images of 60 kB, it
fetches whole blocks, as it does for zst shards and with a cache. ``dataset[i]`` gets its fields with one request if
they are near each other.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from shardkit.errors import ShardError
from shardkit.order.plan import IntArray

REQUEST_BYTES = 300_000
"""The cost of a request, in bytes: as many as a connection transfers during a round trip, 30 ms at 10 MB/s.

Measured with that round trip, for an epoch of texts of 1 kB that lie beside another field: beside 300 kB, it takes
0.9 s and 0.2 MB in parts, 1.2 s and 64 MB in whole blocks; beside 1 MB, 0.3 s in parts and 1.3 s in whole blocks; but
beside 60 kB, 4.3 s in parts and 1.2 s in whole blocks. Nearer servers have shorter round trips, but each request costs
more computing; a disk reads as many bytes during a seek.
"""


class FieldPlace(NamedTuple):
    """Where the data of a field of a sample lies.

    Attributes:
        row: The number of the sample, in the caller's numbering.
        key: Its key.
        field: The field's name.
        offset: Where it begins in the uncompressed shard, in bytes.
        size: How many bytes it has.
        crc32: Their CRC-32.
    """

    row: int
    key: str
    field: str
    offset: int
    size: int
    crc32: int

    def check(self, data: bytes | memoryview, url: str) -> None:
        """Compare the data of the field with its checksum. Raises ShardError."""
        found = crc32(data)
        if found != self.crc32:
            raise ShardError(
                f"shard {url}: field {self.field!r} of sample {self.key!r} at byte {self.offset:,} has the CRC-32 "
                f"{found:08x}, its index says {self.crc32:08x}; it is damaged or was replaced, so fetch or write it "
                "again",
                url=url,
                offset=self.offset,
                key=self.key,
                field=self.field,
            )


class Parts:
    """The byte ranges that cover all wanted pieces. Ranges with a small gap between them are joined.

    Args:
        begins: Where each wanted piece begins: int64, (pieces,).
        ends: Where it ends.
        gap: The most unwanted bytes between two pieces that are fetched to save a request.

    Attributes:
        starts: Where each part begins: int64, (parts,), ascending.
        stops: Where it ends.
        nbytes: How many bytes all parts have together.

    Example:
        >>> parts = Parts(np.array([0, 40, 900]), np.array([10, 60, 950]), gap=100)
        >>> parts.starts.tolist(), parts.stops.tolist(), parts.nbytes
        ([0, 900], [60, 950], 110)
        >>> parts.places(np.array([40, 900])).tolist()
        [40, 60]
    """

    def __init__(self, begins: IntArray, ends: IntArray, *, gap: int) -> None:
        is_some = ends > begins
        begins, ends = begins[is_some], ends[is_some]
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])  # in an untrusted index, pieces may overlap
        cuts = np.flatnonzero(begins[1:] - ends[:-1] > gap) + 1
        self.starts: IntArray = np.concatenate([begins[:1], begins[cuts]])
        self.stops: IntArray = np.concatenate([ends[cuts - 1], ends[-1:]])
        sizes = self.stops - self.starts
        self._offsets = np.cumsum(sizes) - sizes
        self.nbytes = int(sizes.sum())

    def pay(self, size: int) -> bool:
        """Return whether the parts cost less than one request of ``size`` bytes, by at least the cost of a request."""
        return self.nbytes + len(self.starts) * REQUEST_BYTES <= size

    def places(self, begins: IntArray) -> IntArray:
        """Return where pieces begin in the bytes of all parts, laid end to end. Empty pieces may be anywhere."""
        if not len(self.starts):
            return np.zeros_like(begins)
        part = (self.starts.searchsorted(begins, side="right") - 1).clip(0)
        places: IntArray = (begins - self.starts[part] + self._offsets[part]).clip(0, self.nbytes)
        return places


def member_bounds(members: Mapping[str, tuple[IntArray, ...]]) -> tuple[IntArray, IntArray]:
    """Return where the data of all members begins and ends in the shard: int64, (members,).

    Args:
        members: For each field, offset, size and more: int64, (samples,); negative where it is missing.
    """
    none = np.zeros(0, dtype=np.int64)
    offsets = np.concatenate([none, *(arrays[0] for arrays in members.values())])
    sizes = np.concatenate([none, *(arrays[1] for arrays in members.values())])
    is_there = offsets >= 0
    return offsets[is_there], offsets[is_there] + sizes[is_there]
