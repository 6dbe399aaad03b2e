"""With any fsspec filesystem, files are read correctly and completely or not at all, and are written whole or not."""

import logging
import multiprocessing
import pickle
import threading
from types import SimpleNamespace
from typing import ClassVar

import aiohttp
import fsspec
import fsspec.asyn
import pytest
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import shardkit
from shardkit.errors import (
    AccessError,
    ArgumentError,
    ChangedFileError,
    DatasetExistsError,
    MissingExtraError,
    MissingFileError,
    NoListingError,
    ShardkitError,
    StorageError,
    TruncatedShardError,
)
from shardkit.storage import fsspec as generic
from shardkit.storage import retry as attempts
from shardkit.storage.registry import storage_for
from tests.support.matrix import READERS, READS, SAMPLES, SOME, by_loader, by_stream, pack_samples, read_in_workers
from tests.support.servers.faults import READ_FAULTS
from tests.support.servers.programs import Nginx

DATA = bytes(range(256)) * 100


class Flaky(MemoryFileSystem):
    """A filesystem whose operations first do what a test has prepared, one by one, and then work normally."""

    protocol = "flaky"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    prepared: ClassVar = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    @classmethod
    def prepare(cls, **operations):
        cls.store.clear()
        cls.prepared = {name: list(what) for name, what in operations.items()}

    @classmethod
    def next(cls, name):
        return cls.prepared.get(name) and cls.prepared[name].pop(0)

    def cat_file(self, path, start=None, end=None, **options):
        data = super().cat_file(path, start=start, end=end, **options)
        what = self.next("cat_file")
        if isinstance(what, Exception):
            raise what
        return what(data) if what else data

    def put_file(self, lpath, rpath, **options):
        super().put_file(lpath, rpath, **options)
        what = self.next("put_file")
        if isinstance(what, BaseException):
            raise what
        if what:
            self.pipe_file(rpath, what(self.cat_file(rpath)))

    def ls(self, path, detail=True, **options):
        if what := self.next("ls"):
            raise what
        return super().ls(path, detail=detail, **options)


class PlainHTTP(HTTPFileSystem):
    """fsspec's own filesystem for http."""

    protocol = "plainhttp"

    @classmethod
    def _strip_protocol(cls, path):
        return path.replace("plainhttp://", "http://")

    def ls(self, url, detail=True, **options):
        raise NotImplementedError


