"""A server's answers are not trusted without proof, missing bytes are requested again, and every read ends."""

import logging
import os
import pickle
import re
import ssl
import threading

import pytest
import trustme
import urllib3

from shardkit.errors import (
    AccessError,
    ArgumentError,
    ChangedFileError,
    MissingFileError,
    NoListingError,
    StorageError,
    TruncatedShardError,
)
from shardkit.storage import connections as network
from shardkit.storage import ranges
from shardkit.storage import retry as attempts
from shardkit.storage.registry import storage_for
from tests.support.scripted import Scripted, answer, part

CONTENT = bytes(range(256)) * 1000
SECRETS = ["hunter2", "SIGNATURE", "TOKEN"]


@pytest.fixture
def serve():
    """Return a function that starts a server with given answers."""
    servers = []

    def start(*answers, **options):
        servers.append(Scripted(*answers, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Skip the pauses between tries, and return the list of them."""
    made = []
    monkeypatch.setattr(attempts, "_sleep", made.append)
    return made


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that a test sets: its first element."""
    now = [0.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now[0])
    return now


def well(request):
    """Answer a request correctly."""
    first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers["range"]).groups()
    return part(CONTENT, int(first), int(last) + 1 if last else len(CONTENT), etag='"one"')


def read(server, start=1000, size=5000, **options):
    return storage_for(server.url, options).read_range(f"{server.url}/a.tar", start, size)


def test_a_range_is_asked_for_as_it_is_and_unencoded(serve):
    server = serve(well)

    assert read(server) == CONTENT[1000:6000]
    assert server.requests[0].target == "/a.tar"
    assert server.requests[0].headers["range"] == "bytes=1000-5999"
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_a_connection_is_used_again_when_its_answer_was_read_to_the_end(serve):
    server = serve(well, keeps=True)
    storage = storage_for(server.url)
    for start in (0, 70_000, 140_000):
        assert storage.read_range(f"{server.url}/a.tar", start, 70_000) == CONTENT[start : start + 70_000]
    stream = storage.open(f"{server.url}/a.tar")
    assert stream.read(len(CONTENT)) == CONTENT

    assert server.connections == 1


def test_what_is_missing_is_asked_for_from_the_last_byte_on_and_of_the_same_version(serve):
    whole = part(CONTENT, 1000, 6000, etag='"one"')
    server = serve(whole[:-3000], None, well)

    assert read(server) == CONTENT[1000:6000]
    assert [request.headers["range"] for request in server.requests] == [
        "bytes=1000-5999",
        "bytes=3000-5999",
        "bytes=3000-5999",
    ]
    assert [request.headers.get("if-match") for request in server.requests] == [None, '"one"', '"one"']


def test_an_answer_that_brings_less_than_was_asked_for_is_taken_and_gone_on_with(serve):
    server = serve(part(CONTENT, 1000, 2000), part(CONTENT, 2000, 6000))

    assert read(server) == CONTENT[1000:6000]


def test_a_server_that_knows_no_ranges_is_read_from_its_first_byte_and_never_appended(serve):
    whole = answer(200, CONTENT, etag='"one"')
    server = serve(whole[:-100_000], whole)

    assert read(server, 200_000, 50_000) == CONTENT[200_000:250_000]


def test_however_far_into_a_file_a_read_begins_what_is_before_is_passed_over(serve):
    content = bytes(5 << 20) + b"end"
    server = serve(answer(200, content))

    assert read(server, 5 << 20, 3) == b"end"
    assert len(server.requests) == 1


def test_what_is_passed_over_is_no_progress(serve, pauses):
    server = serve(answer(200, CONTENT)[:-100_000])
    with pytest.raises(StorageError, match=r"cannot be read from byte 200,000 on, .* \(tried 12 times"):
        read(server, 200_000, 10)

    assert len(pauses) == 11


def test_versions_are_remembered_of_a_bounded_number_of_files(serve, monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_VERSIONS", 2)
    server = serve(well)
    storage = storage_for(server.url)
    for name in "abcd":
        storage.info(f"{server.url}/{name}")

    assert len(storage.serving(server.url)._versions) == 2


def test_headers_of_the_user_do_not_change_what_is_asked_for(serve):
    server = serve(well)

    assert read(server, headers={"range": "bytes=0-0", "X-Mine": "1"}) == CONTENT[1000:6000]
    assert server.requests[0].headers["x-mine"] == "1"


def test_a_stream_from_a_server_that_knows_no_ranges_goes_on_where_it_broke(serve):
    whole = answer(200, CONTENT)
    server = serve(whole[:-100_000], whole[:-50_000], whole)
    stream = storage_for(server.url).open(f"{server.url}/a.tar", 50)

    assert stream.size == len(CONTENT)
    assert stream.read(1 << 20) == CONTENT[50:]


def test_a_stream_of_unknown_length_ends_where_the_connection_does(serve):
    server = serve(answer(200, CONTENT, content_length=None))
    stream = storage_for(server.url).open(f"{server.url}/a.tar")

    assert stream.size is None
    assert stream.read(1 << 20) == CONTENT
    assert stream.read(1) == b""
    with pytest.raises(StorageError, match="does not say how large it is"):
        storage_for(server.url).info(f"{server.url}/a.tar")


def test_a_part_of_a_whole_of_unknown_size_must_come_as_it_is_announced(serve):
    said = answer(206, CONTENT[1000:2000], content_range="bytes 1000-5999/*", content_length=None)
    server = serve(said, answer(206, CONTENT[2000:6000], content_range="bytes 2000-5999/*"))

    assert read(server) == CONTENT[1000:6000]


def test_what_is_skipped_is_read_over_if_it_is_little_and_else_not_fetched(serve):
    content = bytes(8 << 20) + b"end"

    def large(request):
        first = int(request.headers["range"][6:-1])
        return part(content, first, len(content))

    server = serve(large)
    stream = storage_for(server.url).open(f"{server.url}/a.tar")
    stream.read(10)
    stream.skip(1000)
    stream.read(10)
    stream.skip(len(content) - 1020 - 3)

    assert stream.read(10) == b"end"
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-", f"bytes={len(content) - 3}-"]
    stream.skip(1)
    assert stream.read(1) == b""


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (answer(206, CONTENT[:5000], content_range="bytes 0-4999/256000"), "Content-Range 'bytes 0-4999/256000'"),
        (answer(206, CONTENT[:5000]), "Content-Range ''"),
        (answer(206, CONTENT[:5000], content_range="bytes 1000-5999/100"), "Content-Range 'bytes 1000-5999/100'"),
        (answer(206, CONTENT[:100], content_range="bytes 1000-5999/256000"), "and 100 bytes"),
        (answer(206, CONTENT[:6000], content_range="bytes 1000-6999/256000"), "more than exist or were requested"),
        (answer(206, CONTENT[:5000], content_range="items 1000-5999/256000"), "Content-Range"),
        (answer(200, CONTENT, content_encoding="gzip"), "it is encoded as gzip, which was not asked for"),
        (answer(416, content_range="bytes */256000"), "answers 416, though the file has 256,000 bytes"),
        (answer(416, b"<ActualObjectSize>256000</ActualObjectSize>"), "answers 416, though the file has 256,000 bytes"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(serve, said, problem):
    assert read(serve(said, said, well)) == CONTENT[1000:6000]
    with pytest.raises(StorageError, match=re.escape(problem)) as caught:
        read(serve(said, said, said, well))
    assert "none of them was used" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"etag": '"one"'}, {"etag": '"two"'}),
        ({"etag": 'W/"one"'}, {"etag": 'W/"two"'}),
        ({"last_modified": "Sat, 21 Nov 2026 08:00:00 GMT"}, {"last_modified": "Sat, 21 Nov 2026 09:00:00 GMT"}),
    ],
    ids=["ETag", "weak ETag", "Last-Modified"],
)
def test_a_file_that_is_replaced_while_it_is_in_use_is_an_error_until_it_is_looked_at_anew(serve, first, then):
    server = serve(part(CONTENT, 0, 1, **first), part(CONTENT, 1000, 6000, **then))
    storage = storage_for(server.url)
    info = storage.info(f"{server.url}/a.tar")

    assert (info.size, info.version) == (len(CONTENT), next(iter(first.values())))
    for _ in range(2):
        with pytest.raises(ChangedFileError, match="was replaced while it was in use: its"):
            storage.read_range(f"{server.url}/a.tar", 1000, 5000)
    assert [request.headers.get("if-match") for request in server.requests[1:]] == [
        first["etag"] if first.get("etag") == '"one"' else None
    ] * 2


