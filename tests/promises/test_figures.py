"""A loader mixes, reads and holds as much as it and the shuffle report say, counted where it happens."""

import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit import ShardDataset, ShardLoader, shuffle_report
from shardkit.order import plan as order
from shardkit.reading import access
from tests.support.shared import run_program

BATCH_SIZE = 256


class WatchedStorage:
    """Storage that reports every read before doing it."""

    def __init__(self, storage, note):
        self._storage = storage
        self._note = note

    def info(self, url):
        return self._storage.info(url)

    def list(self, url):
        return self._storage.list(url)

    def read_range(self, url, start, size, **options):
        self._note(url, start, size)
        return self._storage.read_range(url, start, size, **options)

    def read_into(self, url, start, out, **options):
        self._note(url, start, len(out))
        self._storage.read_into(url, start, out, **options)


@pytest.fixture
def watch_reads(monkeypatch):
    """Return a function that installs an observer of every read of shards and indexes: url, offset and size."""

    def watch(note):
        storage_for = access.storage_for
        monkeypatch.setattr(access, "storage_for", lambda *args: WatchedStorage(storage_for(*args), note))

    return watch


@pytest.fixture(scope="module")
def equals(tmp_path_factory):
    """A dataset of 1500 samples that each take 1 kB of their shard, in blocks of 8."""
    folder = tmp_path_factory.mktemp("equals") / "train"
    samples = ({"__key__": f"{i:04d}", "txt": "x" * 500} for i in range(1500))
    shardkit.pack(samples, folder, shard_samples=100, block_bytes=8 * 1024, compression="none", progress=False)
    return folder


# -- mixing


def effective_batch(groups, batch_size):
    """Return a batch's worth relative to random samples, by Kish's design effect at a correlation of 0.1."""
    batches = groups[: len(groups) // batch_size * batch_size].reshape(-1, batch_size)
    mates = np.mean([(np.bincount(batch)[batch] - 1).mean() for batch in batches])
    sizes = np.bincount(groups)
    by_chance = (batch_size - 1) * (sizes * (sizes - 1)).sum() / (len(groups) * (len(groups) - 1))
    return (1 + 0.1 * by_chance) / (1 + 0.1 * mates)


def dispersion(groups):
    """Return how far apart the samples of a group come, relative to samples spread over the epoch."""
    places = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    return np.mean([place.std() for place in places]) / (len(groups) / 12**0.5)


@pytest.mark.slow
def test_keys_of_a_loader_are_mixed_as_promised_and_as_the_report_says(tmp_path, monkeypatch):
    """A hundred thousand samples of 60 kB, scaled down to 1.4 kB, with the order's memory scaled down as well."""
    payload = np.random.default_rng(0).bytes(1000)
    samples = ({"__key__": f"{i:06d}", "bin": payload[: 300 + i * 37 % 700]} for i in range(100_000))
    options = {"shard_bytes": "700kB", "block_bytes": "22kB", "compression": "none", "progress": False}
    shardkit.pack(samples, tmp_path / "train", shuffle=False, **options)
    dataset = ShardDataset(tmp_path / "train", decode=False)
    sizes = [shard.samples for shard in dataset.manifest.shards]
    scale = sum(shard.tar_size for shard in dataset.manifest.shards) / len(dataset) / 60_000
    monkeypatch.setattr(order, "OPEN_BYTES", int(order.OPEN_BYTES * scale))

    loader = ShardLoader(dataset, BATCH_SIZE, memory=order.OPEN_BYTES)
    batches = iter(loader)
    keys = np.array([int(key) for batch in batches for key in batch["__key__"]])
    shards = np.repeat(np.arange(len(sizes)), sizes)[keys]
    report = shuffle_report(tmp_path / "train", BATCH_SIZE, memory=order.OPEN_BYTES)

    assert loader.state_dict()["lanes"] == 240
    assert sorted(keys) == list(range(100_000))
    assert effective_batch(shards, BATCH_SIZE) >= 0.98
    assert dispersion(shards) >= 0.95
    assert effective_batch(shards, BATCH_SIZE) == pytest.approx(report.plan.effective_batch_by_shard, rel=1e-9)
    assert dispersion(shards) == pytest.approx(report.plan.dispersion_by_shard, rel=1e-9)
    assert (
        report.plan.held_samples * report.sample_bytes < batches._engine._fetcher.largest_held_bytes <= order.OPEN_BYTES
    )


# -- bytes read


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5, 7])
def test_ranks_read_as_many_bytes_as_the_report_says(equals, watch_reads, world_size, fits):
    read = []
    watch_reads(lambda url, _, size: read.append(size) if url.endswith(".tar") else None)
    options = {"lanes": 30, "world_size": world_size, "memory": "2MB" if fits else 1500 * 1024 - 1}
    for rank in range(world_size):
        list(ShardLoader(ShardDataset(equals), 4, rank=rank, num_workers=1, **options))
    report = shuffle_report(equals, 4, **options)
    says = report.read_amplification[world_size]

    assert report.in_memory == fits
    assert sum(read) == pytest.approx(1500 * 1024 * says)
    assert says < (1.15 if 30 % world_size == 0 else 2)  # it would be 1 without the blocks cut by the ends of lanes
    assert not fits or report.plan.held_samples * 1024 == sum(read)


