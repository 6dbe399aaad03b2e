"""Files of web servers, over http and https: read in ranges, never written.

``storage_options`` for http and https::

    username, password   for basic authentication, unless the URL has them; neither is ever shown
    headers              a mapping, sent with each request to the host that the user named
    ca_certs             a file of the trusted certificates; by default the system's, or SSL_CERT_FILE
    connect_timeout      how long making a connection may take, in seconds
    read_timeout         how long a server may be silent before the request is retried, in seconds
    total_timeout        how long a read may take in total, in seconds, plus one second for each 100 kB received

An unknown option is an error. Proxies are those of the environment.

A ``ShardStream`` can read signed URLs directly. A dataset's folder may have a query, which is then sent for all of its
files. Web servers do not list folders: give a dataset's folder, or shards by a pattern with braces.
"""

import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit, urlunsplit

from shardkit.errors import ArgumentError, NoListingError
from shardkit.storage.base import check_options, read_only
from shardkit.storage.connections import Network
from shardkit.storage.ranges import Ranges
from shardkit.storage.responses import Refusal

_NETWORK = ("connect_timeout", "read_timeout", "total_timeout", "ca_certs")
OPTIONS = ("username", "password", "headers", *_NETWORK)
"""The ``storage_options`` for http and https."""

_HEADER_NAME = re.compile(r"[!#-'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True)
class WebSigner:
    """Adds the user's credentials and headers to requests.

    Attributes:
        username: For basic authentication, unless the URL has credentials.
        password: For basic authentication, unless the URL has credentials.
        headers: Sent with each request to the host that the user named.
        network: How the servers are reached.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    network: Network = field(default_factory=Network)
    follows = True

    def __post_init__(self) -> None:
        if not isinstance(self.headers, Mapping) or not all(_can_be_sent(*header) for header in self.headers.items()):
            raise ArgumentError(
                "storage_options: headers must be a mapping of names to texts in Latin-1, without line breaks"
            )  # no value is shown: it may be a secret

    def sign(self, url: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """See ``Signer.sign``."""
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        username, _, password = user.partition(":")
        if at:
            url = urlunsplit(parts._replace(netloc=host))
        else:
            username, password = self.username, self.password
        own = {name.lower() for name in headers}
        signed = {name: value for name, value in self.headers.items() if name.lower() not in own} | headers
        if username or password:
            pair = f"{unquote(username)}:{unquote(password)}" if at else f"{username}:{password}"
            signed["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        return url, signed

    def renew(self, url: str, refusal: Refusal) -> bool:  # noqa: ARG002 - there is nothing to renew
        """See ``Signer.renew``."""
        return False

    def advise(self, refusal: Refusal) -> str:
        """See ``Signer.advise``."""
        if refusal.status == 401:
            return "pass username and password, or other ones, by storage_options"
        return "it may be forbidden, or its address may have expired: ask for another one"


def _can_be_sent(name: object, value: object) -> bool:
    """Return whether a request can carry this header; numbers are sent as text."""
    if not isinstance(name, str) or not isinstance(value, str | int):
        return False
    return bool(_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(str(value)))


class WebStorage(Ranges):
    """Files of web servers.

    Args:
        options: ``username`` and ``password`` for basic authentication, ``headers`` to send, and the attributes of a
            ``Network``: ``connect_timeout``, ``read_timeout``, ``total_timeout`` in seconds, ``ca_certs``.

    Raises:
        ArgumentError: An option is unknown or invalid.
    """

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        given: dict[str, Any] = dict(options or {})
        check_options("http and https", given, OPTIONS)
        network = Network(**{name: given.pop(name) for name in _NETWORK if name in given})
        super().__init__(WebSigner(**given, network=network))

    def create(self, url: str, *, overwrite: bool = False) -> AbstractContextManager[BinaryIO]:  # noqa: ARG002
        """Raise ArgumentError: nothing is written over http."""
        raise read_only(url)

    def delete(self, url: str) -> None:
        """Raise ArgumentError: nothing is deleted over http."""
        raise read_only(url)

    def list(self, url: str) -> list[str]:
        """Raise NoListingError: web servers do not list their folders."""
        raise NoListingError(
            f"{url}: web servers do not list their folders; give a dataset's folder with a manifest.json, or "
            "the shards by name or by a pattern with braces",
            url=url,
        )