def test_a_server_that_has_another_version_only_is_not_asked_again(serve, pauses):
    server = serve(part(CONTENT, 0, 1, etag='"one"'), answer(412), well)
    storage = storage_for(server.url)
    storage.info(f"{server.url}/a.tar")

    with pytest.raises(ChangedFileError, match="the server has another version"):
        storage.read_range(f"{server.url}/a.tar", 0, 10)
    assert pauses == []
    assert storage.info(f"{server.url}/a.tar").version == '"one"'
    assert storage.read_range(f"{server.url}/a.tar", 0, 10) == CONTENT[:10]


def test_a_file_that_ends_before_is_truncated(serve):
    server = serve(part(CONTENT, 255_000, 256_000), answer(416, content_range="bytes */256000"))

    with pytest.raises(TruncatedShardError, match="ends at byte 256,000, expected 5,000 bytes from byte 255,000"):
        read(server, 255_000)
    with pytest.raises(TruncatedShardError, match="ends at byte 300,000, expected 5,000 bytes from byte 300,000"):
        read(server, 300_000)


@pytest.mark.parametrize(
    "said",
    [
        answer(416),
        answer(416, content_range="bytes */0"),
        answer(416, b"<Error><Code>InvalidRange</Code><ActualObjectSize>0</ActualObjectSize></Error>"),
        answer(200),
    ],
)
def test_an_empty_file_is_empty(serve, said):
    server = serve(said)
    storage = storage_for(server.url)

    assert storage.info(f"{server.url}/a").size == 0
    assert storage.open(f"{server.url}/a").read(10) == b""
    assert storage.read_range(f"{server.url}/a", 0, 0) == b""


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_after_growing_random_pauses(serve, pauses, status):
    server = serve(*[answer(status)] * 8, well)

    assert read(server) == CONTENT[1000:6000]
    assert len(pauses) == 8
    parts = [pause / min(10, 0.1 * 2**i) for i, pause in enumerate(pauses)]
    assert all(0 <= part <= 1 for part in parts)
    assert len(set(parts)) == 8  # pauses are random below the bound
    assert min(parts) < 0.9


