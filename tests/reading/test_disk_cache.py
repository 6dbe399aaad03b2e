"""Reading through a cache gives the same bytes as reading without one, and no kill makes the cache exceed its limit."""

import ctypes
import errno
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import ArgumentError, ShardError
from shardkit.format.manifest import read_manifest
from shardkit.packing.indexing import index_shards
from shardkit.reading import disk_cache as cache
from shardkit.reading import disk_cache_folder as cachedir
from shardkit.reading.disk_cache import BlockCache
from shardkit.reading.disk_cache_folder import FOLDER, CacheFolder, block_name, clear_cache, list_blocks
from shardkit.reading.memory import Buffers
from tests.support.folders import contents_of
from tests.support.forks import forkserver
from tests.support.servers.programs import Nginx
from tests.support.shared import fork_beside_threads, without_rights

SAMPLES = {f"{i:04d}": bytes([i]) * (1000 + 17 * i) for i in range(200)}
PAGE = 4096
LARGE = "100MB"
SERVER = forkserver(__name__)


def pack_samples(folder, compression="none", samples=SAMPLES, **options):
    options = {"shard_samples": 50, "block_bytes": "10kB", "shuffle": False, "progress": False, **options}
    shardkit.pack(
        ({"__key__": key, "bin": data} for key, data in samples.items()), folder, compression=compression, **options
    )
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Provide a folder with a dataset for each compression."""
    folder = tmp_path_factory.mktemp("packed")
    for compression in ("none", "zst"):
        pack_samples(folder / compression, compression)
    return folder


@pytest.fixture(scope="module")
def web(processes, tmp_path_factory, authority, packed):
    """Provide a web server with the same datasets."""
    with Nginx(processes, tmp_path_factory.mktemp("web"), authority) as server:
        shutil.copytree(packed, server.folder, dirs_exist_ok=True)
        yield server


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """Let the warnings that are shown once be shown once in each test."""
    monkeypatch.setattr(cache, "_warned", set())


def open_cached(url, place, cache_bytes=LARGE, **options):
    return shardkit.ShardDataset(url, cache=place, cache_bytes=cache_bytes, **options)


def by_loader(dataset):
    loader = shardkit.ShardLoader(dataset, batch_size=16, seed=0, lanes=1)  # no block is read for two lanes at a time
    return [item for batch in loader for item in zip(batch["__key__"], batch["bin"], strict=True)]


def by_number(dataset):
    return [(sample["__key__"], sample["bin"]) for sample in dataset]


def by_process(dataset, start, num_workers):
    sampler = shardkit.ShardSampler(dataset, batch_size=16, seed=0)
    options = {"num_workers": num_workers, "multiprocessing_context": start, "collate_fn": list}
    loader = DataLoader(dataset, batch_sampler=sampler, **options)
    return [(sample["__key__"], sample["bin"]) for batch in loader for sample in batch]


def blocks_asked_for(server, read, *args):
    """Return how many requests for parts of shards are made during a read that returns all samples correctly."""
    before = len(server.requests())

    assert dict(read(*args)) == SAMPLES
    return sum(".tar" in request.path for request in server.requests()[before:])


def num_blocks(folder):
    return sum(shard.blocks for shard in read_manifest(folder).shards)


# Numbered blocks of 1 to 5 pages each; the last page of a block is not full.


def name_of(i):
    return block_name(f"{i:064x}", "none", 0, size_of(i))


def size_of(i):
    return (1 + i % 5) * PAGE - i


def content_of(i):
    return bytes([i]) * size_of(i)


def number_of(path):
    return int(path.name[:64], 16)


def is_right(path):
    return path.read_bytes() == content_of(number_of(path))


def use(blocks, i):
    """Get a block from a cache, as a reader does, and add it if it is missing; return whether it was there."""
    found = blocks.get(name_of(i), size_of(i))
    assert found in (None, content_of(i))
    if found is None:
        blocks.put(name_of(i), content_of(i))
    return found is not None


def numbers_in(place):
    """Return the numbers of the blocks in a cache, least recently used first."""
    return [number_of(Path(block.path)) for block in list_blocks(str(place))]


def held_by(place):
    """Return how many bytes the cache counts."""
    with CacheFolder(str(place)).locked() as usage:
        return usage.held


def check_sound(place, max_bytes):
    """Check that a cache has no unexpected files, and that it counts at least the bytes that they take."""
    folder = CacheFolder(str(place))
    with folder.locked() as usage:
        files = [path for path in folder.root.rglob("*") if path.is_file() and path.name != "CACHEDIR.TAG"]
        held = sum(-(-path.stat().st_size // PAGE) * PAGE for path in files)

        assert held <= max_bytes
        assert held <= usage.held
        assert all(is_right(path) for path in files if path.parent != folder.root)
        assert all(path.name.startswith(".shardkit-") for path in files if path.parent == folder.root)
        return held


@pytest.mark.parametrize("read", [by_loader, by_number])
@pytest.mark.parametrize("compression", ["none", "zst"])
def test_what_is_read_is_the_same_with_a_cache_and_without(tmp_path, packed, compression, read):
    url = packed / compression
    expected = read(shardkit.ShardDataset(url))
    dataset = open_cached(url, tmp_path)

    assert read(dataset) == expected
    assert len(list_blocks(str(tmp_path))) == num_blocks(url)
    assert read(open_cached(url, tmp_path)) == expected
    if read is by_loader:
        again = shardkit.ShardDataset(url)
        assert [block.data for block in blocks_of(dataset)] == [block.data for block in blocks_of(again)]


def test_plain_blocks_are_read_from_the_cache_into_the_buffers_that_are_given(tmp_path, packed):
    dataset, buffers = open_cached(packed / "none", tmp_path), Buffers(10**6)
    for _ in range(2):
        block = dataset.open_block(1, 2, buffers)

        assert isinstance(block.data, memoryview)
        assert block.data == shardkit.ShardDataset(packed / "none").read_block(1, 2).data


def blocks_of(dataset):
    for shard, entry in enumerate(dataset.manifest.shards):
        for number in range(entry.blocks):
            yield dataset.read_block(shard, number)


@pytest.mark.parametrize("compression", ["none", "zst"])
def test_a_second_epoch_asks_for_no_block(tmp_path, web, compression):
    url = f"{web.url}/{compression}"
    dataset = open_cached(url, tmp_path)

    assert blocks_asked_for(web, by_loader, dataset) == num_blocks(url)
    assert blocks_asked_for(web, by_loader, dataset) == 0
    assert blocks_asked_for(web, by_number, dataset) == 0
    assert blocks_asked_for(web, by_loader, open_cached(url, tmp_path)) == 0


@pytest.mark.multiprocess
def test_forked_workers_share_a_cache(tmp_path, web):
    url = f"{web.url}/none"
    dataset = open_cached(url, tmp_path)
    asked = blocks_asked_for(web, by_process, dataset, "fork", 2)

    assert num_blocks(url) <= asked <= 2 * num_blocks(url)  # more than one request if both want the same block at once
    assert len(list_blocks(str(tmp_path))) == num_blocks(url)
    assert blocks_asked_for(web, by_process, dataset, "fork", 2) == 0
    assert blocks_asked_for(web, by_loader, open_cached(url, tmp_path)) == 0


@pytest.mark.multiprocess
def test_a_spawned_worker_shares_its_parents_cache(tmp_path, web):
    url = f"{web.url}/none"
    dataset = open_cached(url, tmp_path)
    first = dataset.manifest.shards[0]
    assert len(dataset[: first.samples]) == first.samples

    assert blocks_asked_for(web, by_process, dataset, "spawn", 1) == num_blocks(url) - first.blocks
    assert blocks_asked_for(web, by_loader, dataset) == 0


def test_the_same_dataset_at_two_places_shares_its_blocks(tmp_path, web):
    by_loader(open_cached(f"{web.url}/none", tmp_path))
    options = {"username": web.user, "password": web.password}
    elsewhere = open_cached(f"{web.private_url}/none", tmp_path, storage_options=options)

    assert blocks_asked_for(web, by_loader, elsewhere) == 0


def test_a_dataset_that_is_replaced_never_gets_the_blocks_of_the_old_one(tmp_path):
    place, folder = tmp_path / "cache", tmp_path / "train"
    place.mkdir()
    for turn in range(3):
        samples = {key: bytes([turn]) * len(data) for key, data in SAMPLES.items()}
        pack_samples(folder, samples=samples, overwrite=True)

        assert dict(by_loader(open_cached(folder, place))) == samples


def test_other_compressions_and_other_blocks_of_the_same_shards_do_not_get_in_each_others_way(tmp_path, packed):
    (tmp_path / "cache").mkdir()
    index_shards(str(packed / "none"), out=str(tmp_path / "other"), block_bytes="31kB")
    pack_samples(tmp_path / "level", "zst:9")
    sources = [packed / "none", packed / "zst", tmp_path / "other", tmp_path / "level"]

    for _ in range(2):
        for source in sources:
            dataset = open_cached(source, tmp_path / "cache", allow_any_url=True)
            assert dict(by_loader(dataset)) == SAMPLES
    kept = list_blocks(str(tmp_path / "cache"))
    assert len({block.shard for block in kept}) == 4  # the same tars
    assert len(kept) == sum(num_blocks_of(source) for source in sources)


def num_blocks_of(source):
    return sum(shard.blocks for shard in read_manifest(source, allow_any_url=True).shards)


def test_a_cache_that_is_too_small_serves_what_it_has_room_for_in_every_epoch(tmp_path, web):
    url = f"{web.url}/none"
    dataset = open_cached(url, tmp_path, 300_000)
    by_loader(dataset)
    kept = len(list_blocks(str(tmp_path)))

    assert num_blocks(url) // 3 < kept < num_blocks(url)
    for _ in range(2):
        assert blocks_asked_for(web, by_loader, dataset) == num_blocks(url) - kept


def test_what_is_damaged_where_it_comes_from_is_not_kept(tmp_path, packed):
    folder = shutil.copytree(packed / "none", tmp_path / "train")
    shard = folder / "none-000000.tar"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    (tmp_path / "cache").mkdir()
    dataset = open_cached(folder, tmp_path / "cache")

    for _ in range(2):
        with pytest.raises(ShardError, match=r"none-000000\.tar: block 0 at byte 0 has the CRC-32"):
            dataset.read_block(0, 0)
    assert list_blocks(str(tmp_path / "cache")) == []


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "other bytes": lambda path: path.write_bytes(path.read_bytes()[::-1]),
}


@pytest.mark.parametrize("compression", ["none", "zst"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_in_the_cache_is_fetched_again(tmp_path, web, damage, compression, caplog):
    dataset = open_cached(f"{web.url}/{compression}", tmp_path)
    by_loader(dataset)
    paths = [Path(block.path) for block in list_blocks(str(tmp_path))]
    right = {path: path.read_bytes() for path in paths}
    for path in paths[::2]:
        DAMAGES[damage](path)

    assert blocks_asked_for(web, by_loader, dataset) == len(paths[::2])
    assert caplog.text.count("is damaged; it is deleted, and read again from its source") == len(paths[::2])
    assert {path: path.read_bytes() for path in paths} == right
    DAMAGES[damage](paths[1])
    assert dict(by_number(open_cached(f"{web.url}/{compression}", tmp_path))) == SAMPLES


def test_a_disk_that_cannot_read_a_block_does_not_keep_it(tmp_path, monkeypatch):
    blocks = BlockCache(str(tmp_path), 10 * PAGE)
    use(blocks, 1)

    class Broken:
        def read_range(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_storage", Broken())
        assert blocks.get(name_of(1), size_of(1)) is None
    assert numbers_in(tmp_path) == []
    assert check_sound(tmp_path, 10 * PAGE) == 0
    assert [use(blocks, 1), use(blocks, 1)] == [False, True]


def test_what_stands_where_a_block_would_be_is_left_alone(tmp_path):
    blocks = BlockCache(str(tmp_path), 10 * PAGE)
    (tmp_path / "mine").write_bytes(b"mine")
    for i, make in enumerate([Path.mkdir, lambda path: path.symlink_to(tmp_path / "mine")]):
        path = CacheFolder(str(tmp_path)).path(name_of(i))
        path.parent.mkdir(exist_ok=True)
        make(path)

        assert [use(blocks, i), use(blocks, i)] == [False, False]
        blocks.drop(name_of(i))
        assert path.is_dir() or path.is_symlink()
    assert clear_cache(str(tmp_path)) == []
    assert (tmp_path / "mine").read_bytes() == b"mine"


class Model:
    """A model of the cache in memory: which blocks it has, and when each was used."""

    def __init__(self, max_pages):
        self.max_pages = max_pages
        self.used = {}
        self.opened = 0

    def use(self, i, now):
        pages = 1 + i % 5
        if i not in self.used:
            if pages > self.max_pages:
                return
            if self.held() + pages > self.max_pages:
                goal = self.max_pages * PAGE - pages * PAGE - self.max_pages * PAGE // 16
                for old in sorted(self.used, key=self.used.get):
                    if self.held() * PAGE <= goal or self.used[old] >= self.opened:
                        break
                    del self.used[old]
            if self.held() + pages > self.max_pages:
                return
        self.used[i] = now

    def held(self):
        return sum(1 + i % 5 for i in self.used)


@example(max_pages=6, uses=[0, 1, 2, None, 0, 1, None, 5, None, 2])
@given(max_pages=st.integers(3, 20), uses=st.lists(st.sampled_from([None, None, *range(9)]), max_size=60))
def test_what_was_used_longest_ago_is_deleted_first_and_what_was_used_since_the_cache_was_opened_is_not(
    max_pages, uses
):
    model = Model(max_pages)
    with tempfile.TemporaryDirectory() as place:
        blocks = BlockCache(place, max_pages * PAGE)
        for now, i in enumerate(uses, start=1):
            if i is None:
                blocks, model.opened = BlockCache(place, max_pages * PAGE), now
            else:
                assert use(blocks, i) == (i in model.used)
                model.use(i, now)

            assert numbers_in(place) == sorted(model.used, key=model.used.get)
            assert check_sound(place, max_pages * PAGE) == held_by(place) == model.held() * PAGE


def test_a_smaller_bound_is_kept_as_soon_as_the_cache_is_opened(tmp_path):
    blocks = BlockCache(str(tmp_path), 100 * PAGE)
    for i in range(10):
        use(blocks, i)
    BlockCache(str(tmp_path), 12 * PAGE)

    assert numbers_in(tmp_path) == [7, 8, 9]  # of 3, 4 and 5 pages
    assert check_sound(tmp_path, 12 * PAGE) == held_by(tmp_path) == 12 * PAGE


def test_a_block_that_can_never_fit_drives_nothing_out(tmp_path):
    use(BlockCache(str(tmp_path), 4 * PAGE), 3)
    use(BlockCache(str(tmp_path), 4 * PAGE), 4)

    assert numbers_in(tmp_path) == [3]


def hammer(place, seed, max_bytes, progress=None):
    """Use and damage blocks at random, as one reader after another; forever if ``progress`` is given."""
    draw = random.Random(seed)
    for _ in range(40) if progress is None else count():
        blocks = BlockCache(place, max_bytes)
        for _ in range(draw.randrange(12)):
            i = draw.randrange(30)
            use(blocks, i)
            if draw.random() < 0.05:
                blocks.drop(name_of(i))
        if progress is not None:
            os.write(progress, b".")


def started(target, *args):
    process = SERVER.Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.multiprocess
def test_many_processes_stay_within_the_bound_at_every_moment_and_read_what_is_right(tmp_path):
    max_bytes = 30 * PAGE  # all blocks together have 90 pages
    processes = [started(hammer, str(tmp_path), seed, max_bytes) for seed in range(4)]
    moments = 0
    while any(process.is_alive() for process in processes):
        check_sound(tmp_path, max_bytes)
        moments += 1
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0] * 4
    assert moments > 10
    assert check_sound(tmp_path, max_bytes) > 20 * PAGE


def hammer_and_tell(place, seed, max_bytes, fifo):
    hammer(place, seed, max_bytes, os.open(fifo, os.O_WRONLY))


@pytest.mark.multiprocess
def test_processes_that_are_killed_leave_nothing_wrong_behind(tmp_path):
    place, max_bytes = tmp_path / "cache", 30 * PAGE
    place.mkdir()
    draw = random.Random(0)
    others = [started(hammer, str(place), seed, max_bytes) for seed in range(2)]
    for seed in range(12):
        fifo = tmp_path / str(seed)
        os.mkfifo(fifo)
        victim = started(hammer_and_tell, str(place), seed, max_bytes, fifo)
        with fifo.open("rb", buffering=0) as progress:
            progress.read(draw.randrange(1, 5))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
        assert victim.exitcode == -signal.SIGKILL
        check_sound(place, max_bytes)
    for process in others:
        process.join()
        assert process.exitcode == 0

    BlockCache(str(place), max_bytes)
    assert list((place / FOLDER).glob(".*")) == []
    with CacheFolder(str(place)).locked() as usage:
        CacheFolder(str(place)).count(usage)
    check_sound(place, max_bytes)


MODULES = {cache.__file__, cachedir.__file__}


def kill_at(number):
    """Kill this process when it reaches a line of the cache's modules for the n-th time."""
    lines = count(1)

    def on_line(_, event, __):
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    sys.settrace(lambda frame, *_: on_line if frame.f_code.co_filename in MODULES else None)


