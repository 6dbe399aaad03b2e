"""Ways of reading through a network, its faults, and how they end."""

import shardkit
from shardkit.errors import (
    AccessError,
    ChangedFileError,
    MissingFileError,
    ShardError,
    ShardkitError,
    StorageError,
)

SAMPLES = {f"{i:04d}": bytes([i]) * (1000 + 17 * i) for i in range(200)}
OPTIONS = {"read_timeout": 0.3, "total_timeout": 60}

# How the faults end that have no good end, when a dataset is read by blocks, by a stream that is compared with the
# index, and by a stream without one. All others end in the right samples.
READS = ["loader", "stream", "tar"]
ENDS = {
    "FIN mid-body for ever": [StorageError] * 3,
    "FIN after the head for ever": [StorageError] * 3,
    "503 for ever": [StorageError] * 3,
    "trickle": [StorageError] * 3,
    "stored Content-Encoding gzip": [StorageError] * 3,
    "redirect loop": [StorageError] * 3,
    "overwritten mid-read": [(ChangedFileError, ShardError), ChangedFileError, ChangedFileError],
    "overwritten mid-read, If-Match ignored": [(ChangedFileError, ShardError), ChangedFileError, ChangedFileError],
    "overwritten mid-read, same ETag": [ShardError] * 3,
    "deleted mid-read": [MissingFileError] * 3,
    "expired token": [AccessError] * 3,
    "403": [AccessError] * 3,
    "404": [MissingFileError] * 3,
    "bit flip": [None, None, "unseen"],  # only an index shows it
    "bit flip for ever": [ShardError, ShardError, "unseen"],
}


def pack_samples(destination, **options):
    """Make a dataset of the samples."""
    samples = [{"__key__": key, "bin": data} for key, data in SAMPLES.items()]
    columns = {"size": lambda sample: len(sample["bin"])}
    options = {"shard_samples": 50, "block_bytes": "10kB", "columns": columns, "progress": False} | options
    shardkit.pack(samples, destination, **options)


def by_loader(url, options):
    """Return key and data of each sample, read by blocks, which have checksums."""
    dataset = shardkit.ShardDataset(url, storage_options=options)
    loader = shardkit.ShardLoader(dataset, batch_size=16, seed=0)
    return [item for batch in loader for item in zip(batch["__key__"], batch["bin"], strict=True)]


def by_stream(url, options):
    """Return key and data of each sample, read forward and compared with the index."""
    stream = shardkit.ShardStream(url, shuffle=False, storage_options=options)
    return [(sample["__key__"], sample["bin"]) for sample in stream]


def by_tar(url, options):
    """Return key and data of each sample, read forward without an index."""
    return by_stream(f"{url}/{url.rpartition('/')[2]}-{{000000..000003}}.tar", options)


READERS = {"loader": by_loader, "stream": by_stream, "tar": by_tar}


def read_through(fault, read, faulty, url, options, tries, ends=ENDS):
    """Read a dataset through a proxy with a fault in one shard, check how that ends, and return it.

    ``tries`` has what is called instead of waiting for the next try.
    """
    rule = None
    if fault == "refused, then up":
        faulty.refuse()
        tries.extend([lambda: None] * 3 + [faulty.listen])
    else:
        later = {}
        if "mid-" in fault and fault not in ("FIN mid-body", "RST mid-body") and read != "loader":
            faulty.inject("FIN mid-body", path="*-000001.tar")  # else a stream asks once
            later = {"skip": 0}
        rule = faulty.inject(fault, path="*-000001.tar", **later)
    if fault == "trickle":
        options = options | {"total_timeout": 1}
    expected = ends.get(fault, [None] * 3)[READS.index(read)]
    found, end, about = [], None, url
    try:
        found = READERS[read](url, options)
    except ShardkitError as error:
        end, about = type(error), error.url

    assert rule is None or fault.startswith("HEAD") or rule.hits  # nobody sends HEAD
    assert about.startswith(url)
    if end is not None:
        assert issubclass(end, expected or ())
        return end.__name__
    if expected is None:
        assert dict(found) == SAMPLES
        assert len(found) == len(SAMPLES)
        return "right"
    assert expected == "unseen"
    return expected