def test_s3_has_errors_of_its_own_that_may_pass(serve, pauses):
    server = serve(answer(400, b"<Error><Code>RequestTimeout</Code></Error>"), well)

    assert read(server) == CONTENT[1000:6000]
    assert len(pauses) == 1


@pytest.mark.parametrize(("asked", "pause"), [("7", 7.0), ("3600", 60.0)])
def test_a_pause_that_the_server_asks_for_is_made_up_to_a_minute(serve, pauses, asked, pause):
    server = serve(answer(503, retry_after=asked), well)
    read(server)

    assert pauses == [pause]


@pytest.mark.parametrize("asked", ["0", "Sat, 21 Nov 2000 08:00:00 GMT", "soon"])
def test_our_own_pause_is_made_if_the_server_asks_for_none(serve, pauses, monkeypatch, asked):
    monkeypatch.setattr(attempts.random, "uniform", lambda _, longest: longest)
    server = serve(answer(503, retry_after=asked), well)
    read(server)

    assert pauses == [0.1]


def test_trying_ends_after_some_tries_without_a_byte(serve, pauses):
    server = serve(answer(503, b"<Error><Code>SlowDown</Code><Message>Please\nwait</Message></Error>"))

    with pytest.raises(StorageError) as caught:
        read(server)
    because = "because the server answers 503 (SlowDown: Please wait) (tried 12 times in"
    assert f"{server.url}/a.tar: cannot be read from byte 1,000 on, {because}" in str(caught.value)
    assert (len(server.requests), len(pauses)) == (12, 11)


def test_trying_does_not_end_as_long_as_bytes_come(serve):
    server = serve(*(part(CONTENT, 1000 + i, 1040)[: i - 39 or None] for i in range(40)))  # one byte each

    assert read(server, 1000, 40) == CONTENT[1000:1040]
    assert len(server.requests) == 40


def test_a_read_ends_in_its_time_though_bytes_come(serve, clock):
    def slowly(request):
        clock[0] += 100.0
        return well(request)[:-4999]

    with pytest.raises(StorageError, match=r"cannot be read from byte 1,00\d on, because .* in \d00 s"):
        read(serve(slowly), total_timeout=250)