def keep_and_drop(place, max_bytes, number):
    """Open a cache, keep a block, and find another one damaged; be killed at the n-th line."""
    kill_at(number)
    blocks = BlockCache(str(place), max_bytes)
    blocks.put(name_of(7), content_of(7))
    blocks.drop(name_of(3))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("state", ["new", "full"])
def test_a_process_that_is_killed_at_any_line_leaves_nothing_wrong_behind(tmp_path, state):
    max_bytes, old = 8 * PAGE, tmp_path / "old"
    old.mkdir()
    if state == "full":
        blocks = BlockCache(str(old), max_bytes)
        for i in (2, 3):
            use(blocks, i)
    for number in count(1):
        place = shutil.copytree(old, tmp_path / str(number))
        process = started(keep_and_drop, place, max_bytes, number)
        process.join()
        if (place / FOLDER).exists():
            check_sound(place, max_bytes)
        was_writing = list((place / FOLDER).glob(".*"))
        blocks = BlockCache(str(place), max_bytes)
        assert not was_writing or held_by(place) == check_sound(place, max_bytes)
        use(blocks, 11)

        assert use(blocks, 11)
        assert list((place / FOLDER).glob(".*")) == []
        check_sound(place, max_bytes)
        shutil.rmtree(place)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert number > 100


