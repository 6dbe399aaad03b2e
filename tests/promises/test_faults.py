"""Each fault of the proxy does what its name says, as seen by a client that hides nothing."""

import contextlib
import gzip
import http.client
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from urllib.parse import urlsplit

import botocore.exceptions
import pytest

from tests.support.servers.faults import FAULTS

DATA = bytes(range(256)) * 256
HALF = len(DATA) // 2
SWAPPED = bytes(byte ^ 0x55 for byte in DATA)


@dataclass
class Seen:
    """The part of a response that a client received, up to the error that broke the connection, if any."""

    status: int | None = None
    headers: dict | None = None
    data: bytes = b""
    error: type | None = None

    @property
    def whole(self):
        return self.status, self.data, self.error


def ask(url, method="GET", body=None, **headers):
    """Return the result of one request on a connection of its own."""
    parts = urlsplit(url)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    seen = Seen()
    with contextlib.closing(connection):
        try:
            connection.request(method, url.removeprefix(f"http://{parts.netloc}"), body=body, headers=headers)
            response = connection.getresponse()
            seen.status, seen.headers = response.status, {k.lower(): v for k, v in response.getheaders()}
            while data := response.read1(1000):
                seen.data += data
            if response.length:
                seen.error = http.client.IncompleteRead
        except (http.client.HTTPException, OSError) as error:
            seen.error = type(error)
    return seen


@pytest.fixture
def faulty(nginx, proxy):
    """Return a proxy in front of a web server with one file."""
    (nginx.folder / "a").write_bytes(DATA)
    return proxy(nginx.url)


@pytest.fixture
def file(faulty):
    """Return the URL of the file."""
    return f"{faulty.url}/a"


GOOD = 200, DATA, None
CUT = 200, DATA[:HALF], http.client.IncompleteRead

# The results of consecutive requests, by the name of the fault.
WHOLE_READS = {
    "FIN mid-body": [CUT, GOOD],
    "FIN mid-body five times": [CUT] * 5 + [GOOD],
    "FIN mid-body for ever": [CUT] * 7,
    "FIN after the head for ever": [(200, b"", http.client.IncompleteRead)] * 3,
    "RST mid-body": [(200, DATA[:HALF], ConnectionResetError), GOOD],
    "chunked body cut": [CUT, GOOD],
    "cut, no Content-Length": [(200, DATA[:HALF], None), GOOD],
    "short body, headers agree": [(200, DATA[:HALF], None), GOOD],
    "empty 200": [(200, b"", None), GOOD],
    "drop before response": [(None, b"", http.client.RemoteDisconnected), GOOD],
    "RST before response": [(None, b"", ConnectionResetError), GOOD],
    "no Content-Length": [GOOD] * 3,
    "chunked": [GOOD] * 3,
    "body too long": [(200, DATA + bytes(100), None), GOOD],
    "bit flip": [(200, DATA[:HALF] + b"\1" + DATA[HALF + 1 :], None), GOOD],
    "bit flip for ever": [(200, DATA[:HALF] + b"\1" + DATA[HALF + 1 :], None)] * 3,
    "overwritten mid-read": [GOOD] + [(200, SWAPPED, None)] * 2,
    "overwritten mid-read, If-Match ignored": [GOOD] + [(200, SWAPPED, None)] * 2,
    "overwritten mid-read, same ETag": [GOOD] + [(200, SWAPPED, None)] * 2,
}


@pytest.mark.parametrize("fault", WHOLE_READS)
def test_a_read_has_the_fault(faulty, file, fault):
    rule = faulty.inject(fault)

    assert [ask(file).whole for _ in WHOLE_READS[fault]] == WHOLE_READS[fault]
    assert rule.hits == sum(entry["fault"] != "" for entry in faulty.log()) > 0


# The statuses of consecutive requests, and S3's code for the first.
STATUSES = {
    "503 once": ([503, 200], "SlowDown"),
    "503 four times": ([503] * 4 + [200], "SlowDown"),
    "503 for ever": ([503] * 6, "SlowDown"),
    "429 with Retry-After": ([429, 200], "TooManyRequests"),
    "500 once": ([500, 200], "InternalError"),
    "403": ([403] * 3, "AccessDenied"),
    "404": ([404] * 3, "NoSuchKey"),
    "expired token": ([400] * 3, "ExpiredToken"),
}