def test_what_comes_has_more_time_the_more_it_is(serve, clock):
    def slowly(request):
        clock[0] += 1.0
        return well(request)[:-10_000] if request.headers["range"] == "bytes=0-255999" else well(request)

    assert read(serve(slowly), 0, 256_000, total_timeout=1.5) == CONTENT


def test_a_host_that_nobody_knows_is_said_at_once(pauses):
    with pytest.raises(StorageError, match=r"because the name of its host is not known \("):
        storage_for("http://x").info("http://no-such-host.invalid/a.tar")
    assert pauses == []


def test_a_server_that_is_down_is_waited_for(serve, pauses):
    server = serve(well)
    server.close()
    with pytest.raises(StorageError, match=r"because no connection was made \(Connection refused\) \(tried 12 times"):
        read(server)

    assert len(pauses) == 11


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, MissingFileError, r"a\.tar: does not exist \(the server answers 404\); correct the URL"),
        (410, MissingFileError, "does not exist"),
        (403, AccessError, "access is refused: the server answers 403; it may be forbidden, or its address may have"),
        (401, AccessError, "access is refused: .* pass username and password"),
        (400, StorageError, "cannot be read: the server answers 400"),
    ],
)
def test_what_will_not_pass_is_said_at_once(serve, pauses, status, error, said):
    server = serve(answer(status))

    with pytest.raises(error, match=said) as caught:
        read(server)
    assert caught.value.url == f"{server.url}/a.tar"
    assert isinstance(caught.value, OSError)
    assert (len(server.requests), pauses) == (1, [])


def test_redirects_are_followed_and_a_query_goes_along(serve):
    server = serve(answer(302, location="/b.tar?x=1"), answer(307, location="c.tar"), well)

    assert read(server) == CONTENT[1000:6000]
    assert [request.target for request in server.requests] == ["/a.tar", "/b.tar?x=1", "/c.tar"]


@pytest.mark.parametrize(
    ("location", "problem"),
    [("/a.tar", "is redirected more than 5 times"), ("file:///etc/passwd", "which is no web address")],
)
def test_redirects_that_lead_nowhere_are_errors(serve, location, problem):
    with pytest.raises(StorageError, match=problem):
        read(serve(answer(302, location=location)))


def test_who_asks_is_said_to_the_host_that_the_user_named_alone(serve):
    theirs = serve(well)
    ours = serve(answer(302, location="/there"), answer(302, location=f"{theirs.url}/a.tar"))
    read(ours, username="me", password="hunter2", headers={"X-Token": "TOKEN"})

    assert [request.headers["authorization"] for request in ours.requests] == ["Basic bWU6aHVudGVyMg=="] * 2
    assert [request.headers["x-token"] for request in ours.requests] == ["TOKEN"] * 2
    assert theirs.requests[0].headers.keys() <= {
        *["host", "accept-encoding", "range", "user-agent"],
    }


def test_a_user_and_a_password_may_be_in_the_url_which_goes_before_the_options(serve):
    server = serve(well)
    url = f"http://me%40home:hunter2@{server.host}/a.tar"
    storage_for(url, {"username": "other"}).read_range(url, 0, 1)

    assert server.requests[0].headers["authorization"] == "Basic bWVAaG9tZTpodW50ZXIy"
    assert server.requests[0].headers["host"] == server.host


def test_secrets_are_in_no_error_log_or_representation(serve, caplog):
    caplog.set_level(logging.DEBUG)
    server = serve(answer(503), answer(403, b"<Error><Message>http://h/?sig=SIGNATURE</Message></Error>"))
    url = f"http://me:hunter2@{server.host}/a.tar?X-Amz-Signature=SIGNATURE&t=TOKEN"
    storage = storage_for(url, {"password": "hunter2", "headers": {"X": "TOKEN"}})
    with pytest.raises(AccessError) as caught:
        storage.read_range(url, 0, 1)

    assert server.requests[0].target == "/a.tar?X-Amz-Signature=SIGNATURE&t=TOKEN"
    shown = [
        str(caught.value),
        repr(caught.value),
        caught.value.url,
        caplog.text,
        repr(storage),
        repr(vars(storage.serving(url))),
    ]
    shown += [repr(caught.value.__cause__), str(storage.serving(url).signer)]
    assert [secret for secret in SECRETS for text in shown if secret in text] == []
    assert f"http://{server.host}/a.tar?...: access is refused" in str(caught.value)
    assert "trying again" in caplog.text