def test_what_a_living_process_is_writing_is_not_deleted_and_is_counted(tmp_path, monkeypatch):
    blocks, write = BlockCache(str(tmp_path), 10 * PAGE), os.write
    held = []

    def write_slowly(descriptor, data):
        if not held:
            held.append(check_sound(tmp_path, 10 * PAGE))
            other = BlockCache(str(tmp_path), 10 * PAGE)
            other.put(name_of(8), content_of(8))
            with CacheFolder(str(tmp_path)).locked() as usage:
                CacheFolder(str(tmp_path)).count(usage)
                held.append(usage.held)
            assert len(clear_cache(str(tmp_path))) == 1
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_slowly)
    blocks.put(name_of(4), content_of(4))

    assert held == [5 * PAGE, 9 * PAGE]
    assert numbers_in(tmp_path) == [4]
    assert check_sound(tmp_path, 10 * PAGE) == 5 * PAGE


def test_two_that_fetch_the_same_block_keep_it_once(tmp_path, monkeypatch):
    blocks, write = BlockCache(str(tmp_path), 20 * PAGE), os.write

    def write_meanwhile(descriptor, data):
        monkeypatch.setattr(os, "write", write)
        BlockCache(str(tmp_path), 20 * PAGE).put(name_of(4), content_of(4))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_meanwhile)
    blocks.put(name_of(4), content_of(4))

    assert numbers_in(tmp_path) == [4]
    assert check_sound(tmp_path, 20 * PAGE) == held_by(tmp_path) == 5 * PAGE


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("name", ["open", "ftruncate", "write", "utime"])
def test_what_goes_wrong_while_a_block_is_kept_leaves_nothing_of_it_and_drives_nothing_out(
    tmp_path, monkeypatch, name, error
):
    use(BlockCache(str(tmp_path), 10 * PAGE), 4)
    blocks, right = BlockCache(str(tmp_path), 10 * PAGE), getattr(os, name)

    def fail(what, *args, **options):
        if name == "open" and not args[0] & os.O_CREAT:
            return right(what, *args, **options)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        if isinstance(error, OSError):
            blocks.put(name_of(3), content_of(3))
        else:
            with pytest.raises(type(error)):
                blocks.put(name_of(3), content_of(3))
    assert numbers_in(tmp_path) == [4]
    assert list((tmp_path / FOLDER).glob(".*")) == []
    assert held_by(tmp_path) == 5 * PAGE