@pytest.mark.parametrize("fault", STATUSES)
def test_a_read_is_answered_with_an_error_of_s3(nginx, faulty, file, fault):
    statuses, code = STATUSES[fault]
    faulty.inject(fault)
    seen = [ask(file) for _ in statuses]

    assert [answer.status for answer in seen] == statuses
    assert f"<Code>{code}</Code>".encode() in seen[0].data
    assert len(nginx.requests()) == statuses.count(200)


def test_too_many_requests_say_when_to_come_again(faulty, file):
    faulty.inject("429 with Retry-After")

    assert ask(file).headers["retry-after"] == "1"


@pytest.mark.parametrize(("fault", "status"), [("HEAD 403", 403), ("HEAD 405", 405)])
def test_head_is_refused_and_get_is_not(faulty, file, fault, status):
    faulty.inject(fault)

    assert [ask(file, method).status for method in ("HEAD", "GET", "HEAD")] == [status, 200, status]


def test_an_object_is_deleted_after_the_first_read(faulty, file):
    faulty.inject("deleted mid-read")

    assert [ask(file).status for _ in range(3)] == [200, 404, 404]


def test_who_has_another_token_is_served(faulty, file):
    faulty.inject("expired token", containing="old")

    assert [ask(file, Authorization=token).status for token in ("old", "new", "old")] == [400, 200, 400]


def test_the_end_of_a_body_is_told_in_other_ways(faulty, file):
    faulty.inject("no Content-Length", times=1)
    faulty.inject("chunked", times=1)
    closed, chunked = ask(file).headers, ask(file).headers

    assert ("content-length" in closed, "transfer-encoding" in closed) == (False, False)
    assert ("content-length" in chunked, chunked["transfer-encoding"]) == (False, "chunked")


def test_the_headers_of_a_short_body_agree_with_it(faulty, file):
    faulty.inject("short body, headers agree")
    faulty.inject("short body, headers and size agree")
    short, smaller = [ask(file, Range="bytes=1000-1999") for _ in range(2)]

    assert short.whole == smaller.whole == (206, DATA[1000:1500], None)
    assert short.headers["content-length"] == smaller.headers["content-length"] == "500"
    assert short.headers["content-range"] == f"bytes 1000-1499/{len(DATA)}"
    assert smaller.headers["content-range"] == "bytes 1000-1499/1500"


def test_a_range_is_ignored(faulty, file):
    faulty.inject("Range ignored")

    assert ask(file).whole == GOOD
    assert ask(file, Range="bytes=10-19").whole == GOOD
    assert ask(file, Range="bytes=10-19").whole == (206, DATA[10:20], None)


def test_a_range_is_ignored_for_ever(faulty, file):
    faulty.inject("Range ignored for ever")

    assert [ask(file, Range="bytes=10-19").whole for _ in range(3)] == [GOOD] * 3


def test_a_range_is_ignored_in_the_middle_of_a_file(faulty, file):
    faulty.inject("Range ignored mid-file")

    assert ask(file, Range="bytes=0-9").whole == (206, DATA[:10], None)
    assert ask(file, Range="bytes=10-").whole == GOOD
    assert ask(file, Range="bytes=10-19").whole == (206, DATA[10:20], None)


def test_the_range_of_a_response_is_said_to_be_another(faulty, file):
    faulty.inject("Content-Range of other bytes")
    faulty.inject("Content-Range of another size")
    seen = [ask(file, Range="bytes=10-19") for _ in range(2)]
    faulty.inject("Content-Range of other bytes")

    assert ask(file, Range=f"bytes={len(DATA)}-").status == 416
    assert [answer.whole for answer in seen] == [(206, DATA[10:20], None)] * 2
    assert [a.headers["content-range"] for a in seen] == [f"bytes 11-20/{len(DATA)}", f"bytes 10-19/{1 << 40}"]


def test_a_body_is_compressed_though_nobody_asked(faulty, file):
    faulty.inject("gzip unasked")
    seen = ask(file)

    assert (seen.headers["content-encoding"], seen.error) == ("gzip", None)
    assert gzip.decompress(seen.data) == DATA


def test_an_object_is_stored_with_an_encoding(faulty, file):
    faulty.inject("stored Content-Encoding gzip")
    seen = ask(file, Range="bytes=10-19")

    assert (seen.headers["content-encoding"], seen.data) == ("gzip", DATA[10:20])


@pytest.mark.parametrize("fault", ["301", "302", "307"])
def test_a_redirect_is_to_the_same_place_once(faulty, file, fault):
    faulty.inject(fault)
    seen = ask(file)

    assert (seen.status, seen.headers["location"]) == (int(fault), file)
    assert ask(file).whole == GOOD


