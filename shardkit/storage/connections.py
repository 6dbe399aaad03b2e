"""Requests to web servers: over connections that each process keeps for itself, through proxies, following redirects.

No connection is made before the first request, and a forked or spawned process begins without connections.
"""

import contextlib
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from shardkit.errors import ArgumentError, StorageError, check_path, hide_secrets

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager, Timeout
    from urllib3.util import Url

CONNECT_TIMEOUT, READ_TIMEOUT, TOTAL_TIMEOUT = 10.0, 30.0, 300.0
"""How long to wait for servers, in seconds, unless storage_options say otherwise."""

_KEPT_CONNECTIONS = 256  # to one server; more are opened when needed, and closed after use
# An answer is late after _PATIENCE seconds, which is checked every _LOOK_SECONDS. A server that is working hardly ever
# takes longer, even on the other side of the world, and no training job has waited long by then.
_PATIENCE, _LOOK_SECONDS = 1.0, 0.25
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
# The headers that may be sent to a host that the user did not name.
_HARMLESS = frozenset({"accept-encoding", "cache-control", "if-match", "range", "user-agent"})
_SIGNATURE = re.compile(r"\?\S*")


@dataclass(frozen=True, slots=True)
class Network:
    """How servers are reached.

    Attributes:
        connect_timeout: How long making a connection may take, in seconds.
        read_timeout: How long a server may be silent, in seconds.
        total_timeout: How long a read may take in total, in seconds, plus one second for each 100 kB received.
        ca_certs: A file of the trusted certificates; if empty, the system's, or ``SSL_CERT_FILE``.
    """

    connect_timeout: float = CONNECT_TIMEOUT
    read_timeout: float = READ_TIMEOUT
    total_timeout: float = TOTAL_TIMEOUT
    ca_certs: str = ""

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "read_timeout", "total_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ArgumentError(f"storage_options: {name} must be a positive number of seconds, got {value!r}")
        if self.ca_certs:
            object.__setattr__(self, "ca_certs", check_path("storage_options: ca_certs", self.ca_certs))


# By server and certificates. A fork inherits none, because two processes would read from one connection.
_managers: "dict[tuple[str, str], PoolManager]" = {}
os.register_at_fork(after_in_child=_managers.clear)


class _Waiting:
    """Requests that wait for an answer, in all threads; while one is late, its server's connections are not kept.

    A server that serves few connections at a time waits for the next request on each of them, which may never come,
    while other connections wait for the server. When connections with complete answers are closed, the server serves
    the others; a new handshake costs little.

    A dedicated thread watches the requests, because all other threads may be waiting. A single-threaded program gets no
    such thread, because it may want to fork. It hardly needs one: it uses an idle connection rather than a second one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without requests and without a thread, as a forked child does."""
        self._lock = threading.Lock()
        # For each request: the time it began to wait, its server, and its proxy.
        self._requests: dict[object, tuple[float, tuple[str, str], Url | None]] = {}
        self._is_watched = False

    @contextlib.contextmanager
    def add(self, server: tuple[str, str], proxy: "Url | None") -> Iterator[None]:
        """Count a request as waiting until the context ends."""
        request = object()
        try:
            with self._lock:
                self._requests[request] = time.monotonic(), server, proxy
                if not self._is_watched and threading.active_count() > 1:
                    with contextlib.suppress(RuntimeError):  # no thread can be started: do without it
                        threading.Thread(target=self._watch, name="shardkit-network", daemon=True).start()
                        self._is_watched = True
            yield
        finally:
            with self._lock:
                self._requests.pop(request, None)

    def _watch(self) -> None:
        """Watch the requests until there are none."""
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if not self._requests:
                    self._is_watched = False
                    return
                requests = list(self._requests.values())
            limit = time.monotonic() - _PATIENCE
            late = [(server, proxy) for since, server, proxy in requests if since < limit]
            servers, proxies = {server for server, _ in late}, {proxy for _, proxy in late if proxy}
            for server, manager in list(_managers.items()):
                if server in servers or manager.proxy in proxies:
                    _close_idle(server)


_waiting = _Waiting()
os.register_at_fork(after_in_child=_waiting.forget)


