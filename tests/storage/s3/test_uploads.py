"""Files written to an S3 server are there whole or not at all, despite every fault that networks are known for."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import AccessError, DatasetExistsError, ShardkitError, StorageError
from shardkit.storage import spool
from shardkit.storage.registry import storage_for
from shardkit.storage.s3 import uploads
from tests.storage.s3.test_storage import options_for
from tests.support.matrix import SAMPLES, pack_samples
from tests.support.servers.faults import UPLOAD_FAULTS

OLD = b"what was there before"
SMALL = bytes(range(256)) * 40
LARGE = bytes(range(251)) * 48_000  # three parts

# The errors of the faults that make a write fail; after all other faults the file is there.
ENDS = {
    "PUT 403": AccessError,
    "part 500 for ever": StorageError,
    "412 to conditional PUT": DatasetExistsError,
    ("412 to Complete", "new"): DatasetExistsError,
    ("412 to Complete", "replaced"): StorageError,
}
ONLY_PARTS = {name for name in UPLOAD_FAULTS if any(word in name.lower() for word in ("part", "complete", "create"))}
ONLY_NEW = {name for name in UPLOAD_FAULTS if "conditional" in name}
CASES = [
    (fault, way)
    for fault in UPLOAD_FAULTS
    for way in ("whole, new", "whole, replaced", "parts, new", "parts, replaced")
    if (fault not in ONLY_PARTS or "parts" in way) and (fault not in ONLY_NEW or way == "whole, new")
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Let files that would be sent whole be sent in parts, as small as servers allow."""
    monkeypatch.setattr(uploads, "ONE_REQUEST_BYTES", 1 << 20)
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)


def write(storage, url, data, *, overwrite=False, meanwhile=lambda: None):
    with storage.create(url, overwrite=overwrite) as file:
        file.write(data)
        meanwhile()


@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize(("fault", "way"), CASES)
def test_every_fault_of_an_upload_leaves_the_old_file_or_the_whole_new_one(fault, way, moto, proxy, record_property):
    size, state = way.split(", ")
    bucket, data = moto.make_bucket(), SMALL if size == "whole" else LARGE
    url = f"s3://{bucket}/a.tar"
    direct = storage_for(url, options_for(moto))
    if state == "replaced":
        write(direct, url, OLD)
    faulty = proxy(moto.url)
    # Only answers to HEAD are changed: with other ETags for the parts, the upload could not be completed.
    rule = faulty.inject(fault, **({"method": "HEAD"} if fault == "ETag is no MD5" else {}))
    end, about = None, url
    try:
        write(storage_for(url, options_for(moto, faulty.url)), url, data, overwrite=state == "replaced")
    except ShardkitError as error:
        end, about = type(error), error.url
    record_property("fault", ("upload", fault, way, end.__name__ if end else "written"))

    assert rule.hits
    assert about == url
    assert end is ENDS.get((fault, state), ENDS.get(fault))
    if end is None:
        assert direct.read_range(url, 0, len(data)) == data
        assert direct.info(url).size == len(data)
    else:
        assert direct.list(f"s3://{bucket}") == (["a.tar"] if state == "replaced" else [])
        assert state == "new" or direct.read_range(url, 0, len(OLD)) == OLD
    assert list(direct.serving(url).uploads.list(f"s3://{bucket}")) == []


