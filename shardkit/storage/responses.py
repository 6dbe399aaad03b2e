"""What a web server's answer says about itself: which part and version of a file it contains, or why it has none."""

import email.utils
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardkit.errors import hide_secrets
from shardkit.storage.retry import Attempts

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
"""S3's codes for credentials that have expired."""

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
MISSING = frozenset({404, 410})
FORBIDDEN = frozenset({401, 403, 407})
"""The statuses of answers that mean: try again later; there is no such file; access is refused."""

# S3's codes for failures after which another try may succeed, whatever the status.
_AGAIN_CODES = frozenset(
    {
        *["RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling"],
        *["BadDigest", "XAmzContentSHA256Mismatch"],  # the sent data arrived damaged
    }
)
_LONGEST_RETRY_AFTER = 1 << 31  # seconds, which a float can represent
_MAX_ERROR_BYTES = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)\Z")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")
_TEXT = re.compile(rb"<Message>([^<]{1,300})</Message>")
_ACTUAL_SIZE = re.compile(rb"<ActualObjectSize>(\d{1,18})</ActualObjectSize>")


@dataclass(frozen=True, slots=True)
class Version:
    """What distinguishes versions of a file; parts that the server does not state are empty."""

    size: int | None
    etag: str = ""
    modified: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the server states more than its size."""
        return bool(self.etag or self.modified)

    @property
    def condition(self) -> dict[str, str]:
        """The header that requests only this version; none for a weak ETag, which does not allow this."""
        return {"If-Match": self.etag} if self.etag.startswith('"') else {}

    def contradicts(self, other: "Version") -> bool:
        """Return whether only the sizes of the versions differ, which means that a server or proxy is wrong."""
        if not self.is_named or not other.is_named:
            return self.is_named or other.is_named  # one has no version: it may be a proxy's error page
        return self.etag == other.etag if self.etag or other.etag else self.modified == other.modified

    def settle(self, other: "Version") -> "Version":
        """Return what can still be trusted in two contradictory versions."""
        if self.is_named and other.is_named:
            return replace(self, size=None)
        return self if self.is_named else other

    def differs(self, other: "Version") -> str:
        """Return a known difference between the versions; empty if they may be the same."""
        pairs = [("size", self.size, other.size), ("ETag", self.etag, other.etag)]
        if not (self.etag and other.etag):
            pairs.append(("Last-Modified", self.modified, other.modified))
        for name, mine, others in pairs:
            if mine not in (None, "") and others not in (None, "") and mine != others:
                return f"its {name} is {others}, it was {mine}"
        return ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that refuses a request.

    Attributes:
        status: Its HTTP status.
        code: S3's code for the error; empty if the server does not speak S3.
        text: S3's message.
        headers: Its headers.
        size: The file's size, if the answer states it.
    """

    status: int
    code: str
    text: str
    headers: dict[str, str]
    size: int | None

    @property
    def may_pass(self) -> bool:
        """Whether another try may succeed soon."""
        return self.status in AGAIN or self.code in _AGAIN_CODES

    @property
    def is_forbidden(self) -> bool:
        """Whether the request lacks permission, or its credentials have expired."""
        return self.status in FORBIDDEN or self.code in EXPIRED

    @property
    def said(self) -> str:
        """S3's code and message, without secrets; empty if the server does not speak S3."""
        return hide_secrets(f"{self.code}: {self.text}" if self.text else self.code)

    def __str__(self) -> str:
        return f"the server answers {self.status}" + (f" ({self.said})" if self.said else "")


def read_extent(response: "BaseHTTPResponse", position: int) -> tuple[int, int | None, int | None]:
    """Return where an answer begins, where it ends and the size of the file; the last two are None if unknown.

    Args:
        response: The answer, with status 200 or 206.
        position: The first requested byte of the file.

    Raises:
        ValueError: It contains something else. The message says why.
    """
    headers = response.headers
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ValueError(f"it is encoded as {encoding}, which was not asked for; store it without that encoding")
    length = _number(headers.get("Content-Length"))
    if response.status == 200:  # the server does not support ranges: it sends the file from its beginning
        return 0, None, length
    said = headers.get("Content-Range", "").strip()
    match = _CONTENT_RANGE.match(said)
    first, stop = (int(match[1]), int(match[2]) + 1) if match and match[1] else (-1, -1)
    size = _number(match[3]) if match else None
    is_possible = first == position and first < stop and (size is None or stop <= size)
    if not is_possible or (length is not None and length != stop - first):
        has = "" if length is None else f" and {length:,} bytes"
        raise ValueError(f"it has the Content-Range {said!r}{has}")
    return first, stop, size


def read_version(response: "BaseHTTPResponse", size: int | None) -> Version:
    """Return the version that an answer contains."""
    headers = response.headers
    return Version(size, headers.get("ETag", "").strip(), headers.get("Last-Modified", "").strip())


def read_refusal(response: "BaseHTTPResponse", attempts: Attempts, doing: str) -> Refusal:
    """Read and close an answer that does not contain the file.

    Raises:
        StorageError: It does not arrive within the time limit.
        urllib3.exceptions.HTTPError: The connection broke.
    """
    body = b""
    while len(body) < _MAX_ERROR_BYTES and (piece := response.read1(_MAX_ERROR_BYTES)):
        body += piece
        attempts.check_time(doing)
    response.close()
    headers = {name.lower(): value for name, value in response.headers.items()}
    code, text, actual = _CODE.search(body), _TEXT.search(body), _ACTUAL_SIZE.search(body)
    said = _CONTENT_RANGE.match(headers.get("content-range", ""))
    return Refusal(
        response.status,
        code[1].decode() if code else "",
        " ".join(text[1].decode(errors="replace").split()) if text else "",
        headers,
        int(actual[1]) if actual else _number(said[3]) if said else None,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def asked_pause(text: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for; None if there is none, or if it cannot be parsed."""
    if text is None:
        return None
    seconds = _number(text.strip())
    if seconds is not None:
        return float(min(seconds, _LONGEST_RETRY_AFTER))
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        return None