def test_clearing_leaves_nothing_of_ours_but_the_tag(tmp_path):
    blocks = BlockCache(str(tmp_path), 20 * PAGE)
    for i in (1, 2):
        use(blocks, i)
    (tmp_path / FOLDER / ".shardkit-0123456789abcdef").write_bytes(b"what a killed process has left")
    cleared = clear_cache(str(tmp_path))

    assert [(number_of(Path(block.path)), block.room) for block in cleared] == [(1, 2 * PAGE), (2, 3 * PAGE)]
    assert [path.name for path in (tmp_path / FOLDER).rglob("*") if path.is_file()] == ["CACHEDIR.TAG"]
    assert held_by(tmp_path) == 0
    assert [use(blocks, 1), use(blocks, 1)] == [False, True]


def test_a_block_that_is_there_already_drives_nothing_out(tmp_path):
    for i in (4, 9):
        use(BlockCache(str(tmp_path), 10 * PAGE), i)
    BlockCache(str(tmp_path), 10 * PAGE).put(name_of(9), content_of(9))

    assert numbers_in(tmp_path) == [4, 9]


def test_a_cache_is_known_as_ours_also_after_a_power_cut(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), sync(descriptor)))
    blocks = BlockCache(str(tmp_path), 10 * PAGE)
    use(blocks, 4)

    assert synced == [(tmp_path / FOLDER / "CACHEDIR.TAG").stat().st_size]


