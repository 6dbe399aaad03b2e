"""Files on web servers are read like local files, despite every fault that networks are known for."""

import json
import shutil
import threading
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import (
    AccessError,
    ArgumentError,
    ShardError,
    StorageError,
)
from shardkit.format.index import BLOCK_BYTES, open_index
from shardkit.inspection.contents import list_samples, list_shards, read_member
from shardkit.loading import fetch
from shardkit.storage.registry import storage_for
from tests.support import matrix
from tests.support.forge import manifest_of
from tests.support.servers.faults import READ_FAULTS
from tests.support.servers.programs import Nginx


@pytest.fixture(scope="module")
def web(processes, tmp_path_factory, authority):
    """Provide a web server with a dataset for each compression."""
    with Nginx(processes, tmp_path_factory.mktemp("web"), authority) as server:
        for compression in ("none", "zst"):
            matrix.pack_samples(server.folder / compression, compression=compression)
        matrix.pack_samples(
            server.folder / "none-wide", compression="none", block_bytes="100kB", others={"raw": bytes(20_000)}
        )
        yield server


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", [*matrix.READS, "parts"])
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_every_fault_of_a_network_ends_in_the_right_samples_or_in_an_error(
    fault, read, web, proxy, tries, record_property, monkeypatch
):
    if read == "parts":
        for module in ("access", "index_cache", "extents"):
            monkeypatch.setattr(f"shardkit.reading.{module}.REQUEST_BYTES", 5000)
    faulty = proxy(web.url)
    end = matrix.read_through(fault, read, faulty, f"{faulty.url}/none", matrix.OPTIONS, tries)
    record_property("fault", ("http", fault, read, end))


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", matrix.READS)
def test_a_host_that_does_not_exist_is_an_error_at_once(read, tries, record_property):
    tries.append(lambda: pytest.fail("it was tried again"))
    with pytest.raises(StorageError, match="the name of its host is not known") as caught:
        matrix.READERS[read]("http://nowhere.invalid/none", matrix.OPTIONS)
    record_property("fault", ("http", "DNS failure", read, caught.type.__name__))


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", matrix.READS)
@pytest.mark.parametrize("cut", ["at a member boundary", "in a header", "in data", "before the end marker"])
def test_a_shard_that_was_cut_is_an_error_and_never_a_shorter_one(cut, read, web, record_property):
    name = f"{read} {cut}".replace(" ", "-")
    folder = Path(shutil.copytree(web.folder / "none", web.folder / name / "none"))
    shard, member = folder / "none-000001.tar", 512 + 2048  # each member is at least this large
    whole = shard.read_bytes()
    boundary = next(at for at in range(30 * member, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar")
    places = {"at a member boundary": boundary, "in a header": boundary + 100, "in data": boundary + 1000}
    shard.write_bytes(whole[: places.get(cut, len(whole) - 1024)])
    found, end, about = [], "right", ""
    try:
        found = matrix.READERS[read](f"{web.url}/{name}/none", matrix.OPTIONS)
    except ShardError as error:
        end, about = type(error).__name__, error.url
    record_property("fault", ("http", f"tar cut {cut}", read, end))

    is_seen = read in matrix.FORWARD or cut != "before the end marker"  # a reader that has an index does not read there
    assert end == ("TruncatedShardError" if is_seen else "right")
    assert (
        about.endswith("none-000001.tar")
        if is_seen
        else found == matrix.READERS[read](f"{web.url}/none", matrix.OPTIONS)
    )


def test_a_dataset_on_a_web_server_is_the_local_one(web):
    for compression in ("none", "zst"):
        there, here = (shardkit.ShardDataset(place) for place in (f"{web.url}/{compression}", web.folder / compression))

        assert there.digest == here.digest
        assert there.keys() == here.keys()
        assert (there[7]["bin"], there.by_key("0123")["bin"]) == (here[7]["bin"], matrix.SAMPLES["0123"])
        assert there[7]["__url__"].startswith(f"{web.url}/{compression}/{compression}-")


def test_index_columns_select_before_a_shard_is_read(web):
    before = len(web.requests())
    large = shardkit.ShardDataset(f"{web.url}/none", where=[("size", ">", 4000)])

    assert len(large) == sum(len(data) > 4000 for data in matrix.SAMPLES.values())
    assert [r.path for r in web.requests()[before:] if r.path.endswith(".tar")] == []


def test_what_is_asked_for_is_little(web):
    before = len(web.requests())
    sample = shardkit.ShardDataset(f"{web.url}/none")[3]
    asked = [(r.path.rpartition("none/")[2], r.status) for r in web.requests()[before:]]
    manifest = manifest_of(web.folder / "none")

    assert asked[:2] == [("unfinished.json", 404), ("manifest.json", 206)]
    assert sorted(asked[2:-1]) == sorted([(manifest.shards[0].index_url, 206), (manifest.block_file_url, 206)])
    assert asked[-1] == ("none-000000.tar", 206)
    assert web.requests()[-1].sent == len(sample["bin"])


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
def test_streams_take_patterns_lists_and_signed_addresses(web):
    signed = [f"{web.url}/none/none-00000{i}.tar?X-Amz-Signature=SECRET{i}" for i in range(4)]
    for urls in (
        f"{web.url}/none/none-{{000000..000003}}.tar?sig=SECRET",
        signed,
        f"{web.url}/zst",
        [*signed[:3], signed[3]],
    ):
        found = list(shardkit.ShardStream(urls, shuffle=False))

        assert {sample["__key__"]: sample["bin"] for sample in found} == matrix.SAMPLES
        assert "SECRET" not in repr([sample["__url__"] for sample in found])
    assert web.requests()[-1].path.endswith(".tar?X-Amz-Signature=SECRET3")


def test_a_dataset_whose_addresses_have_a_query_is_read_with_it(web):
    dataset = shardkit.ShardDataset(f"{web.url}/zst?token=SECRET")

    assert dataset.by_key("0001")["bin"] == matrix.SAMPLES["0001"]
    assert all(request.path.endswith("?token=SECRET") for request in web.requests()[-3:])
    assert "SECRET" not in repr(dataset) + repr(dataset.manifest) + repr(dataset[0])
    loader = shardkit.ShardLoader(dataset, batch_size=10)
    next(iter(loader))
    assert "SECRET" not in json.dumps(loader.state_dict()) + repr(loader)


def test_shards_on_a_web_server_are_indexed_into_a_local_folder(web, tmp_path):
    with pytest.raises(ArgumentError, match=r"where nothing can be written; pass the folder for the manifest and the"):
        shardkit.index_shards(f"{web.url}/none")
    pattern = f"{web.url}/none/none-{{000000..000003}}.tar"
    manifest = shardkit.index_shards(pattern, out=tmp_path / "index")

    assert manifest.shards[0].url == f"{web.url}/none/none-000000.tar"
    with pytest.raises(shardkit.DatasetError, match="allow_any_url=True"):
        shardkit.ShardDataset(tmp_path / "index")
    dataset = shardkit.ShardDataset(tmp_path / "index", allow_any_url=True, storage_options=matrix.OPTIONS)
    assert dataset.digest == shardkit.ShardDataset(f"{web.url}/none").digest
    assert {sample["__key__"]: sample["bin"] for sample in dataset} == matrix.SAMPLES
    assert {s["__key__"] for s in shardkit.ShardStream(tmp_path / "index", allow_any_url=True)} == set(matrix.SAMPLES)
    assert shardkit.verify(tmp_path / "index", allow_any_url=True).ok


def test_who_opens_a_web_folder_without_a_manifest_is_not_told_to_index_it(web):
    with pytest.raises(
        shardkit.DatasetError, match=r"has no manifest\.json, .* run 'shardkit index' where the shards come from"
    ):
        shardkit.ShardDataset(f"{web.url}/empty")


def test_a_manifest_tells_no_passwords_and_no_signatures(web, tmp_path):
    for url in (
        f"{web.url}/none/none-000000.tar?sig=SECRET",
        web.url.replace("//", "//me:SECRET@") + "/none/none-000000.tar",
    ):
        with pytest.raises(ArgumentError, match="has a password or a query that may be a signature") as caught:
            shardkit.index_shards(url, out=tmp_path / "index")
        assert "SECRET" not in str(caught.value)


def test_a_dataset_is_verified_where_nothing_lists_its_files(web):
    report = shardkit.verify(f"{web.url}/zst")

    assert report.ok
    assert report.samples == len(matrix.SAMPLES)
    assert report.notes == ("its folder cannot be listed, so it was not checked for unexpected files",)


def test_damage_on_the_way_is_no_damage_to_who_verifies(web, proxy):
    faulty = proxy(web.url)
    tar = faulty.inject("bit flip", path="*-000001.tar", skip=1)  # the first request asks for the size
    index = faulty.inject("bit flip", path="*-000002.*.parquet")

    assert shardkit.verify(f"{faulty.url}/none").ok
    assert (tar.hits, index.hits) == (1, 1)
    faulty.inject("bit flip for ever", path="*-000001.tar")
    report = shardkit.verify(f"{faulty.url}/none")
    assert [shard.url for shard in report.damaged] == [f"{faulty.url}/none/none-000001.tar"]


@pytest.mark.parametrize("name", ["manifest.json", "none-000001.*.parquet", "blocks.*.npy"])
def test_manifests_and_indexes_that_come_wrong_are_fetched_again_or_refused(name, web, proxy, caplog):
    faulty = proxy(web.url)
    (path,) = (web.folder / "none").rglob(name)
    size = path.stat().st_size
    # The NumPy header is not read: the manifest says where the rows are.
    rows = BLOCK_BYTES * sum(shard.blocks for shard in manifest_of(web.folder / "none").shards)
    for at in range(size - rows if path.suffix == ".npy" else 0, size, size // 20):
        rule = faulty.inject("bit flip", path=f"*/{path.name}", at=at)
        caplog.clear()
        dataset = shardkit.ShardDataset(f"{faulty.url}/none")
        found = {key: dataset.by_key(key)["bin"] for key in dataset.keys()[10::50]}  # some of each shard

        assert found == {key: matrix.SAMPLES[key] for key in found}
        assert rule.hits == 1
        assert "the data is wrong, so it is fetched again: " in caplog.text
        faulty.clear()


def test_rows_of_an_index_that_come_wrong_are_fetched_again(web, proxy):
    faulty = proxy(web.url)
    folder, shard = f"{faulty.url}/none", manifest_of(web.folder / "none").shards[1]
    expected = open_index(storage_for(folder), folder, shard).rows()
    for at in range(4, shard.index.size - shard.index.footer_size, 50):  # where the rows are
        rule = faulty.inject("bit flip", path="*.parquet", at=at)

        assert open_index(storage_for(folder), folder, shard).rows().equals(expected)
        assert rule.hits == 1
        faulty.clear()


def test_samples_and_shards_are_listed_and_single_fields_read(web):
    url = f"{web.url}/none"

    assert {sample.key: sample.fields["bin"] for sample in list_samples(url)} == {
        k: len(v) for k, v in matrix.SAMPLES.items()
    }
    assert [shard["samples"] for shard in list_shards(url)] == [50] * 4
    assert read_member(url, "0042", "bin") == matrix.SAMPLES["0042"]


def test_who_may_read_says_so_in_the_url_or_the_options(web):
    private, options = f"{web.private_url}/none", {"username": web.user, "password": web.password}
    with_user = private.replace("//", f"//{web.user}:{web.password.replace(' ', '%20')}@")

    for dataset in (shardkit.ShardDataset(private, storage_options=options), shardkit.ShardDataset(with_user)):
        assert dataset.by_key("0001")["bin"] == matrix.SAMPLES["0001"]
        assert web.password not in repr(dataset)
    with pytest.raises(
        AccessError, match=r"access is refused: the server answers 401; pass username and password, or other ones"
    ):
        shardkit.ShardDataset(private)


def test_an_authority_of_ones_own_is_trusted_if_it_is_named(web, monkeypatch, tries):
    url = f"{web.tls_url}/none"
    tries.append(lambda: None)
    with pytest.raises(StorageError, match=r"because the connection is not secure \(.*\) \(gave up after 0 s\)"):
        shardkit.ShardDataset(url)
    assert len(tries) == 1  # it was not retried

    trusting = {"storage_options": {"ca_certs": str(web.ca_file)}}
    assert shardkit.ShardDataset(url, **trusting).by_key("0001")["bin"] == matrix.SAMPLES["0001"]
    monkeypatch.setenv("SSL_CERT_FILE", str(web.ca_file))
    assert shardkit.ShardDataset(url.replace("127.0.0.1", "localhost"))[0]["__url__"].startswith("https://localhost")


def test_passwords_go_to_nobody_else(web, proxy):
    faulty = proxy(web.url)
    faulty.inject("redirect to another host", path="*-000000.tar")
    options = {"username": web.user, "password": web.password}
    dataset = shardkit.ShardDataset(f"{faulty.url}/none", storage_options=options)

    assert dataset[0]["bin"] == matrix.SAMPLES[dataset.keys()[0]]
    log = [entry for entry in faulty.log() if entry["path"].endswith("-000000.tar")]
    assert [bool(entry["headers"].get("authorization")) for entry in log] == [True, False]


def test_nothing_is_written_to_a_web_server(web):
    for write in (
        lambda: shardkit.pack([{"__key__": "a", "txt": "b"}], f"{web.url}/new", progress=False),
        lambda: shardkit.ShardWriter(f"{web.url}/new"),
        lambda: shardkit.index_shards(f"{web.url}/none", out=f"{web.url}/new"),
    ):
        with pytest.raises(
            ArgumentError, match="http and https can only be read; write to a local folder or an object"
        ):
            write()
    assert {request.method for request in web.requests()} == {"GET"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_worker_processes_read_after_their_parent_has_read(start, kind, web, record_property):
    url = f"{web.url}/none"
    matrix.read_in_workers(kind, start, url, {})

    record_property("fault", ("http", f"{start} after the parent has read", kind, "right"))


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize("read", matrix.FORWARD)
def test_a_stream_goes_on_in_the_middle_of_a_shard(read, web, proxy):
    faulty = proxy(web.url)
    faulty.inject("FIN mid-body five times", path="*-000001.tar")

    assert dict(matrix.READERS[read](f"{faulty.url}/none", matrix.OPTIONS)) == matrix.SAMPLES
    asked = [int(entry["range"][6:-1]) for entry in faulty.log() if entry["path"].endswith("-000001.tar")]
    assert len(asked) == 6
    assert asked == sorted(set(asked))  # nothing twice


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", ["loader", "stream", "tar"])
def test_an_epoch_survives_a_server_that_is_killed_and_started_again(read, nginx, web, proxy, tries, record_property):
    (nginx.folder / "none").symlink_to(web.folder / "none")
    faulty = proxy(nginx.url)
    held = faulty.hold(after=1000, path="*-000002.tar")
    matrix.read_through_a_restart(nginx, held, tries, read, f"{faulty.url}/none", matrix.OPTIONS)

    record_property("fault", ("http", "server kill -9 and restart", read, "right"))


def test_a_server_that_takes_few_connections_serves_many_threads(web, proxy):
    faulty = proxy(web.url)
    faulty.distance(connections=2)
    found = []
    options = {"read_timeout": 0.5}
    readers = [
        threading.Thread(target=lambda: found.extend(matrix.by_stream(f"{faulty.url}/none", options))) for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()

    assert len(found) == 4 * len(matrix.SAMPLES)
    assert dict(found) == matrix.SAMPLES


def test_an_epoch_does_not_stand_still_while_a_server_lets_connections_wait(web, proxy, monkeypatch, tries):
    monkeypatch.setattr(fetch, "_MORE_THREADS", ((-1.0, 32),))
    tries.append(lambda: None)
    faulty = proxy(web.url)
    faulty.distance(rtt=0.01, connections=4)
    found = matrix.by_loader(f"{faulty.url}/none", {})

    assert len(found) == len(matrix.SAMPLES)
    assert dict(found) == matrix.SAMPLES
    assert len(tries) == 1  # no request was delayed by a retry
    assert faulty.connections()[1] == 4


def taken():
    """Return the number of descriptors and of threads, without the thread that watches over running requests."""
    threads = [thread for thread in threading.enumerate() if thread.name != "shardkit-network"]
    return len(list(Path("/proc/self/fd").iterdir())), len(threads)


def test_an_epoch_of_a_thousand_shards_takes_no_more_descriptors_and_threads(nginx, monkeypatch):
    monkeypatch.setattr(fetch, "_MORE_THREADS", ())  # however busy this machine is
    samples = ({"__key__": f"{i:04d}", "bin": b"%d" % i} for i in range(1000))
    shardkit.pack(samples, nginx.folder / "many", shard_samples=1, progress=False)
    dataset = shardkit.ShardDataset(f"{nginx.url}/many")
    before, _ = taken()
    descriptors, threads = zip(*(taken() for _ in shardkit.ShardLoader(dataset, 10)), strict=True)

    assert len(dataset.manifest.shards) == 1000
    assert len(threads) == 100
    assert len(set(threads)) == 1
    assert max(descriptors) <= before + fetch._THREADS


def test_reading_on_and_on_takes_no_more_descriptors_and_threads(web):
    def read():
        assert len(matrix.by_stream(f"{web.url}/none", matrix.OPTIONS)) == len(matrix.SAMPLES)
        assert [dataset[i]["bin"] for i in range(0, 200, 10)]
        next(iter(shardkit.ShardStream(f"{web.url}/none", storage_options=matrix.OPTIONS)))

    dataset = shardkit.ShardDataset(f"{web.url}/none", storage_options=matrix.OPTIONS)
    read()
    before = taken()
    for _ in range(5):
        read()

    assert taken() == before