def test_a_redirect_leads_to_another_host(faulty, file):
    faulty.inject("redirect to another host")
    location = ask(file).headers["location"]

    assert location == file.replace("127.0.0.1", "localhost")
    assert ask(location).whole == GOOD


def test_a_redirect_leads_to_itself_for_ever(faulty, file):
    faulty.inject("redirect loop")

    assert [ask(file).headers["location"] for _ in range(5)] == [file] * 5


def test_what_is_overwritten_says_so_to_who_asks_for_the_version(faulty, file):
    etag = ask(file).headers["etag"]
    faulty.inject("overwritten mid-read")
    first, second = ask(file), ask(file)

    assert first.headers["etag"] == etag != second.headers["etag"]
    assert ask(file, If_Match=etag).status == 412
    assert ask(file, If_Match=second.headers["etag"]).whole == (200, SWAPPED, None)


def test_what_is_overwritten_is_served_where_if_match_is_ignored(faulty, file):
    faulty.inject("overwritten mid-read, If-Match ignored", skip=0)
    seen = ask(file, If_Match='"any"')

    assert seen.whole == (200, SWAPPED, None)
    assert seen.headers["etag"] == '"another-version"'


def test_what_is_overwritten_may_have_the_same_etag(faulty, file):
    etag = ask(file).headers["etag"]
    faulty.inject("overwritten mid-read, same ETag", skip=0)
    seen = ask(file, If_Match=etag)

    assert seen.whole == (200, SWAPPED, None)
    assert seen.headers["etag"] == etag


def begin(url, expected):
    """Return a connection that has received a response's header and this many bytes of its body."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
    connection.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    got = b""
    while expected is not None and not got.partition(b"\r\n\r\n")[2].startswith(expected):
        got += connection.recv(1000)
    return connection


def received(connection, size):
    """Return this many bytes, or those received before the end."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def says_more(connection):
    """Return whether data arrives soon."""
    return connection in wait([connection], 0.05)


@pytest.mark.parametrize(("fault", "expected"), [("stall mid-body", DATA[:HALF]), ("stall before response", None)])
def test_a_response_stalls(faulty, file, fault, expected):
    faulty.inject(fault)
    with begin(file, expected) as connection:
        assert not says_more(connection)
    assert ask(file).whole == GOOD


def test_a_response_trickles(faulty, nginx):
    (nginx.folder / "b").write_bytes(DATA[:20])
    faulty.inject("trickle", rate=100)
    began = time.monotonic()

    assert ask(f"{faulty.url}/b").whole == (200, DATA[:20], None)
    assert time.monotonic() - began > 10 / 100


def test_connections_are_refused_and_then_accepted(faulty, file):
    with begin(file, DATA) as connection:
        faulty.refuse()

        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert ask(file).error is ConnectionRefusedError
    faulty.listen()
    assert ask(file).whole == GOOD


def test_connections_are_refused_for_some_time(faulty, file):
    faulty.inject("refused, then up", seconds=0.2)
    seen = [ask(file)]
    while seen[-1].error:
        seen.append(ask(file))

    assert {answer.error for answer in seen[:-1]} == {ConnectionRefusedError}
    assert seen[-1].whole == GOOD


def test_a_request_is_held_until_it_is_released(nginx, faulty, file):
    held = faulty.hold()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(ask, file)
        held.wait()
        assert nginx.requests() == []
        (nginx.folder / "a").write_bytes(b"new")
        held.release()

        assert reading.result().whole == (200, b"new", None)


def test_a_response_is_held_until_it_is_released(faulty, file):
    held = faulty.hold(after=1000)
    with begin(file, DATA[:1000]) as connection:
        held.wait()
        assert not says_more(connection)
        held.release()

        assert received(connection, len(DATA) - 1000) == DATA[1000:]


def put(client, bucket, **condition):
    client.put_object(Bucket=bucket, Key="a", Body=DATA, **condition)


def put_unless_there(client, bucket):
    put(client, bucket, IfNoneMatch="*")


def put_parts(client, bucket):
    """Upload an object in one part."""
    names = {"Bucket": bucket, "Key": "a"}
    names["UploadId"] = client.create_multipart_upload(**names)["UploadId"]
    part = {"PartNumber": 1, "ETag": client.upload_part(**names, PartNumber=1, Body=DATA)["ETag"]}
    client.complete_multipart_upload(**names, MultipartUpload={"Parts": [part]})


