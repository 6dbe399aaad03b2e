"""Files on S3 servers are read like local files by users with access, despite every known fault of networks."""

import json
import pickle

import pytest
from botocore.loaders import JSONFileLoader

import shardkit
from shardkit.errors import (
    AccessError,
    ArgumentError,
    MissingExtraError,
    MissingFileError,
    NoListingError,
    StorageError,
)
from shardkit.storage.registry import storage_for
from shardkit.storage.s3 import session as credentials
from tests.support import matrix
from tests.support.scripted import Scripted, answer
from tests.support.servers.faults import READ_FAULTS

# A request to S3 is signed for one address, so redirects to other addresses are not followed.
S3_ENDS = matrix.ENDS | {name: [StorageError] * 3 for name in ("301", "302", "307", "redirect to another host")}


def options_for(server, url=None, **options):
    """Return the storage options of a server, or of a proxy in front of it."""
    short = {"read_timeout": 0.3, "connect_timeout": 5}
    asked = {"key": server.key, "secret": server.secret, "endpoint_url": url or server.url, "config_kwargs": short}
    return asked | {"client_kwargs": {"region_name": server.region}, "total_timeout": 60} | options


@pytest.fixture(scope="module")
def packed(moto):
    """Return the URL of a dataset in its own bucket."""
    url = f"s3://{moto.make_bucket()}/data/none"
    matrix.pack_samples(url, compression="none", storage_options=options_for(moto))
    return url


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", matrix.READS)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_every_fault_of_a_network_ends_in_the_right_samples_or_in_an_error(
    fault, read, moto, packed, proxy, tries, record_property
):
    faulty = proxy(moto.url)
    end = matrix.read_through(fault, read, faulty, packed, options_for(moto, faulty.url), tries, S3_ENDS)
    record_property("fault", ("s3", fault, read, end))