class _HideQueries(logging.Filter):
    """Keeps signatures out of urllib3's logs of its requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_SIGNATURE.sub("?...", a) if isinstance(a, str) else a for a in record.args)
        return True


logging.getLogger("urllib3.connectionpool").addFilter(_HideQueries())


def send_get(
    url: str,
    headers: Mapping[str, str],
    network: Network,
    *,
    seconds: float,
    follow: bool = True,
    fresh: bool = False,
) -> "BaseHTTPResponse":
    """Send a GET request, follow redirects, and return the answer, whose body has not been read.

    Credentials, and all other headers that are not harmless, are sent only to the host that the URL names.

    Args:
        url: The URL to request.
        headers: The headers to send.
        network: How the server is reached.
        seconds: How long the server may be silent, unless ``network`` allows less.
        follow: Follow redirects.
        fresh: Make a new connection.

    Raises:
        StorageError: It is redirected too often, or to something other than a web address.
        urllib3.exceptions.HTTPError: The server was not reached, or did not answer.
    """
    from urllib3 import Timeout

    timeout = Timeout(connect=min(network.connect_timeout, seconds), read=min(network.read_timeout, seconds))
    target = url
    for _ in range(_MAX_REDIRECTS + 1):
        response = _ask(target, headers, network.ca_certs, timeout, fresh=fresh)
        location = response.headers.get("Location")
        if not follow or response.status not in _REDIRECTS or not location:
            return response
        response.close()
        here, target = target, urljoin(target, location)
        if urlsplit(target).scheme not in ("http", "https"):
            raise StorageError(f"{url}: is redirected to {target}, which is no web address; correct the URL", url=url)
        if _origin(here) != _origin(target):
            headers = {name: value for name, value in headers.items() if name.lower() in _HARMLESS}
    message = f"{url}: is redirected more than {_MAX_REDIRECTS} times, at last to {target}; correct the URL"
    raise StorageError(message, url=url)


def _ask(url: str, headers: Mapping[str, str], ca_certs: str, timeout: "Timeout", *, fresh: bool) -> "BaseHTTPResponse":
    from urllib3.exceptions import ClosedPoolError

    while True:
        manager = _manager(url, ca_certs, fresh=fresh)
        try:
            with _waiting.add((_origin(url), ca_certs), manager.proxy):
                return manager.urlopen(
                    "GET",
                    url,
                    headers=dict(headers),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                    timeout=timeout,
                )
        except ClosedPoolError:
            continue  # another thread has just closed it, and nothing was sent


def begin_anew(url: str, network: Network) -> None:
    """Make further requests to a server use new connections, and close the idle ones.

    Existing connections may be broken too, and a server that serves few connections at a time may wait for an idle one.
    """
    _close_idle((_origin(url), network.ca_certs))


def _close_idle(server: tuple[str, str]) -> None:
    """Close connections to a server: the idle ones now, and the others as soon as their answers have been read."""
    manager = _managers.pop(server, None)
    if manager is not None:
        manager.clear()


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


def _manager(url: str, ca_certs: str, *, fresh: bool) -> "PoolManager":
    if fresh:
        return _make_manager(url, ca_certs)
    key = _origin(url), ca_certs
    manager = _managers.get(key)
    if manager is None:
        manager = _managers.setdefault(key, _make_manager(url, ca_certs))
    return manager


def _make_manager(url: str, ca_certs: str) -> "PoolManager":
    from urllib.request import getproxies_environment, proxy_bypass

    import urllib3

    parts = urlsplit(url)
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.netloc.rpartition("@")[2], proxies):
        proxy = proxy if "://" in proxy else f"http://{proxy}"
        user = urlsplit(proxy).netloc.rpartition("@")[0]
        headers = urllib3.make_headers(proxy_basic_auth=user) if user else None
        try:
            manager: PoolManager = urllib3.ProxyManager(
                proxy, proxy_headers=headers, maxsize=_KEPT_CONNECTIONS, ca_certs=ca_certs or None
            )
        except urllib3.exceptions.HTTPError as error:
            message = f"the proxy {hide_secrets(proxy)} cannot be used ({error}); correct the environment"
            raise ArgumentError(message) from None
    else:
        manager = urllib3.PoolManager(maxsize=_KEPT_CONNECTIONS, ca_certs=ca_certs or None)
    manager.pools.dispose_func = urllib3.HTTPConnectionPool.close  # by default it waits until nothing uses the pool
    return manager


def describe_failure(error: Exception) -> tuple[str, bool]:
    """Return what went wrong with a request, without secrets, and whether another try may succeed."""
    import socket

    from urllib3 import exceptions

    cause = next((part for part in error.args if isinstance(part, BaseException)), error.__cause__)
    if isinstance(error, exceptions.NameResolutionError):
        unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
        return f"the name of its host is not known ({_brief(cause or error)})", not unknown
    if isinstance(error, exceptions.ProxyError):
        return f"the proxy was not reached ({_brief(cause or error)})", True
    if isinstance(error, exceptions.NewConnectionError):
        return f"no connection was made ({_brief(cause or error)})", True
    if isinstance(error, exceptions.ConnectTimeoutError):
        return "no connection was made in time", True
    if isinstance(error, exceptions.TimeoutError):
        return "the server was silent for too long", True
    if isinstance(error, exceptions.SSLError):
        refused = isinstance(cause, ssl.SSLCertVerificationError)
        return f"the connection is not secure ({_brief(cause or error)})", not refused
    if isinstance(error, exceptions.ProtocolError):
        return f"the connection broke ({_brief(cause or error)})", True
    return f"it cannot be requested ({_brief(error)})", False


def _brief(error: BaseException) -> str:
    """Return an error's message, without the addresses of objects and without secrets."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else ""
    return hide_secrets(text or type(error).__name__)