LOST = "ConnectionClosedError"

# The action, the client's result, the object's state after it, and the number of unfinished uploads.
UPLOADS = {
    "PUT cut": (put, LOST, None, 0),
    "part cut": (put_parts, LOST, None, 1),
    "PUT 503": (put, "SlowDown", None, 0),
    "PUT 403": (put, "AccessDenied", None, 0),
    "part 503": (put_parts, "SlowDown", None, 1),
    "part 500 for ever": (put_parts, "InternalError", None, 1),
    "Complete 500": (put_parts, "InternalError", None, 1),
    "Complete 500, but done": (put_parts, "InternalError", DATA, 0),
    "Complete 200 with an error": (put_parts, "InternalError", None, 1),
    "Complete 200 with an error, but done": (put_parts, "InternalError", DATA, 0),
    "lost response to PUT": (put, LOST, DATA, 0),
    "lost response to conditional PUT": (put_unless_there, LOST, DATA, 0),
    "lost response to a part": (put_parts, LOST, None, 1),
    "lost response to Create": (put_parts, LOST, None, 1),
    "lost response to Complete": (put_parts, LOST, DATA, 0),
    "409 to conditional PUT": (put_unless_there, "ConditionalRequestConflict", None, 0),
    "409 to Complete": (put_parts, "ConditionalRequestConflict", None, 1),
    "412 to conditional PUT": (put_unless_there, "PreconditionFailed", None, 0),
    "412 to Complete": (put_parts, "PreconditionFailed", None, 1),
    "501 to conditional PUT": (put_unless_there, "NotImplemented", None, 0),
    "no answer to PUT": (put, "ReadTimeoutError", None, 0),
    "bit flip in PUT": (put, None, DATA[:HALF] + b"\1" + DATA[HALF + 1 :], 0),
    "ETag is no MD5": (put, None, DATA, 0),
}


def outcome(write, client, bucket):
    """Return a client's result: S3's code, or the kind of its error."""
    try:
        write(client, bucket)
    except botocore.exceptions.ClientError as error:
        return error.response["Error"]["Code"]
    except botocore.exceptions.BotoCoreError as error:
        return type(error).__name__


@pytest.mark.parametrize("fault", UPLOADS)
def test_an_upload_has_the_fault(moto, proxy, fault):
    write, told, data, uploads = UPLOADS[fault]
    bucket = moto.make_bucket()
    faulty = proxy(moto.url)
    rule = faulty.inject(fault)
    with moto.client(faulty.url, read_timeout=0.2 if fault == "no answer to PUT" else 60) as client:
        assert outcome(write, client, bucket) == told
    with moto.client() as client:
        stored = [o["Key"] for o in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
        assert stored == ([] if data is None else ["a"])
        assert [client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in stored] == [data] * len(stored)
        assert len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])) == uploads
    assert rule.hits > 0


def test_a_store_has_etags_of_its_own(moto, proxy):
    bucket = moto.make_bucket()
    faulty = proxy(moto.url)
    faulty.inject("ETag is no MD5")
    with moto.client(faulty.url) as client:
        told = client.put_object(Bucket=bucket, Key="a", Body=DATA)["ETag"]

        assert told == client.head_object(Bucket=bucket, Key="a")["ETag"] == '"0123-of-my-own"'


def test_every_fault_that_has_a_name_is_tested_here():
    tests = Path(__file__).read_text()

    assert [name for name in FAULTS if f'"{name}"' not in tests] == []


def test_a_name_or_an_argument_that_does_not_exist_is_refused(faulty):
    with pytest.raises(KeyError):
        faulty.inject("gremlins")
    with pytest.raises(ValueError, match=r"cannot rule .* unexpected keyword argument 'afer'"):
        faulty.rule("cut", afer=10)


def test_a_rule_takes_those_requests_that_all_its_conditions_hold_for(faulty, file):
    faulty.rule("status", status=501, method="GET", path="/a*", query="part=", header="X-Mine", ranged=True, times=None)
    right = {"url": f"{file}?part=1", "Range": "bytes=0-9", "X_Mine": "1"}
    lacking = [{**right, "url": file}, {**right, "url": f"{faulty.url}/b?part=1"}, {**right, "method": "HEAD"}]
    lacking += [{name: value for name, value in right.items() if name != left} for left in ("Range", "X_Mine")]

    assert ask(**right).status == 501
    assert 501 not in [ask(**request).status for request in lacking]