def test_what_fits_into_memory_is_read_once(equals, watch_reads):
    read = []
    watch_reads(lambda url, *place: read.append((url, *place)) if url.endswith(".tar") else None)
    list(ShardLoader(ShardDataset(equals), 4, lanes=30, num_workers=1, memory="2MB"))

    assert len(read) == len(set(read))
    assert sum(size for _, _, size in read) == 1500 * 1024


@pytest.mark.parametrize("progress", [0, 0.5, 0.9])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_batch_waits_for_its_own_blocks_only_also_when_resumed(equals, watch_reads, progress, world_size):
    dataset, lanes = ShardDataset(equals), 30
    loader = ShardLoader(dataset, lanes // world_size, lanes=lanes, rank=0, world_size=world_size)
    position = int(progress * len(dataset)) // lanes * lanes
    plan = dataset.order(seed=0, epoch=0, lanes=lanes)
    samples = plan.samples_at(plan.deal(position, position + lanes, 0, world_size))
    places = np.stack(dataset.places(samples)[:2], axis=1)
    needed = {(dataset.manifest.shards[shard].url, block * 8 * 1024) for shard, block in places.tolist()}
    has_come = threading.Event()

    def wait_if_not_needed(url, start, _):
        path = Path(url)
        if path.suffix != ".npy" and (path.name, start) not in needed and not has_come.wait(60):
            raise TimeoutError("the first batch waits for it")

    watch_reads(wait_if_not_needed)
    loader.load_state_dict(loader.state_dict() | {"position": position})
    first = next(iter(loader))
    has_come.set()

    assert len(needed) <= lanes // world_size
    assert sorted(first["__key__"]) == sorted(dataset.keys()[sample] for sample in samples)


# -- memory

PASS = """
    import re, sys
    from pathlib import Path
    import shardkit

    def status(name):
        return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    dataset = shardkit.ShardDataset(sys.argv[1])
    loader = shardkit.ShardLoader(dataset, 64, memory=int(sys.argv[2]), lanes=16, num_workers=2)
    dataset[0]  # what this needs is imported, and counts as the program's own
    before = status("VmRSS")
    count = sum(len(batch["__key__"]) for batch in loader)
    print(count, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zst"])
def test_a_pass_takes_no_more_than_memory_and_150_mb(tmp_path, compression):
    rows = np.random.default_rng(0).integers(0, 4, (4, 60_000), dtype=np.uint8)
    samples = ({"__key__": f"{i:04d}", "npy": np.roll(rows[i % 4], i)} for i in range(5000))  # 300 MB
    options = {"shard_bytes": "30MB", "compression": compression, "progress": False}
    shardkit.pack(samples, tmp_path / "train", shuffle=False, **options)
    memory = 40_000_000

    output = run_program("-c", textwrap.dedent(PASS), tmp_path / "train", memory)

    count, taken = map(int, output.split())
    assert count == 5000
    assert taken <= memory + 150_000_000