def test_proxies_are_those_of_the_environment(serve, monkeypatch):
    proxy = serve(well)
    monkeypatch.setenv("http_proxy", f"http://me:hunter2@{proxy.host}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    storage = storage_for("http://far.invalid")

    assert storage.read_range("http://you:secret@far.invalid/a.tar", 0, 10) == CONTENT[:10]
    assert proxy.requests[0].target == "http://far.invalid/a.tar"
    assert proxy.requests[0].headers["proxy-authorization"] == "Basic bWU6aHVudGVyMg=="
    here = serve(well)
    assert read(here) == CONTENT[1000:6000]
    assert (len(here.requests), len(proxy.requests)) == (1, 1)  # not through the proxy
    monkeypatch.setenv("http_proxy", "socks9://me:hunter2@host")
    with pytest.raises(ArgumentError, match="the proxy socks9://host cannot be used"):
        storage.info("http://elsewhere.invalid/a.tar")


def test_a_fresh_read_goes_past_caches_over_a_new_connection(serve):
    server = serve(well, keeps=True)
    storage = storage_for(server.url)
    for fresh in (False, False, True):
        storage.read_range(f"{server.url}/a.tar", 0, 10, fresh=fresh)

    assert server.connections == 2
    assert [request.headers.get("cache-control") for request in server.requests] == [None, None, "no-cache"]


def test_a_child_uses_no_connection_of_its_parent(serve):
    server = serve(well, keeps=True)
    storage = storage_for(server.url)
    stream = storage.open(f"{server.url}/a.tar")
    assert stream.read(1000) == CONTENT[:1000]
    assert storage.read_range(f"{server.url}/a.tar", 0, 5) == CONTENT[:5]
    assert server.connections == 2
    child = os.fork()
    if not child:
        is_right = stream.read(1000) == CONTENT[1000:2000]
        is_right &= storage.read_range(f"{server.url}/a.tar", 5, 5) == CONTENT[5:10]
        stream.close()
        os._exit(0 if is_right else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert stream.read(1000) == CONTENT[1000:2000]
    assert server.connections == 4


@pytest.mark.parametrize("way", ["http", "https", "a proxy"])
def test_a_connection_that_nobody_uses_is_closed_for_one_that_waits(way, serve, monkeypatch, tmp_path, pauses):
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = serve(well, keeps=True, one_at_a_time=True, tls=context if way == "https" else None)
    urls = [f"{server.url}/a.tar", f"{server.url}/a.tar"]
    if way == "a proxy":
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.setenv("no_proxy", "")
        urls = ["http://far.invalid/a.tar", "http://farther.invalid/a.tar"]
    storage = storage_for(server.url, {"ca_certs": str(tmp_path / "ca.pem")})

    assert storage.read_range(urls[0], 0, 10) == CONTENT[:10]
    assert storage.read_range(urls[1], 0, 10, fresh=True) == CONTENT[:10]
    assert server.connections == 2
    assert pauses == []  # nothing was retried


def test_a_child_that_is_forked_while_requests_wait_has_connections_closed_for_itself(monkeypatch, pauses):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    waiting = network._waiting
    with waiting.add(("http://host", ""), None), waiting._lock:
        child = os.fork()
    if not child:
        code = 1
        try:
            server = Scripted(well, keeps=True, one_at_a_time=True)
            storage = storage_for(server.url)
            data = [storage.read_range(f"{server.url}/a.tar", 0, 10, fresh=fresh) for fresh in (False, True)]
            code = 0 if (data, pauses) == ([CONTENT[:10]] * 2, []) else 2
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_request_whose_connections_are_closed_in_that_moment_is_sent_over_another(serve, monkeypatch, pauses):
    server = serve(well, keeps=True)
    storage = storage_for(server.url)
    get = urllib3.HTTPConnectionPool._get_conn
    is_first = iter([True])

    def close_before(pool, timeout=None):
        if next(is_first, False):
            network.begin_anew(server.url, network.Network())
        return get(pool, timeout)

    monkeypatch.setattr(urllib3.HTTPConnectionPool, "_get_conn", close_before)

    assert storage.read_range(f"{server.url}/a.tar", 0, 10) == CONTENT[:10]
    assert (len(server.requests), pauses) == (1, [])


def test_a_program_of_one_thread_stays_one(serve, monkeypatch):
    server = serve(well)
    monkeypatch.setattr(network, "_waiting", network._Waiting())
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the test's server has threads, too

    assert storage_for(server.url).read_range(f"{server.url}/a.tar", 0, 10) == CONTENT[:10]
    assert not network._waiting._is_watched


def test_a_storage_may_be_pickled_with_what_it_knows_and_without_connections(serve):
    server = serve(part(CONTENT, 0, 1, etag='"one"'), well)
    storage = storage_for(server.url, {"username": "me", "password": "hunter2"})
    storage.info(f"{server.url}/a.tar")
    copy = pickle.loads(pickle.dumps(storage))

    assert copy.read_range(f"{server.url}/a.tar", 0, 3) == CONTENT[:3]
    assert server.requests[1].headers["if-match"] == '"one"'
    assert server.requests[1].headers["authorization"] == "Basic bWU6aHVudGVyMg=="


def test_threads_share_a_storage(serve):
    server = serve(well)
    storage = storage_for(server.url)
    found = {}

    def fetch(start):
        found[start] = storage.read_range(f"{server.url}/a.tar", start, 100)

    threads = [threading.Thread(target=fetch, args=(start,)) for start in range(0, 1000, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {start: CONTENT[start : start + 100] for start in range(0, 1000, 100)}


def test_nothing_is_connected_before_the_first_read():
    before = dict(network._managers)
    storage_for("http://no-such-host.invalid/a.tar")

    assert network._managers == before


def test_the_web_is_read_and_neither_written_nor_listed():
    storage = storage_for("https://host/a")
    for write in (lambda: storage.create("https://host/a"), lambda: storage.delete("https://host/a")):
        with pytest.raises(
            ArgumentError, match="http and https can only be read; write to a local folder or an object"
        ):
            write()
    with pytest.raises(NoListingError, match="web servers do not list their folders; give a dataset's folder with a"):
        storage.list("https://host/a")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"user": "me"}, "user is not an option of http and https: username, password, headers, connect_timeout"),
        ({"read_timeout": 0}, "read_timeout must be a positive number of seconds, got 0"),
        ({"total_timeout": "long"}, "total_timeout must be a positive number of seconds, got 'long'"),
        ({"ca_certs": 5}, "storage_options: ca_certs must be text or a path, got 5"),
        *(
            ({"headers": headers}, "storage_options: headers must be a mapping of names to texts in Latin-1, without")
            for headers in (
                5,
                ["a"],
                {5: "a"},
                {"a": None},
                {"a": "b\nc"},
                {"a": "€"},
                {"": "a"},
                {"a:": "b"},
                {"ä": "b"},
            )
        ),
    ],
)
def test_options_that_are_unknown_or_wrong_are_refused(options, problem):
    with pytest.raises(ArgumentError, match=problem):
        storage_for("https://host/a", options)


