"""The servers behave as other tests assume, and leave nothing behind."""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import botocore.exceptions
import pytest
import urllib3

from tests.support.servers.processes import ROOT, Port, Processes, wait_until

DATA = bytes(range(256)) * 4096


@pytest.fixture
def http():
    """Provide a client that neither retries nor follows redirects."""
    with urllib3.PoolManager(retries=False, timeout=60) as pool:
        yield pool


@pytest.fixture
def shard(nginx):
    """Return the URL of a file."""
    (nginx.folder / "a.tar").write_bytes(DATA)
    return f"{nginx.url}/a.tar"


def test_nginx_serves_files_and_ranges(shard, http):
    whole = http.request("GET", shard)
    part = http.request("GET", shard, headers={"Range": "bytes=1000-1999"})

    assert (whole.status, whole.data) == (200, DATA)
    assert (part.status, part.data) == (206, DATA[1000:2000])
    assert part.headers["Content-Range"] == f"bytes 1000-1999/{len(DATA)}"
    assert part.headers["ETag"] == whole.headers["ETag"]


def test_nginx_compares_the_version(shard, http):
    assert http.request("GET", shard, headers={"If-Match": '"other"'}).status == 412


def test_nginx_tells_which_requests_it_has_answered(nginx, shard, http):
    http.request("GET", shard, headers={"Range": "bytes=5-9", "Authorization": "Basic eA=="})
    http.request("HEAD", f"{nginx.url}/none?q=1")

    first, second = nginx.requests()
    assert (first.method, first.path, first.range, first.status, first.sent) == ("GET", "/a.tar", "bytes=5-9", 206, 5)
    assert first.authorization == "Basic eA=="
    assert (second.method, second.path, second.range, second.status, second.sent) == ("HEAD", "/none?q=1", "", 404, 0)


def test_nginx_keeps_the_private_from_who_has_no_password(nginx, shard, http):
    url = shard.replace(nginx.url, nginx.private_url)
    right, wrong = (urllib3.make_headers(basic_auth=f"{nginx.user}:{word}") for word in (nginx.password, "wrong"))

    assert http.request("GET", url).status == 401
    assert http.request("GET", url, headers=wrong).status == 401
    assert http.request("GET", url, headers=right).data == DATA