@pytest.fixture(params=["moto", "ceph"])
def server(request):
    """Return each S3 server."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("compression", ["none", "zst"])
def test_a_dataset_is_packed_to_an_s3_server_and_read_from_it(server, compression, tmp_path):
    url, options = f"s3://{server.make_bucket()}/a folder/train", {"storage_options": options_for(server)}
    matrix.pack_samples(url, compression=compression, **options)
    matrix.pack_samples(tmp_path / "train", compression=compression)
    there, here = shardkit.ShardDataset(url, **options), shardkit.ShardDataset(tmp_path / "train")

    assert there.digest == here.digest
    assert there.by_key("0123")["bin"] == matrix.SAMPLES["0123"]
    assert (
        dict(matrix.by_loader(url, options_for(server)))
        == dict(matrix.by_stream(url, options_for(server)))
        == matrix.SAMPLES
    )
    assert shardkit.verify(url, **options).ok
    assert there[0]["__url__"].startswith(url)


def test_folders_are_listed_and_files_are_no_folders(server):
    storage, bucket = storage_for("s3://x", options_for(server)), server.make_bucket()
    with server.client() as client:
        for key in ("a/b/c", "a/b.tar", "a-b", "a/ü +%?.tar", "a/.shardkit-0"):
            client.put_object(Bucket=bucket, Key=key, Body=b"x")

    assert storage.list(f"s3://{bucket}") == ["a", "a-b"]
    assert storage.list(f"s3://{bucket}/a") == storage.list(f"s3://{bucket}/a/") == ["b", "b.tar", "ü +%?.tar"]
    assert storage.list(f"s3://{bucket}/none") == []
    assert storage.read_range(f"s3://{bucket}/a/ü +%?.tar", 0, 1) == b"x"
    with pytest.raises(NotADirectoryError):
        storage.list(f"s3://{bucket}/a/b.tar")
    with pytest.raises(MissingFileError, match=r"s3://no-such-bucket-here: does not exist \(NoSuchBucket"):
        storage.list("s3://no-such-bucket-here")


def test_a_folder_of_many_files_is_listed_page_by_page():
    page = "<ListBucketResult><IsTruncated>{}</IsTruncated>{}<Contents><Key>a/{}</Key></Contents></ListBucketResult>"
    pages = [page.format("true", "<NextContinuationToken>next</NextContinuationToken>", 1), page.format("false", "", 2)]
    server = Scripted(*(answer(200, page.encode()) for page in pages))
    storage = storage_for("s3://x", {"endpoint_url": server.url, "key": "a", "secret": "b"})

    assert storage.list("s3://bucket/a") == ["1", "2"]
    assert "continuation-token=next" in server.requests[1].target
    server.close()


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
def test_streams_take_patterns_of_objects(moto, packed):
    options = options_for(moto)
    for pattern in (f"{packed}/none-*.tar", f"{packed}/none-{{000000..000003}}.tar", f"{packed}/none-00000[0-3].tar"):
        assert dict(matrix.by_stream(pattern, options)) == matrix.SAMPLES


def test_what_was_packed_there_is_packed_again_elsewhere(moto, packed, tmp_path):
    source = shardkit.ShardSource(
        packed, storage_options=options_for(moto), filter=lambda sample: sample["bin"][0] < 50
    )
    shardkit.pack(source, tmp_path / "some", progress=False)

    assert set(shardkit.ShardDataset(tmp_path / "some").keys()) == set(list(matrix.SAMPLES)[:50])


def test_shards_in_a_bucket_are_indexed_there_or_elsewhere(moto, packed, tmp_path):
    options = {"storage_options": options_for(moto)}
    other = f"{packed.rpartition('/')[0]}/other"
    digest = shardkit.ShardDataset(packed, **options).digest
    for out in (tmp_path / "index", other):
        manifest = shardkit.index_shards(f"{packed}/none-*.tar", out=out, **options)

        assert manifest.shards[0].url == f"{packed}/none-000000.tar"
        assert shardkit.ShardDataset(out, allow_any_url=True, **options).digest == digest
    again = shardkit.index_shards(packed, columns={"first": lambda sample: sample["bin"][0]}, **options)
    assert again.shards[0].url == "none-000000.tar"
    assert set(shardkit.read_manifest(packed, **options).columns) == {"first", "size"}


def test_who_has_no_right_is_told_what_to_do(ceph):
    url = f"s3://{ceph.make_bucket()}/data"
    wrong = [
        (options_for(ceph, secret="wrong"), AccessError, "correct key, secret and token in storage_options"),
        (options_for(ceph, key="nobody"), AccessError, "correct key, secret and token in storage_options"),
        (options_for(ceph, key=None, secret=None, anon=True), AccessError, "it needs another key or profile"),
    ]
    for options, error, advice in wrong:
        with pytest.raises(error, match=advice) as caught:
            storage_for(url, options).info(f"{url}/a")
        assert ceph.secret not in str(caught.value)
        with pytest.raises(NoListingError if "anon" in options else StorageError, match=advice):
            storage_for(url, options).list(url)


def test_a_public_bucket_is_read_without_credentials_though_it_is_not_listed(ceph):
    bucket = ceph.make_bucket()
    url = f"s3://{bucket}/train"
    matrix.pack_samples(url, compression="none", storage_options=options_for(ceph))
    policy = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
    with ceph.client() as client:
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [policy]}))
    options = options_for(ceph, key=None, secret=None, anon=True)

    assert dict(matrix.by_loader(url, options)) == dict(matrix.by_stream(url, options)) == matrix.SAMPLES
    report = shardkit.verify(url, storage_options=options)
    assert report.ok
    assert report.notes == ("its folder cannot be listed, so it was not checked for unexpected files",)


def test_a_signed_address_is_read_until_it_has_run_out(ceph, record_property):
    bucket = ceph.make_bucket()
    with ceph.client() as client:
        client.put_object(Bucket=bucket, Key="a.bin", Body=b"0123456789")
        place = {"Bucket": bucket, "Key": "a.bin"}
        good, old = (client.generate_presigned_url("get_object", place, ExpiresIn=seconds) for seconds in (600, -1))

    storage = storage_for(good)
    assert storage.info(good).size == 10
    assert storage.read_range(good, 3, 4) == b"3456"
    assert storage.open(good, 5).read(10) == b"56789"
    with pytest.raises(AccessError, match="its address may have expired: ask for another one") as caught:
        storage.info(old)
    assert "Signature" not in str(caught.value)
    record_property("fault", ("s3", "presigned URL expiry", "storage", caught.type.__name__))


@pytest.fixture
def aws(tmp_path, monkeypatch):
    """Return the file of AWS profiles, which is the only place that may hold credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    credentials._sessions.clear()
    yield tmp_path / "credentials"
    credentials._sessions.clear()