def test_a_fork_while_threads_use_a_cache_leaves_it_usable(tmp_path):
    blocks = BlockCache(str(tmp_path), 20 * PAGE)

    def put_and_get(i):
        blocks.put(name_of(i), content_of(i))
        return blocks.get(name_of(i), size_of(i)) in (None, content_of(i))

    assert fork_beside_threads(lambda draw: use(blocks, draw.randrange(30)), put_and_get) == [0] * 20
    check_sound(tmp_path, 20 * PAGE)


# Disks on which some operations fail. Each of these tests runs in a separate process, which mounts its own disk or
# gives up its privileges.


def mount_small_disk(folder, nbytes):
    """Mount a memory file system of a given size for this process alone; return whether the system allows that."""
    new_user, new_mounts = 0x10000000, 0x00020000
    libc = ctypes.CDLL(None)
    uid, gid = os.getuid(), os.getgid()
    try:
        if libc.unshare(new_user | new_mounts):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except PermissionError:  # as in some containers
        return False
    return libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={nbytes}".encode()) == 0


def pretend_small_disk(replace, folder, nbytes):
    """Let writes fail as they do on a full disk."""
    write = os.write

    def write_if_there_is_room(descriptor, data):
        used = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
        if used + len(data) > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    replace(os, "write", write_if_there_is_room)


