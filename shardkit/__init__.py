"""Pack training data into tar shards, and stream it back to PyTorch; resumable to the sample, none lost silently.

::

    photos/cat/1.jpg             train-000000.tar  .parquet            {"jpg": uint8 (32, 32, 3), "cls": 0}
    photos/dog/2.jpg  -- pack -> train-000001.tar  .parquet -- load -> {"jpg": uint8 (32, 32, 3), "cls": 1}
    ...                          manifest.json                         ...

The packages, in the order in which a sample passes through them; the docstring of each lists its modules::

    errors       everything that shardkit raises on purpose
    hashing      every random choice
    sample       a key and its fields <-> names of members
    progress     how far long work has got
    storage      bytes of any place: local, HTTP, S3, fsspec; ranges and retries
    codecs       a field's value <-> bytes; images; compressed formats
    transforms   decoded fields -> what training needs: crops, resizing, adapters
    format       members, shards, their indexes, the manifest
    order        the order of an epoch: arithmetic, without I/O
    reading      shards -> samples: forward, by block, by number; caches, filters
    sources      other people's data -> samples to pack
    packing      samples -> plan -> shards -> dataset
    loading      samples -> batches: streams, loaders, samplers
    inspection   what is in a dataset, whether it is whole, how well it is shuffled
    cli          the command line
    testing      whether a loader resumes anywhere
    webdataset   webdataset's pipelines over shardkit's reader
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardkit.codecs.registry import Decoder, register_codec
from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    DatasetExistsError,
    IncompleteDatasetError,
    MissingExtraError,
    SampleError,
    ShardError,
    ShardkitError,
    SourceError,
    StateError,
    StorageError,
    TooManySkippedError,
    TruncatedShardError,
    UnfinishedDatasetError,
    WorkerError,
)
from shardkit.format.manifest import Manifest, Shard, read_manifest
from shardkit.inspection.findings import DamagedShard, Problem, VerifyReport
from shardkit.inspection.shuffle import ShuffleReport, shuffle_report
from shardkit.inspection.verification import verify
from shardkit.loading.loader import ShardLoader
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.packing.writer import ShardWriter
from shardkit.reading.dataset import ShardDataset
from shardkit.sources.folders import FileFolder, ImageFolder
from shardkit.sources.shards import ShardSource
from shardkit.transforms.adapters import Albumentations, Torchvision
from shardkit.transforms.crops import RandomResizedCrop, Resize, ResizeCenterCrop
from shardkit.transforms.rng import Rng

if TYPE_CHECKING:
    from shardkit.loading.sampler import ShardSampler
    from shardkit.loading.stream import ShardStream, StreamWarning

__all__ = [
    "Albumentations",
    "ArgumentError",
    "CodecError",
    "DamagedShard",
    "DatasetError",
    "DatasetExistsError",
    "Decoder",
    "FileFolder",
    "ImageFolder",
    "IncompleteDatasetError",
    "Manifest",
    "MissingExtraError",
    "Problem",
    "RandomResizedCrop",
    "Resize",
    "ResizeCenterCrop",
    "Rng",
    "SampleError",
    "Shard",
    "ShardDataset",
    "ShardError",
    "ShardLoader",
    "ShardSampler",
    "ShardSource",
    "ShardStream",
    "ShardWriter",
    "ShardkitError",
    "ShuffleReport",
    "SourceError",
    "StateError",
    "StorageError",
    "StreamWarning",
    "TooManySkippedError",
    "Torchvision",
    "TruncatedShardError",
    "UnfinishedDatasetError",
    "VerifyReport",
    "WorkerError",
    "index_shards",
    "pack",
    "read_manifest",
    "register_codec",
    "shuffle_report",
    "verify",
]

__version__ = "0.1.0"

# Names whose modules import torch are looked up at their first use, so that `import shardkit` is quick. The others are
# imported above: otherwise a module would hide the function of the same name.
_LAZY = {  # name -> module
    "ShardSampler": "shardkit.loading.sampler",
    "ShardStream": "shardkit.loading.stream",
    "StreamWarning": "shardkit.loading.stream",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