@pytest.mark.parametrize("where", ["client_kwargs", "profile", "environment"])
def test_requests_are_signed_for_the_region_that_the_user_says(aws, monkeypatch, where):
    options = {"key": "k", "secret": "s"}
    if where == "client_kwargs":
        options["client_kwargs"] = {"region_name": "eu-west-1"}
    elif where == "profile":
        aws.with_name("config").write_text("[profile mine]\nregion = eu-west-1\n")
        options["profile"] = "mine"
    else:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")

    _, headers = credentials.session_for(credentials.S3Options(**options)).sign("s3://bucket/key")

    assert "/eu-west-1/s3/aws4_request" in headers["Authorization"]


def test_credentials_regions_and_endpoints_are_those_of_every_aws_tool(moto, packed, aws, monkeypatch):
    with pytest.raises(AccessError, match=r"no credentials were found \(there are none\); set AWS_PROFILE, or pass"):
        shardkit.ShardDataset(packed, storage_options={"endpoint_url": moto.url})
    aws.write_text(f"[mine]\naws_access_key_id = {moto.key}\naws_secret_access_key = {moto.secret}\n")
    aws.with_name("config").write_text(f"[profile mine]\nregion = eu-west-1\nendpoint_url = {moto.url}\n")

    assert len(shardkit.ShardDataset(packed, storage_options={"profile": "mine"})) == len(matrix.SAMPLES)
    credentials._sessions.clear()
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert len(shardkit.ShardDataset(packed)) == len(matrix.SAMPLES)
    with pytest.raises(ArgumentError, match=r"storage_options: The config profile \(yours\) could not be found"):
        shardkit.ShardDataset(packed, storage_options={"profile": "yours"})


@pytest.mark.usefixtures("tries")
@pytest.mark.parametrize("is_renewed", [True, False])
def test_credentials_that_expire_are_found_anew_once(moto, packed, aws, proxy, is_renewed, record_property):
    faulty = proxy(moto.url)
    profile = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    aws.write_text(profile.format("OLDKEY", "old"))
    options = options_for(moto, faulty.url, key=None, secret=None)
    dataset = shardkit.ShardDataset(packed, storage_options=options)
    assert dataset[0]["bin"] == matrix.SAMPLES[dataset.keys()[0]]
    faulty.inject("expired token", containing="OLDKEY")
    if is_renewed:
        aws.write_text(profile.format(moto.key, moto.secret))

        assert dataset[100]["bin"] == matrix.SAMPLES[dataset.keys()[100]]
        matrix.pack_samples(f"{packed}-{is_renewed}", storage_options=options)
        record_property("fault", ("s3", "expired token, and there is a new one", "dataset", "right"))
    else:
        with pytest.raises(AccessError, match="the credentials have expired, so get new ones"):
            dataset[100]
    assert len([entry for entry in faulty.log() if entry["fault"]]) <= 3


def test_a_bucket_in_another_region_is_asked_there(aws):
    aws.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    moved = answer(301, b"<Error><Code>PermanentRedirect</Code></Error>", x_amz_bucket_region="eu-west-1")
    server = Scripted(moved, answer(206, b"x", content_range="bytes 0-0/1"))
    storage = storage_for("s3://x", {"endpoint_url": server.url, "client_kwargs": {"region_name": "us-east-1"}})

    assert storage.read_range("s3://bucket/a", 0, 1) == b"x"
    assert ["/us-east-1/s3/" in request.headers["authorization"] for request in server.requests] == [True, False]
    assert "/eu-west-1/s3/" in server.requests[1].headers["authorization"]
    server.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"anno": True},
            "anno is not an option of s3: key, secret, token, anon, profile, endpoint_url, client_kwargs",
        ),
        ({"key": "a"}, "key and secret go together; give both, or neither"),
        ({"key": 5, "secret": "b"}, "key must be text, got int; write it in quotes"),
        ({"key": "a", "secret": 6.0}, "secret must be text, got float; write it in quotes"),
        ({"key": "a", "secret": "b", "token": b"c"}, "token must be text, got bytes; write it in quotes"),
        ({"anon": True, "profile": "a"}, "anon asks without credentials; give it, or key and profile"),
        ({"client_kwargs": {"region": "x"}}, "client_kwargs has region, known are region_name, endpoint_url"),
        ({"client_kwargs": {"verify": False}}, "verify cannot be off; give a file of the certificates"),
        ({"client_kwargs": "x"}, "client_kwargs must be a mapping, got str"),
        ({"config_kwargs": {"proxies": {}}}, "proxies are those of the environment; set HTTPS_PROXY"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signature_version can be s3v4 alone"),
    ],
)
def test_options_that_are_unknown_or_wrong_are_refused(options, problem):
    with pytest.raises(ArgumentError, match=f"storage_options: {problem}"):
        storage_for("s3://bucket/a", options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"config_kwargs": {"timeout": 3}}, "Got unexpected keyword argument 'timeout'"),
        ({"endpoint_url": "nonsense"}, "Invalid endpoint: nonsense"),
    ],
)
def test_options_that_botocore_refuses_are_refused_when_it_is_asked(options, problem):
    with pytest.raises(ArgumentError, match=f"storage_options: {problem}; correct them"):
        storage_for("s3://bucket/a", options | {"key": "a", "secret": "b"}).info("s3://bucket/a")