@pytest.fixture(autouse=True, scope="module")
def filesystems():
    """Register the filesystems above with fsspec."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    fsspec.register_implementation("plainhttp", PlainHTTP, clobber=True)
    yield
    MemoryFileSystem.store.clear()


def answered(status):
    """Return the error that a filesystem raises if its server answers with a status."""
    return aiohttp.ClientResponseError(SimpleNamespace(real_url="http://host"), (), status=status)


def write(url, data, *, overwrite=False, meanwhile=lambda: None):
    with storage_for(url).create(url, overwrite=overwrite) as file:
        file.write(data)
        meanwhile()


@pytest.fixture
def url():
    """Return the URL of a file in the filesystem whose operations a test prepares."""
    Flaky.prepare()
    write("flaky://folder/a.tar", DATA)
    return "flaky://folder/a.tar"


@pytest.mark.parametrize("place", ["memory://a", "simplecache::memory://b"])
@pytest.mark.parametrize("compression", ["none", "zst"])
def test_a_dataset_is_packed_to_any_place_and_read_from_it(place, compression, tmp_path):
    url = f"{place}/{compression}/train"
    pack_samples(url, compression=compression)
    pack_samples(tmp_path / "train", compression=compression)
    dataset = shardkit.ShardDataset(url)

    assert dataset.digest == shardkit.ShardDataset(tmp_path / "train").digest
    assert dataset.by_key("0123")["bin"] == SAMPLES["0123"]
    assert dict(by_loader(url, {})) == dict(by_stream(url, {})) == SAMPLES
    assert shardkit.verify(url).ok
    assert (
        shardkit.index_shards(f"{url}/train-*.tar*", out=tmp_path / "index").shards[0].url.startswith(f"{url}/train-")
    )
    with pytest.raises(DatasetExistsError):
        pack_samples(url, shard_samples=70)


@pytest.fixture(scope="module")
def web(processes, tmp_path_factory, authority):
    """Provide a web server with a dataset."""
    with Nginx(processes, tmp_path_factory.mktemp("generic"), authority) as server:
        pack_samples(server.folder / "none", compression="none")
        yield server


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("fault", [fault for fault in READ_FAULTS if fault != "refused, then up"])
def test_faults_that_a_filesystem_does_not_see_are_seen(fault, read, web, proxy, monkeypatch, record_property):
    monkeypatch.setattr(attempts, "MAX_TRIES", 6)
    faulty = proxy(web.url)
    url = f"plainhttp://127.0.0.1:{faulty.port}/none"
    options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}}
    faulty.inject(fault, path="*-000001.tar")
    end = "right"
    try:
        found = READERS[read](url, options)
    except ShardkitError as error:
        end = type(error).__name__
    else:
        if read == "tar" and fault.startswith("bit flip"):
            end = "unseen"
        else:
            assert dict(found) == {key: SAMPLES[key] for key, _ in found}
        assert len(found) == len(dict(found)) == len(range(len(SAMPLES))[SOME if read == "dataset" else slice(None)])
    record_property("fault", ("fsspec", fault, read, end))


def test_a_range_is_all_of_it_or_an_error(url):
    storage = storage_for(url)

    assert storage.read_range(url, 1000, 500) == DATA[1000:1500]
    assert storage.read_range(url, 0, 0) == b""
    out = bytearray(10)
    storage.read_into(url, 5, memoryview(out))
    assert out == DATA[5:15]
    with pytest.raises(TruncatedShardError, match="ends at byte 25,600, expected 500 bytes from byte 25,500"):
        storage.read_range(url, 25_500, 500)
    with pytest.raises(MissingFileError, match=r"flaky://folder/b: does not exist; correct the URL"):
        storage.read_range("flaky://folder/b", 0, 1)


@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize(
    "what",
    [
        ConnectionError("reset"),
        TimeoutError(),
        aiohttp.ServerDisconnectedError(),
        lambda data: data[:-1],
        lambda _: b"",
    ],
    ids=["reset", "timeout", "disconnected", "short", "empty"],
)
def test_what_may_pass_is_tried_again(url, what):
    Flaky.prepared = {"cat_file": [what] * 5}
    storage = storage_for(url)

    assert storage.read_range(url, 0, 1000) == DATA[:1000]
    Flaky.prepared = {"cat_file": [what] * 50}
    with pytest.raises(StorageError, match=r"a\.tar: cannot be read from byte 0 on, because .* \(tried 12 times in"):
        storage.read_range(url, 0, 1000)


def test_more_than_was_asked_for_is_no_range(url):
    Flaky.prepared = {"cat_file": [lambda data: data + b"x"]}
    assert storage_for(url).read_range(url, 0, 1000) == DATA[:1000]
    Flaky.prepared = {"cat_file": [lambda data: data + b"x"] * 2}
    with pytest.raises(StorageError, match="because 1,001 bytes arrived instead of 1,000 "):
        storage_for(url).read_range(url, 0, 1000)


@pytest.mark.parametrize(
    ("what", "error", "problem"),
    [
        (answered(403), AccessError, "access is refused"),
        (answered(404), MissingFileError, "does not exist"),
        (answered(400), StorageError, "cannot be read from byte 0 on, because ClientResponseError: 400"),
        (PermissionError("no"), AccessError, r"access is refused \(PermissionError: no\); correct storage_options"),
        (FileNotFoundError("no"), MissingFileError, "does not exist"),
        (ValueError("http://me:SECRET@host?sig=SECRET"), StorageError, r"because ValueError: http://host\?\.\.\. \("),
    ],
)
def test_what_will_not_pass_is_said_at_once(url, what, error, problem):
    Flaky.prepared = {"cat_file": [what]}
    with pytest.raises(error, match=problem) as caught:
        storage_for(url).read_range(url, 0, 1000)

    assert "SECRET" not in str(caught.value)
    assert caught.value.url == url


def test_a_stream_is_read_in_windows_and_skips_without_reading(url, monkeypatch):
    monkeypatch.setattr(generic, "_WINDOW_BYTES", 100)
    stream = storage_for(url).open(url, 10)

    assert stream.size == len(DATA)
    assert stream.read(150) == DATA[10:160]
    stream.skip(1000)
    assert stream.read(50) == DATA[1160:1210]
    stream.skip(20)
    assert stream.read(20) == DATA[1230:1250]
    assert stream.read(1 << 20) == DATA[1250:]
    stream.skip(5)
    assert stream.read(1) == b""
    stream.close()


def test_a_file_that_is_replaced_while_it_is_streamed_is_an_error(url):
    stream = storage_for(url).open(url)
    write(url, DATA[::-1], overwrite=True)
    with pytest.raises(ChangedFileError, match="was replaced while it was being read"):
        stream.read(len(DATA))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("overwrite", [False, True])
def test_after_an_exception_nothing_is_left_and_what_was_there_is_as_it_was(url, error, overwrite):
    other = url if overwrite else "flaky://folder/b.tar"

    def fail():
        raise error

    with pytest.raises(error):
        write(other, b"half", meanwhile=fail, overwrite=overwrite)
    Flaky.prepared = {"put_file": [error("while it is put")] * 20}
    with pytest.raises(error if error is KeyboardInterrupt else StorageError):
        write(other, b"half", overwrite=overwrite)

    assert Flaky.store.keys() == {"/folder/a.tar"}
    assert storage_for(url).read_range(url, 0, len(DATA)) == DATA


@pytest.mark.usefixtures("tries")
def test_a_file_is_put_again_if_that_failed_and_is_as_long_as_it_should_be(url):
    Flaky.prepared = {"put_file": [ConnectionError("reset")] * 3}
    write(f"{url}2", DATA)
    assert storage_for(url).read_range(f"{url}2", 0, len(DATA)) == DATA

    Flaky.prepared = {"put_file": [lambda data: data[:-1]]}
    with pytest.raises(StorageError, match="has 25,599 bytes, 25,600 were sent; it was deleted, write it again"):
        write(f"{url}3", DATA)
    assert storage_for(url).list("flaky://folder") == ["a.tar", "a.tar2"]


def test_a_name_that_is_taken_is_refused_and_replaced_only_when_asked(url):
    refused = "exists already; choose another name, or pass overwrite=True"
    with pytest.raises(DatasetExistsError, match=refused):
        write(url, b"mine")
    with pytest.raises(DatasetExistsError, match=refused):
        write("flaky://folder/b", b"mine", meanwhile=lambda: write("flaky://folder/b", b"theirs"))
    write(url, b"mine", overwrite=True)

    assert storage_for(url).info(url).size == 4
    assert storage_for(url).read_range("flaky://folder/b", 0, 6) == b"theirs"


def test_folders_are_listed_and_files_are_no_folders(url):
    storage = storage_for(url)
    write("flaky://folder/inner/b", b"1")
    write("flaky://folder/.shardkit-0", b"1")

    assert storage.list("flaky://folder") == storage.list("flaky://folder/") == ["a.tar", "inner"]
    assert storage.list("flaky://nothing") == []
    with pytest.raises(NotADirectoryError):
        storage.list(url)
    with pytest.raises(FileNotFoundError):
        storage.info("flaky://folder")
    storage.delete(url)
    storage.delete(url)
    assert storage.list("flaky://folder") == ["inner"]
    Flaky.prepared = {"ls": [NotImplementedError()]}
    with pytest.raises(NoListingError, match="its filesystem lists no folders; name the files"):
        storage.list("flaky://folder")


def test_a_filesystem_that_is_not_installed_or_is_asked_wrongly_is_said_to_be():
    fsspec.register_implementation("absent", "no_such_module.FileSystem", clobber=True)
    with pytest.raises(MissingExtraError, match="absent://a: its filesystem is not installed: "):
        storage_for("absent://a").info("absent://a")
    with pytest.raises(MissingFileError):
        storage_for("zip://a::memory://none.zip").info("zip://a::memory://none.zip")
    with pytest.raises(ArgumentError, match="does not read or write nonsense: URLs, nor does fsspec"):
        storage_for("nonsense://a")


def test_secrets_are_in_no_error_log_or_representation(url, caplog, tries):
    caplog.set_level(logging.DEBUG, logger="shardkit")
    secret = "flaky://me:SECRET@folder/a.tar"
    write(secret, DATA)
    storage = storage_for(secret, {"password": "SECRET"})
    Flaky.prepared = {"cat_file": [ConnectionError("https://host/a?sig=SECRET"), PermissionError("SECRET"[:0])]}
    tries.append(lambda: None)
    with pytest.raises(AccessError) as caught:
        storage.read_range(secret, 0, 1)

    shown = [str(caught.value), caught.value.url, caplog.text, repr(storage), repr(storage.info(secret)), url]
    assert "trying again" in caplog.text
    assert [text for text in shown if "SECRET" in text] == []


def read_in_child(url, queue):
    try:
        queue.put(storage_for(url).read_range(url, 0, 100))
    except Exception as error:  # noqa: BLE001 - the parent checks it
        queue.put(repr(error))


@pytest.mark.multiprocess
@pytest.mark.parametrize("lock_is_held", [False, True])
def test_a_forked_child_reads_after_its_parent_even_if_a_thread_held_a_lock(web, lock_is_held):
    url = f"simplecache::plainhttp://127.0.0.1:{web.port.number}/none/none-000000.tar"
    storage = storage_for(url)
    expected = storage.read_range(url, 0, 100)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    held, done = threading.Event(), threading.Event()

    def hold():
        with fsspec.asyn.get_lock():
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    if lock_is_held:
        holder.start()
        held.wait()
    child = context.Process(target=read_in_child, args=(url, queue))
    child.start()
    assert queue.get() == expected
    child.join()
    done.set()
    if lock_is_held:
        holder.join()
    assert storage.read_range(url, 0, 100) == expected


@pytest.mark.multiprocess
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_worker_processes_read_after_their_parent_has_read(start, kind, web, record_property):
    url = f"simplecache::http://127.0.0.1:{web.port.number}/none"
    read_in_workers(kind, start, url if kind == "dataset" else f"{url}/manifest.json", {})

    record_property("fault", ("fsspec", f"{start} after the parent has read", kind, "right"))


@pytest.mark.parametrize("options", [{"token": 1}, {"simplecache": {"token": 1}, "memory": {}}])
def test_an_option_that_a_cache_would_drop_is_refused(options):
    url = "simplecache::memory://a.tar"
    with pytest.raises(
        ArgumentError, match="token is not an option of simplecache; correct it, or say whose it is: "
    ) as caught:
        storage_for(url, options).info(url)

    assert str(caught.value).endswith(': {"memory": {"token": ...}}')


def test_options_go_to_the_filesystems_that_they_are_for(tmp_path):
    options = {"cache_storage": str(tmp_path), "use_listings_cache": True, "memory": {"token": 1}, "gs": {"token": 2}}
    write("memory://a.tar", DATA)
    url = "simplecache::memory://a.tar"

    assert storage_for(url, options).read_range(url, 0, 10) == DATA[:10]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_storage_may_be_pickled(url):
    copy = pickle.loads(pickle.dumps(storage_for(url, {"a": 1})))

    assert copy.read_range(url, 0, 10) == DATA[:10]