@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize("fault", ["bit flip in PUT", "lost response to conditional PUT", "Complete 500, but done"])
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
def test_a_real_server_takes_what_is_sent_again(fault, data, ceph, proxy):
    url = f"s3://{ceph.make_bucket()}/a.tar"
    faulty = proxy(ceph.url)
    faulty.inject(fault)
    write(storage_for(url, options_for(ceph, faulty.url)), url, data)

    assert storage_for(url, options_for(ceph)).read_range(url, 0, len(data)) == data


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "whole", "parts"])
@pytest.mark.parametrize("server", ["moto", "ceph"])
def test_a_name_that_is_taken_is_refused_and_replaced_only_when_asked(data, server, request):
    server = request.getfixturevalue(server)
    url = f"s3://{server.make_bucket()}/a.tar"
    storage = storage_for(url, options_for(server))
    write(storage, url, data)
    with pytest.raises(
        DatasetExistsError, match=r"a\.tar: exists already; choose another name, or pass overwrite=True"
    ):
        write(storage, url, OLD)
    assert storage.info(url).size == len(data)
    write(storage, url, OLD, overwrite=True)
    assert storage.read_range(url, 0, len(OLD)) == OLD
    storage.delete(url)
    storage.delete(url)

    assert storage.list(url.rpartition("/")[0]) == []


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
def test_a_name_that_is_taken_meanwhile_is_not_replaced(data, moto, record_property):
    url = f"s3://{moto.make_bucket()}/a.tar"
    storage = storage_for(url, options_for(moto))
    with pytest.raises(DatasetExistsError):
        write(storage, url, data, meanwhile=lambda: write(storage, url, OLD))

    assert storage.read_range(url, 0, len(OLD)) == OLD
    # An identical file is not a conflict.
    write(storage, f"{url}2", data, meanwhile=lambda: write(storage, f"{url}2", data))
    way = "whole, new" if data is SMALL else "parts, new"
    record_property("fault", ("upload", "412, other content is there", way, "DatasetExistsError"))
    record_property("fault", ("upload", "412, the same content is there", way, "written"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_exception_while_it_is_written_nothing_is_there(error, moto, record_property):
    url = f"s3://{moto.make_bucket()}/a.tar"
    storage = storage_for(url, options_for(moto))

    def fail():
        raise error

    with pytest.raises(error):
        write(storage, url, LARGE, meanwhile=fail)

    assert storage.list(url.rpartition("/")[0]) == []
    record_property("fault", ("upload", f"{error.__name__} in the writer", "parts, new", "nothing"))


def test_ctrl_c_while_parts_are_sent_takes_them_back(moto, monkeypatch, record_property):
    url = f"s3://{moto.make_bucket()}/a.tar"
    storage = storage_for(url, options_for(moto))
    send_part = uploads.Uploads._send_part

    def interrupted(self, url, file, content, number, place):
        if number == 3:
            raise KeyboardInterrupt
        return send_part(self, url, file, content, number, place)

    monkeypatch.setattr(uploads.Uploads, "_send_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(storage, url, LARGE)

    assert storage.list(url.rpartition("/")[0]) == []
    assert list(storage.serving(url).uploads.list(url)) == []
    record_property("fault", ("upload", "Ctrl-C while it is sent", "parts, new", "nothing"))


def test_a_full_disk_where_files_wait_says_where_that_is(moto, record_property):
    url = f"s3://{moto.make_bucket()}/a.tar"

    def fill():
        with storage_for(url, options_for(moto)).create(url) as file, Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), file.fileno())
            file.write(SMALL)

    with pytest.raises(StorageError, match="No space left on device") as caught:
        fill()

    record_property("fault", ("upload", "disk full in spool", "whole, new", "StorageError"))
    place = f"{spool.tempfile.gettempdir()} (TMPDIR, where {url} waits until it is whole)"
    assert str(caught.value).startswith(f"{place}: cannot be written, because the disk is full")
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_changes_while_it_is_sent_is_refused(moto, monkeypatch, record_property):
    url = f"s3://{moto.make_bucket()}/a.tar"
    of = uploads._Content.of

    def change(file):
        content = of(file)
        file.seek(6 << 20)
        file.write(b"changed")
        file.flush()
        return content

    monkeypatch.setattr(uploads._Content, "of", change)
    with pytest.raises(StorageError, match="the file was changed while it was being sent; write it again"):
        write(storage_for(url, options_for(moto)), url, LARGE)
    assert list(storage_for(url, options_for(moto)).serving(url).uploads.list(url)) == []
    record_property("fault", ("upload", "spool changed during upload", "parts, new", "StorageError"))


@pytest.mark.usefixtures("tries")
def test_what_is_stored_as_something_else_for_ever_is_deleted(moto, proxy):
    url = f"s3://{moto.make_bucket()}/a.tar"
    faulty = proxy(moto.url)
    faulty.inject("bit flip in PUT", times=None)
    with pytest.raises(StorageError, match=r"what is stored is not what was sent: its ETag is .*; it was deleted"):
        write(storage_for(url, options_for(moto, faulty.url)), url, SMALL)

    assert storage_for(url, options_for(moto)).list(url.rpartition("/")[0]) == []


def test_a_pack_that_was_interrupted_sends_only_what_is_missing(moto, proxy, tries):  # noqa: ARG001
    url = f"s3://{moto.make_bucket()}/train"
    faulty = proxy(moto.url)
    options = options_for(moto, faulty.url)
    rule = faulty.inject("PUT 403", path="*-000002.tar")
    with pytest.raises(AccessError):
        pack_samples(url, compression="none", num_workers=1, storage_options=options)
    with pytest.raises(shardkit.UnfinishedDatasetError, match="run the same pack again"):
        shardkit.ShardDataset(url, storage_options=options)
    assert rule.hits
    faulty.clear()
    pack_samples(url, compression="none", num_workers=1, storage_options=options)

    sent = [entry["path"].rpartition("/train/")[2] for entry in faulty.log() if entry["method"] == "PUT"]
    assert [re.sub(r"[0-9a-f]{16}", "*", name) for name in sent if "huggingface" not in name] == [
        *["__index__/train-000002.*.parquet", "train-000002.tar"],
        *["__index__/train-000003.*.parquet", "train-000003.tar"],
        *["__index__/blocks.*.npy", "__index__/columns.*.parquet", "__index__/manifest-*.json", "manifest.json"],
    ]
    dataset = shardkit.ShardDataset(url, storage_options=options)
    assert {sample["__key__"]: sample["bin"] for sample in dataset} == SAMPLES
    faulty.clear()
    pack_samples(url, compression="none", storage_options=options)
    assert [entry for entry in faulty.log() if entry["method"] == "PUT"] == []


def test_a_dataset_in_a_bucket_is_in_the_way_of_another(moto):
    url, options = f"s3://{moto.make_bucket()}/train", {"storage_options": options_for(moto)}
    pack_samples(url, **options)
    with pytest.raises(DatasetExistsError, match="holds a dataset of another pack"):
        pack_samples(url, shard_samples=70, **options)
    with pytest.raises(DatasetExistsError, match="holds a dataset already"):
        shardkit.ShardWriter(url, **options)
    with shardkit.ShardWriter(url, overwrite=True, **options) as writer:
        writer.write({"__key__": "a", "txt": "b"})

    assert shardkit.ShardDataset(url, **options).keys() == ["a"]
    storage = storage_for(url, options["storage_options"])
    assert {"manifest.json", "train-000000.tar"} == {n for n in storage.list(url) if n[0] not in "._"}
    assert len([name for name in storage.list(f"{url}/__index__") if name.startswith("train-")]) == 1


def test_splits_lie_in_folders_of_a_bucket(moto):
    url, options = f"s3://{moto.make_bucket()}/data", {"storage_options": options_for(moto)}
    pack_samples(url, splits={"train": 0.8, "val": 0.2}, **options)
    keys = [set(shardkit.ShardDataset(f"{url}/{name}", **options).keys()) for name in ("train", "val")]

    assert keys[0] | keys[1] == set(SAMPLES)
    with pytest.raises(shardkit.DatasetError, match=r"give one of the datasets in it: .*/data/train"):
        shardkit.ShardStream(url, **options)


def test_a_transform_is_gone_through_once_though_the_pack_is_interrupted(moto, proxy, tries, tmp_path):  # noqa: ARG001
    (tmp_path / "files").mkdir()
    for key, data in SAMPLES.items():
        (tmp_path / "files" / f"{key}.bin").write_bytes(data)
    called = []
    url, faulty = f"s3://{moto.make_bucket()}/train", proxy(moto.url)
    options = {"storage_options": options_for(moto, faulty.url), "shard_samples": 50, "progress": False}
    options["transform"] = lambda sample: called.append(sample["__key__"]) or sample
    faulty.inject("part 500 for ever", query="", path="*-000001.tar*")
    with pytest.raises(StorageError):
        shardkit.pack(shardkit.FileFolder(tmp_path / "files"), url, **options)
    faulty.clear()
    shardkit.pack(shardkit.FileFolder(tmp_path / "files"), url, **options)

    assert len(called) == len(SAMPLES)
    assert len(shardkit.ShardDataset(url, storage_options=options["storage_options"])) == len(SAMPLES)


KILLED = """
import sys, json, shardkit
from shardkit.storage.s3 import uploads
uploads.ONE_REQUEST_BYTES = 1 << 20
uploads.PART_BYTES = 5 << 20
samples = ({"__key__": f"{i:04d}", "bin": bytes(int(sys.argv[3]))} for i in range(4))
shardkit.pack(samples, sys.argv[1], compression="none", progress=False, storage_options=json.loads(sys.argv[2]))
"""


def kill_pack(url, server, faulty, moment, size=3_000_000):
    """Begin a pack in another process, and kill it while it makes a request, which is held and returned."""
    held = faulty.hold(**moment)
    options = json.dumps(options_for(server, faulty.url, config_kwargs={"read_timeout": 60}))
    process = subprocess.Popen([sys.executable, "-c", KILLED, url, options, str(size)], cwd=Path(__file__).parents[3])
    held.wait()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return held


MOMENTS = {
    "unfinished.json": ({"method": "PUT", "path": "*/unfinished.json"}, 1000),
    "PUT": ({"method": "PUT", "path": "*.tar"}, 1000),
    "Create": ({"method": "POST", "query": "uploads"}, 3_000_000),
    "a part": ({"method": "PUT", "query": "partNumber=1"}, 3_000_000),
    "Complete": ({"method": "POST", "query": "uploadId="}, 3_000_000),
    "index": ({"method": "PUT", "path": "*.parquet"}, 1000),
    "block tables": ({"method": "PUT", "path": "*.npy"}, 1000),
    "manifest's copy": ({"method": "PUT", "path": "*/manifest-*.json"}, 1000),
    "manifest": ({"method": "PUT", "path": "*/manifest.json"}, 1000),
    "the end": ({"method": "DELETE", "path": "*/unfinished.json"}, 1000),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_pack_that_is_killed_at_any_request_leaves_whole_files_and_goes_on(
    moment, moto, proxy, tmp_path, record_property
):
    bucket, (request, size) = moto.make_bucket(), MOMENTS[moment]
    url, options = f"s3://{bucket}/train", {"storage_options": options_for(moto)}

    def pack(destination, **options):
        samples = ({"__key__": f"{i:04d}", "bin": bytes(size)} for i in range(4))
        shardkit.pack(samples, destination, compression="none", progress=False, **options)

    pack(tmp_path / "train")
    kill_pack(url, moto, proxy(moto.url), request, size)
    storage = storage_for(url, options["storage_options"])
    for name in storage.list(url):
        if name.startswith("train-"):
            whole = (tmp_path / "train" / name).read_bytes()
            assert storage.info(f"{url}/{name}").size == len(whole)
            assert storage.read_range(f"{url}/{name}", 0, len(whole)) == whole
    with pytest.raises(shardkit.UnfinishedDatasetError if moment != "unfinished.json" else shardkit.DatasetError):
        shardkit.ShardDataset(url, **options)
    record_property("fault", ("upload", f"kill -9 at {moment}", "a pack", "no dataset, whole files"))
    pack(url, **options)

    assert shardkit.ShardDataset(url, **options).digest == shardkit.ShardDataset(tmp_path / "train").digest
    assert shardkit.verify(url, **options).ok


@pytest.mark.multiprocess
def test_a_pack_that_is_killed_leaves_no_visible_dataset_and_its_upload_can_be_taken_back(ceph, proxy):
    bucket = ceph.make_bucket()
    url, faulty = f"s3://{bucket}/train", proxy(ceph.url)
    kill_pack(url, ceph, faulty, {"method": "PUT", "query": "partNumber=2"}).release()
    direct = options_for(ceph)
    storage = storage_for(url, direct)

    assert storage.list(url) == ["__index__", "unfinished.json"]  # an index comes before its shard
    (left,) = storage.serving(url).uploads.list(f"s3://{bucket}")
    assert left.url == f"{url}/train-000000.tar"
    assert 0 <= time.time() - left.began < 600
    storage.serving(url).uploads.abort(left)
    storage.serving(url).uploads.abort(left)
    assert list(storage.serving(url).uploads.list(f"s3://{bucket}")) == []
    assert os.environ.get("TMPDIR") is None or not list(Path(os.environ["TMPDIR"]).glob("*.spool"))