def test_without_botocore_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(credentials, "find_spec", lambda _: None)
    with pytest.raises(
        MissingExtraError, match=r"s3:// needs botocore, which is not installed: pip install 'shardkit\[s3\]'"
    ):
        shardkit.ShardDataset("s3://bucket/train")


def test_what_botocore_knows_of_services_is_read_once_for_all_options(moto, packed, monkeypatch):
    storage_for(packed, options_for(moto)).list(packed)
    read = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda *args: read.append(args[1]) or load(*args))
    other = options_for(moto, total_timeout=61)

    assert "none-000000.tar" in storage_for(packed, other).list(packed)
    assert read == []


@pytest.mark.parametrize("url", ["s3://", "s3:///a"])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(ArgumentError, match="names no bucket; write s3://bucket/folder"):
        storage_for(url).list(url)


def test_secrets_are_in_no_representation_and_a_pickle_reads_on(moto, packed):
    options = options_for(moto, token="TOKEN")
    storage = storage_for(packed, options)
    before = storage.info(f"{packed}/none-000000.tar")
    copy = pickle.loads(pickle.dumps(storage))

    assert copy.read_range(f"{packed}/none-000000.tar", 0, 10) == storage.read_range(f"{packed}/none-000000.tar", 0, 10)
    inner = storage.serving(packed)
    shown = repr([storage, inner, vars(inner), inner.signer, inner.signer.options, before])
    shown += repr(shardkit.ShardDataset(packed, storage_options=options))
    assert [secret for secret in (moto.secret, moto.key, "TOKEN") if secret in shown] == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_worker_processes_read_after_their_parent_has_read(start, kind, moto, packed, record_property):
    options = options_for(moto)
    matrix.read_in_workers(kind, start, packed, options)

    record_property("fault", ("s3", f"{start} after the parent has read", kind, "right"))


@pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")
@pytest.mark.parametrize("read", ["loader", "stream", "tar"])
def test_an_epoch_survives_a_gateway_that_is_killed_and_started_again(read, ceph, proxy, tries, record_property):
    url = f"s3://{ceph.make_bucket()}/none"
    matrix.pack_samples(url, compression="none", storage_options=options_for(ceph))
    faulty = proxy(ceph.url)
    held = faulty.hold(after=1000, path="*-000002.tar")
    options = options_for(ceph, faulty.url, total_timeout=60, config_kwargs={"read_timeout": 30})
    matrix.read_through_a_restart(ceph, held, tries, read, url, options)

    record_property("fault", ("s3", "gateway kill -9 and restart", read, "right"))


def test_versions_are_told_apart(server, record_property):
    bucket = server.make_bucket()
    storage, url = storage_for("s3://x", options_for(server)), f"s3://{bucket}/a"
    with server.client() as client:
        client.put_object(Bucket=bucket, Key="a", Body=b"one")
        first = storage.info(url)
        client.put_object(Bucket=bucket, Key="a", Body=b"two")

    with pytest.raises(shardkit.errors.ChangedFileError, match="was replaced while it was in use"):
        storage.read_range(url, 0, 3)
    assert storage.info(url).version != first.version
    assert storage.read_range(url, 0, 3) == b"two"
    with server.client() as client:
        client.put_object(Bucket=bucket, Key="empty", Body=b"")
    assert storage.info(f"s3://{bucket}/empty").size == 0
    assert storage.open(f"s3://{bucket}/empty").read(5) == b""
    record_property("fault", ("s3", "416 on an empty object", "storage", "right"))
