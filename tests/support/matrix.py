"""Ways of reading through a network, the network's faults, and how they end."""

import threading

from torch.utils.data import DataLoader

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
SOME = slice(45, 110, 5)
OPTIONS = {"read_timeout": 0.3, "total_timeout": 60}

READS = ["dataset", "loader", "stream", "tar"]
# The results of faults that do not give the right samples: for a dataset read by its index, for a stream compared with
# the index, and for a stream without an index. All other faults end in the right samples.
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
    "bit flip": [None, None, "unseen"],  # only an index reveals it
    "bit flip for ever": [ShardError, ShardError, "unseen"],
}


def pack_samples(destination, *, others=None, **options):
    """Make a dataset of the samples, which may have additional fields."""
    samples = [{"__key__": key, "bin": data, **(others or {})} for key, data in SAMPLES.items()]
    columns = {"size": lambda sample: len(sample["bin"])}
    options = {"shard_samples": 50, "block_bytes": "10kB", "columns": columns, "progress": False} | options
    shardkit.pack(samples, destination, **options)


def by_loader(url, options):
    """Return the key and data of each sample, read by blocks, which have checksums."""
    dataset = shardkit.ShardDataset(url, storage_options=options)
    loader = shardkit.ShardLoader(dataset, batch_size=16, seed=0)
    return [item for batch in loader for item in zip(batch["__key__"], batch["bin"], strict=True)]


def by_dataset(url, options):
    """Return the key and data of some samples, read one by one."""
    dataset = shardkit.ShardDataset(url, storage_options=options)
    return [(sample["__key__"], sample["bin"]) for sample in dataset[SOME]]


def by_parts(url, options):
    """Return the key and data of each sample, read by parts of blocks of which little is wanted."""
    dataset = shardkit.ShardDataset(f"{url}-wide", fields=("bin",), storage_options=options)
    loader = shardkit.ShardLoader(dataset, batch_size=16, seed=0)
    assert not dataset.read_block(0, 0).is_whole
    return [item for batch in loader for item in zip(batch["__key__"], batch["bin"], strict=True)]


def by_stream(url, options):
    """Return the key and data of each sample, read forward and compared with the index."""
    stream = shardkit.ShardStream(url, shuffle=False, storage_options=options)
    return [(sample["__key__"], sample["bin"]) for sample in stream]


def by_tar(url, options):
    """Return the key and data of each sample, read forward without an index."""
    return by_stream(f"{url}/{url.rpartition('/')[2]}-{{000000..000003}}.tar", options)


def read_in_workers(kind, start, url, options):
    """Read a sample, then all of them in worker processes, then the first one again; all are right."""
    make = shardkit.ShardDataset if kind == "dataset" else shardkit.ShardStream
    dataset = make(url, storage_options=options)
    first = dataset[0] if kind == "dataset" else next(iter(dataset))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)

    assert first["bin"] == SAMPLES[first["__key__"]]
    assert sorted(sample["__key__"] for sample in loader) == sorted(SAMPLES)
    if kind == "dataset":
        assert dataset[0]["bin"] == first["bin"]


def read_through_a_restart(server, held, tries, read, url, options):
    """Kill a server while one of its responses is held, and start it again; a reader finds every sample once.

    Args:
        server: The server to kill.
        held: The response, which is released when the server is up again.
        tries: The functions to call instead of waiting before a retry.
        read: The reader's name.
        url: The dataset.
        options: The reader's storage options.
    """
    found, is_up = [], threading.Event()
    reader = threading.Thread(target=lambda: found.extend(READERS[read](url, options)))
    reader.start()
    held.wait()
    tries.append(is_up.wait)  # a request that fails while the server is down is retried as soon as it is up
    server.kill()
    server.start()
    is_up.set()
    held.release()
    reader.join()

    assert len(found) == len(SAMPLES)
    assert dict(found) == SAMPLES


READERS = {"dataset": by_dataset, "loader": by_loader, "parts": by_parts, "stream": by_stream, "tar": by_tar}
FORWARD = ["stream", "tar"]


def read_through(fault, read, faulty, url, options, tries, ends=ENDS):
    """Read a dataset through a proxy with a fault in one shard, check the result, and return it.

    ``tries`` has the functions to call instead of waiting before a retry.
    """
    rule = None
    if fault == "refused, then up":
        faulty.refuse()
        tries.extend([lambda: None] * 3 + [faulty.listen])
    else:
        later = {}
        if "mid-" in fault and fault not in ("FIN mid-body", "RST mid-body") and read in FORWARD:
            faulty.inject("FIN mid-body", path="*-000001.tar")  # otherwise a stream makes one request
            later = {"skip": 0}
        rule = faulty.inject(fault, path="*-000001.tar", **later)
    if fault == "trickle":
        options = options | {"total_timeout": 1}
    expected = ends.get(fault, [None] * 3)[1 + FORWARD.index(read) if read in FORWARD else 0]
    found, end, about = [], None, url
    try:
        found = READERS[read](url, options)
    except ShardkitError as error:
        end, about = type(error), error.url

    assert rule is None or fault.startswith("HEAD") or rule.hits  # no reader sends HEAD
    assert about.startswith(url)
    if end is not None:
        assert issubclass(end, expected or ())
        return end.__name__
    if expected is None:
        assert dict(found) == {key: SAMPLES[key] for key, _ in found}
        assert len(found) == len(dict(found)) == len(range(len(SAMPLES))[SOME if read == "dataset" else slice(None)])
        return "right"
    assert expected == "unseen"
    return expected
