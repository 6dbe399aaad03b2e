"""The task that a pack's workers do: writing one shard."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardkit.codecs.compress import Compression
from shardkit.format.columns import ColumnMaker
from shardkit.format.shard_writer import EncodedSample, OpenShard, WrittenShard
from shardkit.packing.workers import StopSign, until
from shardkit.storage.base import Storage


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard."""

    storage: Storage
    folder: str
    stem: str
    samples: Iterable[EncodedSample]
    compression: Compression
    block_samples: int
    columns: ColumnMaker  # made by the caller, with the caller's codecs
    plan: str

    def run(self, stop: StopSign) -> WrittenShard:
        """Write the shard. Raises Cancelled soon after ``stop`` is set; nothing is left then."""
        with OpenShard(
            self.storage,
            self.folder,
            self.stem,
            compression=self.compression,
            block_samples=self.block_samples,
            plan=self.plan,
            overwrite=True,  # a file of its name is the same shard, from an attempt that was killed before its index
        ) as shard:
            for sample in until(stop, self.samples):
                shard.file.add(sample, self.columns.values(sample.key, sample.members))
            return shard.publish()
