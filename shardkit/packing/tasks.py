"""What workers do for a pack: a shard, or a segment of a spill, each on its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardkit.codecs.compress import Compression
from shardkit.format.columns import ColumnMaker
from shardkit.format.shard_writer import EncodedSample, OpenShard, WrittenShard
from shardkit.packing.records import ListedPart
from shardkit.packing.spill import Segment, write_segment
from shardkit.packing.workers import Cancelled, StopSign
from shardkit.storage.base import Storage

T = TypeVar("T")


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard."""

    storage: Storage
    folder: str
    stem: str
    samples: Iterable[EncodedSample]
    compression: Compression
    block_samples: int
    columns: ColumnMaker  # made by the caller, whose codecs it took
    plan: str

    def run(self, stop: StopSign) -> WrittenShard:
        """Write it. Raises Cancelled as soon as it is to stop; nothing is left then."""
        with OpenShard(
            self.storage,
            self.folder,
            self.stem,
            compression=self.compression,
            block_samples=self.block_samples,
            plan=self.plan,
            overwrite=True,  # what has its name is itself, from an attempt that was killed before its index
        ) as shard:
            for sample in _until(stop, self.samples):
                shard.file.add(sample, self.columns.values(sample.key, sample.members))
            return shard.publish()


@dataclass(frozen=True)
class SpillTask:
    """Writes one segment of a spill, unless it is there already."""

    url: str
    samples: ListedPart
    shard_bytes: int
    fingerprint: str

    def run(self, stop: StopSign) -> Segment:
        """Write it, likewise."""
        samples = _until(stop, self.samples)
        return write_segment(self.url, samples, shard_bytes=self.shard_bytes, fingerprint=self.fingerprint)


def _until(stop: StopSign, samples: Iterable[T]) -> Iterator[T]:
    for sample in samples:
        if stop.is_set():
            raise Cancelled
        yield sample