def test_the_first_rule_that_takes_a_request_is_followed(faulty, file):
    faulty.inject("503 once", skip=1)
    faulty.inject("500 once")
    faulty.inject("404")

    assert [ask(file).status for _ in range(4)] == [500, 503, 404, 404]


def test_a_rule_counts_requests_that_come_at_the_same_time(faulty, file):
    rule = faulty.inject("503 four times")
    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(lambda _: ask(file).status, range(20)))

    assert sorted(statuses) == [200] * 16 + [503] * 4
    assert rule.hits == 4


def test_rules_and_the_log_are_cleared(faulty, file):
    faulty.inject("404")
    ask(file)
    faulty.clear()

    assert faulty.log() == []
    assert ask(file).whole == GOOD


def test_the_log_has_what_was_asked_and_answered(faulty, file):
    ask(f"{file}?x=1", Range="bytes=0-9", Authorization="Basic eA==")
    faulty.inject("FIN mid-body")
    ask(file)

    first, second = faulty.log()
    assert (first["method"], first["path"], first["range"]) == ("GET", "/a?x=1", "bytes=0-9")
    assert first["headers"]["authorization"] == "Basic eA=="
    assert (first["status"], first["sent"], first["fault"]) == (206, 10, "")
    assert (second["status"], second["sent"], second["fault"]) == (200, HALF, "cut")


def test_a_connection_serves_many_requests(faulty):
    connection = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=60)
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("GET", "/a")
            assert connection.getresponse().read() == DATA

        assert faulty.connections() == [1, 1]
    assert [entry["connection"] for entry in faulty.log()] == [1, 1, 1]


def test_a_proxy_is_used_by_another_process(faulty, file):
    there = pickle.loads(pickle.dumps(faulty))
    there.inject("503 once")

    assert ask(file).status == 503


def test_a_proxy_passes_on_what_a_client_that_waits_to_be_told_to_send_is_told(moto, proxy):
    bucket = moto.make_bucket()
    faulty = proxy(moto.url)
    faulty.inject("PUT 503")
    with socket.create_connection(("127.0.0.1", faulty.port), timeout=60) as connection:
        head = f"PUT /{bucket}/a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        answer = received(connection, 1 << 20)

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\nbytes", b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n"]
)
def test_what_passes_through_a_proxy_is_not_changed(proxy, body):
    request = b"PUT /a%20b?x=%2F HTTP/1.1\r\nhost: bucket.example\r\nX-Twice: 1\r\nx-twice: 2\r\n" + body
    response = b"HTTP/1.1 299 As It Pleases\r\netag: 1\r\nX-ODD: a:b \xe9\r\n" + body
    with socket.create_server(("127.0.0.1", 0)) as server:
        faulty = proxy(f"http://127.0.0.1:{server.getsockname()[1]}")
        with socket.create_connection(("127.0.0.1", faulty.port), timeout=60) as client:
            client.sendall(request)
            upstream, _ = server.accept()
            with upstream:
                assert received(upstream, len(request)) == request
                upstream.sendall(response)

            assert received(client, len(response)) == response


def test_a_server_learns_that_an_upload_was_cut(proxy):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        faulty = proxy(f"http://127.0.0.1:{server.getsockname()[1]}")
        faulty.inject("PUT cut")
        writing = thread.submit(ask, f"{faulty.url}/a", "PUT", b"bytes")
        upstream, _ = server.accept()
        with upstream:
            assert received(upstream, 1 << 20).endswith(b"\r\n\r\nby")

        assert writing.result().error is ConnectionResetError


def test_a_server_far_away_answers_after_its_round_trips_and_at_its_rate(faulty):
    faulty.distance(rtt=0.02, rate=len(DATA) / 0.05)
    connection = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=60)
    seconds = []
    with contextlib.closing(connection):
        for _ in range(2):
            began = time.monotonic()
            connection.request("GET", "/a")
            assert connection.getresponse().read() == DATA
            seconds.append(time.monotonic() - began)

    # A connection is made in one round trip, a request takes one, and the data 50 ms.
    assert seconds[0] >= 0.09
    assert seconds[1] >= 0.07


def test_a_server_takes_so_many_connections_at_a_time(faulty, file):
    faulty.distance(connections=2)
    with begin(file, DATA), begin(file, DATA) as second, begin(file, None) as third:
        assert not says_more(third)
        assert faulty.connections() == [2, 2]
        second.close()

        assert third.recv(4) == b"HTTP"
    assert faulty.connections()[1] == 2