def messages():
    """Return a list to which all warnings are added."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("shardkit").addHandler(handler)
    return found


def read_on_a_full_disk(packed, place, is_real):
    said = messages()
    if not (is_real and mount_small_disk(place, 256 * 1024)):
        pretend_small_disk(setattr, place, 256 * 1024)
    dataset = open_cached(packed / "none", place)
    for read in (by_loader, by_number, by_loader):
        assert dict(read(dataset)) == SAMPLES
    first = {block.shard for block in list_blocks(str(place))}
    assert 10 < len(list_blocks(str(place))) < num_blocks(packed / "none")
    assert list((place / FOLDER).glob(".*")) == []
    problem = "keeps no new blocks (No space left on device); they are read from their source"
    assert said == [f"{place / FOLDER}: {problem}"]

    other = pack_samples(place.parent / "other", samples={key: data[::-1] + b"." for key, data in SAMPLES.items()})
    for _ in range(2):
        by_loader(open_cached(other, place))
    assert {block.shard for block in list_blocks(str(place))} - first  # the least recently used blocks were deleted
    assert len(said) == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_real", [True, False])
def test_a_full_disk_is_no_error_and_is_said_once(tmp_path, packed, is_real):
    (tmp_path / "cache").mkdir()
    process = started(read_on_a_full_disk, packed, tmp_path / "cache", is_real)
    process.join()

    assert process.exitcode == 0


def read_where_nothing_can_be_written(url, place, problem):
    said = messages()
    before = sorted(place.rglob("*"))
    with without_rights():
        dataset = open_cached(url, place)
        for read in (by_loader, by_number, by_loader):
            assert dict(read(dataset)) == SAMPLES
    assert said == [f"{place / FOLDER}: {problem}"]
    assert sorted(place.rglob("*")) == before


@pytest.mark.multiprocess
@pytest.mark.parametrize("filled", ["not at all", "in part", "whole"])
def test_what_is_in_a_cache_that_cannot_be_written_to_is_used_and_the_rest_is_read(tmp_path, web, filled):
    place = tmp_path / "cache"
    place.mkdir()
    url = f"{web.url}/none"
    if filled != "not at all":
        by_loader(open_cached(url, place, LARGE if filled == "whole" else 300_000))
    kept = len(list_blocks(str(place))) if filled != "not at all" else 0
    for path in [place, *place.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = len(web.requests())
    problem = "keeps no new blocks (Permission denied); they are read from their source"
    process = started(read_where_nothing_can_be_written, url, place, problem)
    process.join()
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755)

    assert process.exitcode == 0
    asked = sum(".tar" in request.path for request in web.requests()[before:])
    epochs = 2 * (num_blocks(url) - kept)
    assert epochs <= asked <= epochs + len(SAMPLES)
    assert asked == 0 or filled != "whole"


def test_a_memory_file_system_is_a_place(web):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        dataset = open_cached(f"{web.url}/none", place)
        by_loader(dataset)

        assert blocks_asked_for(web, by_loader, dataset) == 0


# Other people's files


def test_files_of_others_are_never_deleted_or_changed(tmp_path):
    place, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    root = place / FOLDER
    (root / "aa").mkdir(parents=True)
    elsewhere.mkdir()
    BlockCache(str(tmp_path), 1)  # writes the tag
    shutil.copy(tmp_path / FOLDER / "CACHEDIR.TAG", root)
    (root / "bb").symlink_to(elsewhere)
    (root / "aaa").mkdir()
    names = [name_of(9).replace("000", "aaa", 1), name_of(9).replace("00", "bb", 1)]
    foreign = [
        place / "holiday.jpg",
        place / ".shardkit-0123",
        root / "notes.txt",
        root / names[0],
        root / "aa" / "notes.txt",
        root / "aa" / f"{names[0]}.bak",
        root / "aa" / names[1],
        root / "aaa" / names[0],
        elsewhere / names[1],
    ]
    for path in foreign:
        path.write_bytes(content_of(9))
    before = {path: path.read_bytes() for path in foreign}
    for _ in range(3):
        blocks = BlockCache(str(place), 8 * PAGE)
        for i in range(20):
            use(blocks, i)
        blocks.drop(name_of(19))
        assert {path: path.read_bytes() for path in foreign} == before
    assert len(clear_cache(str(place))) > 0

    assert {path: path.read_bytes() for path in foreign} == before


def test_a_folder_that_is_no_cache_of_ours_is_refused_and_left_as_it_is(tmp_path, packed):
    (tmp_path / "a" / FOLDER).mkdir(parents=True)
    (tmp_path / "a" / FOLDER / "photo.jpg").write_bytes(b"mine")
    (tmp_path / "b" / FOLDER).mkdir(parents=True)
    (tmp_path / "b" / FOLDER / "CACHEDIR.TAG").write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55\n# ccache\n")
    (tmp_path / "c" / FOLDER).mkdir(parents=True)
    (tmp_path / "c" / FOLDER / "CACHEDIR.TAG").touch()
    (tmp_path / "c" / FOLDER / "photo.jpg").write_bytes(b"mine")
    (tmp_path / "d").write_bytes(b"a file")
    before = contents_of(tmp_path)

    for name, problem in {
        "a": "is not a cache of this version of shardkit, so it is not changed; name another folder",
        "b": "is not a cache of this version of shardkit, so it is not changed; name another folder",
        "c": "is not a cache of this version of shardkit, so it is not changed; name another folder",
        "d": "is a file, expected a folder",
        "no/where": "cannot be made, as .*no does not exist; make that first",
    }.items():
        with pytest.raises(ArgumentError, match=f"^cache: .*{problem}"):
            open_cached(packed / "none", tmp_path / name)
        if name != "no/where":
            with pytest.raises(ArgumentError, match="has no cache of this version of shardkit"):
                clear_cache(str(tmp_path / name))
    assert contents_of(tmp_path) == before
    assert not (tmp_path / "no").exists()


def test_arguments_that_mean_no_cache_are_refused(tmp_path, packed):
    for arguments, problem in [
        ({"cache": tmp_path}, r"cache=.* and cache_bytes=None: give both, a folder and how much space it may use, as"),
        ({"cache_bytes": "1GB"}, r"cache=None and cache_bytes='1GB': give both, a folder and how much space it may"),
        ({"cache": tmp_path, "cache_bytes": "much"}, r"'much' is not a size"),
        ({"cache": tmp_path, "cache_bytes": 200}, r"cache_bytes=200 is less than the size of one block, \d"),
        ({"cache": "", "cache_bytes": "1GB"}, r"cache is empty, expected a path"),
        ({"cache": "s3://bucket/a", "cache_bytes": "1GB"}, r"cache: s3://bucket/a is not a folder of this machine"),
    ]:
        with pytest.raises(ArgumentError, match=problem):
            shardkit.ShardDataset(packed / "none", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_and_may_be_named_in_every_way(tmp_path, packed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets = [open_cached(packed / "none", place) for place in ("a", tmp_path / "b", f"file://{tmp_path}/c")]
    monkeypatch.chdir(packed)
    for dataset in datasets:
        by_loader(dataset)

    assert [len(list_blocks(f"{tmp_path}/{name}")) for name in "abc"] == [num_blocks(packed / "none")] * 3


def test_backups_leave_the_cache_out(tmp_path):
    BlockCache(str(tmp_path), 1)

    tag = (tmp_path / FOLDER / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55")  # as the specification requires


# Changes by other processes


@pytest.mark.parametrize("what", ["all", "the blocks", "the tag", "what the tag says"])
def test_a_cache_that_somebody_deletes_meanwhile_goes_on(tmp_path, packed, what, caplog):
    dataset = open_cached(packed / "none", tmp_path)
    by_loader(dataset)
    root = tmp_path / FOLDER
    if what == "all":
        shutil.rmtree(root)
    elif what == "the blocks":
        for path in root.glob("??"):
            shutil.rmtree(path)
    elif what == "the tag":
        shutil.rmtree(root)
        root.mkdir()
    else:
        (root / "CACHEDIR.TAG").write_bytes((root / "CACHEDIR.TAG").read_bytes()[:-30])

    assert dict(by_loader(dataset)) == SAMPLES
    assert len(list_blocks(str(tmp_path))) == num_blocks(packed / "none")
    assert caplog.text == ""


def test_room_that_somebody_has_made_is_found_after_a_while(tmp_path, monkeypatch):
    blocks = BlockCache(str(tmp_path), 10 * PAGE)
    for i in (4, 9):
        use(blocks, i)
    for block in list_blocks(str(tmp_path)):
        Path(block.path).unlink()

    assert [use(blocks, 3), use(blocks, 3)] == [False, False]  # it has not noticed the room yet
    monkeypatch.setattr(cache, "_RECOUNT", 0)
    assert [use(blocks, 3), use(blocks, 3)] == [False, True]
    assert check_sound(tmp_path, 10 * PAGE) == 4 * PAGE


@pytest.fixture
def listings(monkeypatch):
    """Return a list that grows whenever the blocks of a cache are listed."""
    listed, list_all = [], CacheFolder.blocks

    def list_and_tell(folder):
        listed.append(folder)
        return list_all(folder)

    monkeypatch.setattr(CacheFolder, "blocks", list_and_tell)
    return listed


def test_a_folder_is_not_listed_for_every_block_that_finds_no_room(tmp_path, listings):
    blocks = BlockCache(str(tmp_path), 10 * PAGE)
    for i in range(30):
        use(blocks, i)

    assert len(listings) <= 2


@pytest.mark.parametrize("is_disk_full", [True, False])
def test_a_folder_is_not_listed_for_every_block_that_makes_room(tmp_path, listings, monkeypatch, is_disk_full):
    max_bytes = 64 * PAGE
    old = BlockCache(str(tmp_path), max_bytes)
    for i in range(0, 64 * 5, 5):  # of one page each
        old.put(name_of(i), b"old")
    listings.clear()
    if is_disk_full:
        pretend_small_disk(monkeypatch.setattr, tmp_path, max_bytes)
    new = BlockCache(str(tmp_path), max_bytes if not is_disk_full else 2 * max_bytes)
    for i in range(0, 32 * 5, 5):
        new.put(name_of(i + 500), b"new")

    assert len(listings) <= 32 * 16 / 64
    assert len([number for number in numbers_in(tmp_path) if number >= 500]) >= 32 - len(listings)


def test_a_stranger_s_checksum_is_no_path(tmp_path):
    blocks = BlockCache(str(tmp_path / "cache"), 10 * PAGE)
    for sha256 in ("../../../../outside", "/etc/passwd", "", "A" * 64, "\ud800"):
        name = block_name(sha256, "none", 0, 7)
        blocks.put(name, b"content")

        assert blocks.get(name, 7) == b"content"
    assert len(list_blocks(str(tmp_path / "cache"))) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