def test_answers_that_contradict_each_other_are_asked_for_again(serve):
    one, half = {"etag": '"one"'}, CONTENT[: len(CONTENT) // 2]
    server = serve(part(half, 0, 1, **one), part(CONTENT, 20, 30, **one), well, answer(200), well)
    storage = storage_for(server.url)
    storage.info(f"{server.url}/a.tar")

    assert storage.read_range(f"{server.url}/a.tar", 20, 10) == CONTENT[20:30]
    assert server.requests[2].headers["if-match"] == '"one"'
    assert storage.read_range(f"{server.url}/a.tar", 30, 10) == CONTENT[30:40]  # a page without a version is refused
    assert len(server.requests) == 5


def test_a_file_of_which_nothing_but_its_size_is_known_is_replaced_when_that_changes(serve):
    server = serve(part(CONTENT, 0, 1), part(CONTENT[:2000], 1000, 1010))
    storage = storage_for(server.url)
    storage.info(f"{server.url}/a.tar")

    with pytest.raises(ChangedFileError, match="its size is 2000, it was 256000"):
        storage.read_range(f"{server.url}/a.tar", 1000, 10)


def test_a_fresh_read_believes_what_comes_rather_than_what_came_of_the_same_version(serve):
    half = CONTENT[: len(CONTENT) // 2]
    server = serve(part(half, 0, 1, etag='"one"'), well)
    storage = storage_for(server.url)
    storage.info(f"{server.url}/a.tar")

    assert storage.read_range(f"{server.url}/a.tar", 200_000, 10, fresh=True) == CONTENT[200_000:200_010]
    assert len(server.requests) == 2