def test_nginx_is_trusted_over_tls_by_who_knows_its_authority(nginx, shard, http):
    url = shard.replace(nginx.url, nginx.tls_url)
    with pytest.raises(urllib3.exceptions.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        http.request("GET", url)

    with urllib3.PoolManager(ca_certs=str(nginx.ca_file), retries=False) as trusting:
        for host in ("127.0.0.1", "localhost"):
            assert trusting.request("GET", url.replace("127.0.0.1", host)).data == DATA


def test_nginx_that_is_killed_breaks_connections_refuses_new_ones_and_comes_back(nginx, shard, http):
    with socket.create_connection(("127.0.0.1", nginx.port.number)) as connection:
        nginx.kill()

        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with pytest.raises(urllib3.exceptions.NewConnectionError):
        http.request("GET", shard)
    before = len(nginx.requests())
    nginx.start()
    assert http.request("GET", shard).data == DATA
    assert len(nginx.requests()) == before + 1


def test_nginx_can_be_killed_in_the_middle_of_a_response(nginx, http, proxy):
    (nginx.folder / "a.tar").write_bytes(DATA * 16)
    faulty = proxy(nginx.url)
    held = faulty.hold(after=1000)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(http.request, "GET", f"{faulty.url}/a.tar")
        held.wait()
        nginx.kill()
        nginx.start()
        held.release()

        with pytest.raises(urllib3.exceptions.ProtocolError):
            reading.result()
    assert http.request("GET", f"{faulty.url}/a.tar").data == DATA * 16


# A pytest session that prints the processes that it has started, and waits to be ended.
SESSION = """
import signal
from pathlib import Path

def test_all(nginx, moto, ceph, proxies, processes):
    started = [*processes.running, processes.watchdog]
    Path("pids.new").write_text(" ".join(str(process.pid) for process in started))
    Path("pids.new").rename("pids")
    signal.pause()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_pytest(tmp_path, ending):
    (tmp_path / "test_session.py").write_text(SESSION)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_session.py"]
    with (tmp_path / "log").open("wb") as log:
        session = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    wait_until((tmp_path / "pids").exists, session, tmp_path / "log")
    with contextlib.ExitStack() as stack:
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        started = [os.pidfd_open(pid) for pid in pids]
        for descriptor in started:
            stack.callback(os.close, descriptor)
        session.send_signal(ending)
        session.wait(60)

        assert len(started) == 7  # nginx, moto, the proxies' program, three programs of Ceph, and the watchdog
        for descriptor in started:
            assert wait([descriptor], 60) == [descriptor]


def test_programs_end_when_their_keeper_is_closed(tmp_path):
    with contextlib.closing(Processes()) as processes:
        started = [processes.start(["sleep", "600"], tmp_path / "log") for _ in range(2)]
        processes.kill(started[0])

        assert [process.returncode for process in started] == [-signal.SIGKILL, None]
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert processes.watchdog.returncode == 0


def test_a_port_is_refused_and_kept_while_no_server_listens():
    port = Port()
    with contextlib.closing(port), socket.socket() as other:
        assert not port.answers()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))


def test_a_program_that_is_not_installed_is_named(processes, tmp_path):
    with pytest.raises(RuntimeError, match=r"shardkitd is not installed; scripts/test installs"):
        processes.start(["shardkitd"], tmp_path / "log")


def test_a_server_that_cannot_start_says_why(processes, tmp_path):
    log = tmp_path / "log"
    process = processes.start(["nginx", "-e", "stderr", "-c", tmp_path / "none.conf"], log)

    with pytest.raises(RuntimeError, match=r"nginx .* has ended with 1; it said:\n.*none.conf"):
        wait_until(lambda: False, process, log)
    processes.kill(process)


@pytest.fixture(params=["moto", "ceph"])
def s3(request):
    """Return each server that speaks S3."""
    return request.getfixturevalue(request.param)


def test_an_object_makes_a_round_trip(s3):
    bucket = s3.make_bucket()
    with s3.client() as client:
        client.put_object(Bucket=bucket, Key="a.tar", Body=DATA, Metadata={"shard": "1"})
        part = client.get_object(Bucket=bucket, Key="a.tar", Range="bytes=1000-1999")
        head = client.head_object(Bucket=bucket, Key="a.tar")

        assert part["Body"].read() == DATA[1000:2000]
        assert part["ContentRange"] == f"bytes 1000-1999/{len(DATA)}"
        assert head["ETag"] == f'"{hashlib.md5(DATA).hexdigest()}"'
        assert head["Metadata"] == {"shard": "1"}
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_an_object_of_parts_appears_when_it_is_complete(s3):
    bucket = s3.make_bucket()
    parts = [DATA * 5, b"the rest"]
    with s3.client() as client:
        upload = client.create_multipart_upload(Bucket=bucket, Key="a.tar")["UploadId"]
        names = {"Bucket": bucket, "Key": "a.tar", "UploadId": upload}
        tags = [client.upload_part(**names, PartNumber=n + 1, Body=part)["ETag"] for n, part in enumerate(parts)]
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
        assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1
        listed = [{"PartNumber": n + 1, "ETag": tag} for n, tag in enumerate(tags)]
        client.complete_multipart_upload(**names, MultipartUpload={"Parts": listed})

        digests = b"".join(hashlib.md5(part).digest() for part in parts)
        assert client.get_object(Bucket=bucket, Key="a.tar")["Body"].read() == b"".join(parts)
        assert client.head_object(Bucket=bucket, Key="a.tar")["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-2"'
        assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_an_object_is_not_written_over_where_that_is_asked(s3):
    bucket = s3.make_bucket()
    with s3.client() as client:
        client.put_object(Bucket=bucket, Key="a", Body=b"1", IfNoneMatch="*")
        with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=bucket, Key="a", Body=b"2", IfNoneMatch="*")

        assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"1"


def test_a_signed_url_is_enough_to_read(s3, http):
    bucket = s3.make_bucket()
    with s3.client() as client:
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
        url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "a"})

    assert http.request("GET", url, headers={"Range": "bytes=0-9"}).data == DATA[:10]


def test_requests_pass_through_the_proxy_with_their_signature(s3, proxy):
    bucket = s3.make_bucket()
    faulty = proxy(s3.url)
    with s3.client(faulty.url) as client:
        client.put_object(Bucket=bucket, Key="a", Body=DATA)

        assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == DATA
    put, get = faulty.log()
    assert (put["method"], put["received"], put["sent"], put["status"]) == ("PUT", len(DATA), 0, 200)
    assert (get["method"], get["received"], get["sent"], get["status"]) == ("GET", 0, len(DATA), 200)
    assert put["headers"]["authorization"].startswith(f"AWS4-HMAC-SHA256 Credential={s3.key}/")


def test_ceph_refuses_a_signature_that_is_wrong(ceph, http):
    bucket = ceph.make_bucket()
    with ceph.client() as client:
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
        url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "a"})

    assert http.request("GET", url.partition("?")[0]).status == 403
    assert http.request("GET", url.replace("Signature=", "Signature=0")).status == 403
    assert http.request("HEAD", url).status == 403


def test_ceph_refuses_a_signed_url_that_has_run_out(ceph, http):
    bucket = ceph.make_bucket()
    with ceph.client() as client:
        url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "a"}, ExpiresIn=-1)

    assert http.request("GET", url).status == 403


def test_ceph_refuses_data_that_has_changed_on_its_way(ceph, proxy):
    bucket = ceph.make_bucket()
    faulty = proxy(ceph.url)
    faulty.inject("bit flip in PUT")
    with ceph.client(faulty.url) as client, pytest.raises(botocore.exceptions.ClientError):
        client.put_object(Bucket=bucket, Key="a", Body=DATA, ContentMD5=b64encode(hashlib.md5(DATA).digest()).decode())
    with ceph.client() as client:
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_ceph_does_not_publish_an_upload_that_was_cut(ceph, proxy):
    bucket = ceph.make_bucket()
    faulty = proxy(ceph.url)
    faulty.inject("PUT cut")
    with ceph.client(faulty.url) as client, pytest.raises(botocore.exceptions.ConnectionClosedError):
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
    with ceph.client() as client:
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def read_all(client, bucket):
    return client.get_object(Bucket=bucket, Key="a")["Body"].read()


def test_ceph_that_is_killed_in_the_middle_of_a_response_comes_back_with_what_it_has(ceph, proxy):
    bucket = ceph.make_bucket()
    faulty = proxy(ceph.url)
    held = faulty.hold(after=1000)
    with ceph.client(faulty.url) as client, ThreadPoolExecutor(1) as thread:
        client.put_object(Bucket=bucket, Key="a", Body=DATA * 16)
        reading = thread.submit(read_all, client, bucket)
        held.wait()
        ceph.kill()
        assert not ceph.port.answers()
        ceph.start()
        held.release()

        with pytest.raises(botocore.exceptions.BotoCoreError):
            reading.result()
        assert read_all(client, bucket) == DATA * 16
    with ceph.client(read_timeout=15) as client:  # Ceph would take 28 s to notice that a peer is gone for ever
        client.create_bucket(Bucket=f"{bucket}-2")
