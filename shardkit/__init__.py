"""Pack training data into tar shards, and stream it back to PyTorch; resumable to the sample, none lost in silence.

::

    photos/cat/1.jpg             train-000000.tar  .parquet            {"jpg": uint8 (32, 32, 3), "cls": 0}
    photos/dog/2.jpg  -- pack -> train-000001.tar  .parquet -- load -> {"jpg": uint8 (32, 32, 3), "cls": 1}
    ...                          manifest.json                         ...

The modules, in the order of a sample's way. Each imports only from those above it::

    errors        everything that shardkit raises on purpose
    hashing       every random choice
    sample        a key and its fields <-> names of members
    storage       what a place is where bytes come from and go to
    local         ... on this machine
    attempts      trying again, within a time
    network       requests over connections of a process's own
    answers       which part of which version of a file an answer brings
    ranges        ranges of remote files, through networks that fail
    web           files of web servers
    spool         files that wait on disk until they are whole
    credentials   who asks an S3 server
    calls         what S3 is asked to do, tried again
    uploads       local files -> objects of S3, whole
    s3            objects of S3 servers
    generic       files wherever fsspec reaches
    schemes       a URL -> its storage
    progress      how far long work is

    decompress    one member or frame of a compressed format -> bytes
    compress      frames and compressed streams <-> bytes
    arrays        arrays and tensors <-> bytes
    pixels        arrays of pixels <-> image files
    codecs        a field's value <-> bytes
    columns       fields -> values in the index
    rng           random numbers for one sample
    resize        a box of pixels -> an image of another size
    boxes         an image file -> the pixels of a box of it
    image         images -> images of one size, for batches
    foreign       transforms of albumentations and torchvision -> repeatable ones
    transforms    what was read -> what a training loop gets
    headers       what a tar header says <-> its 512 bytes
    tar           members <-> bytes
    index         where each sample of a shard lies
    manifest      the list of a dataset's shards
    reader        shards -> samples

    scan          a shard -> all that an index says of it
    indexing      shards -> a dataset

    filenames     names of files -> keys and fields
    labels        tables of labels -> a label for each file
    sources       files -> samples
    shard_source  shards -> samples, to be packed again
    shards        samples -> one shard
    writer        samples -> shards, in the order given
    plan          which sample goes into which shard
    records       samples of a source, encoded when needed
    spill         samples of unknown size, on disk meanwhile
    resume        what an earlier pack left
    lock          one pack at a time in a folder
    work          tasks in threads, processes, executors
    tasks         a shard, a segment of a spill: what workers do
    pack          a source -> a dataset: shuffled, levelled, split

    ranks         which of how many processes this one is
    epochs        which epoch a pass over a stream is
    stream        shards -> samples for training, forward only

    order         which sample comes at which position of an epoch
    buffers       memory for blocks and batches, used again
    blocks        one block's bytes -> its samples
    recent        what was read last, kept in memory within bounds
    cachedir      a folder that is a cache: whose it is, and what is in it
    cache         blocks, kept on this machine's disk
    parts         which bytes of a block are fetched where little of it is wanted
    resident      blocks that the system holds in memory, read sample by sample
    indexes       what the indexes of a dataset's shards say, within bounds
    access        blocks and samples of shards, each read on its own
    filters       a condition, numbers or a mask -> the samples they select
    dataset       a dataset's samples by their numbers
    sampler       the order of an epoch for a stock DataLoader
    batches       samples -> one batch
    columnar      blocks of small samples -> batches, without a loop over samples
    slabs         the memory of a batch, written to row by row
    rows          the bytes of a sample -> a row of a batch, in threads or processes
    schedule      the order of an epoch -> which blocks each batch needs
    threads       small tasks, done in threads that end
    fetch         blocks, ahead of time and in order
    engine        the blocks of an epoch, fetched ahead -> its batches, in order
    loader        batches for a training loop, resumable between any two

    findings      what was found to be wrong
    verify        a dataset -> what is damaged in it
    inspection    which samples there are, one member, figures
    mixing        how well an order mixes, as numbers
    report        how well a dataset is shuffled, in words and a picture
    testing       whether a loader resumes anywhere
    output        what was found -> text
    commands      how a command prints and ends
    cli_cache     what is in a cache, and how to delete it
    cli_uploads   ... what uploads have left
    cli           all of it from the command line
    webdataset    webdataset's pipelines over our reader
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardkit.codecs import Decoder, register_codec
from shardkit.dataset import ShardDataset
from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    DatasetExistsError,
    MissingExtraError,
    SampleError,
    ShardError,
    ShardkitError,
    SourceError,
    StateError,
    TooManySkippedError,
    TruncatedShardError,
    UnfinishedDatasetError,
    WorkerError,
)
from shardkit.findings import DamagedShard, Problem, VerifyReport
from shardkit.foreign import Albumentations, Torchvision
from shardkit.image import RandomResizedCrop, Resize, ResizeCenterCrop
from shardkit.indexing import index_shards
from shardkit.loader import ShardLoader
from shardkit.manifest import Manifest, Shard, read_manifest
from shardkit.pack import pack
from shardkit.report import ShuffleReport, shuffle_report
from shardkit.rng import Rng
from shardkit.shard_source import ShardSource
from shardkit.sources import FileFolder, ImageFolder
from shardkit.verify import verify
from shardkit.writer import ShardWriter

if TYPE_CHECKING:
    from shardkit.sampler import ShardSampler
    from shardkit.stream import ShardStream, StreamWarning

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

# Names whose modules import torch are found when they are first asked for, so that `import shardkit` is quick. The rest
# is imported above: a function that is named as its module would else be hidden by it.
_LAZY = {  # name -> module
    "ShardSampler": "shardkit.sampler",
    "ShardStream": "shardkit.stream",
    "StreamWarning": "shardkit.stream",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ believes in every name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
