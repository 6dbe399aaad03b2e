"""Ranges of remote files over unreliable networks: the right bytes of one version, or an error within a time limit.

Servers, proxies and networks cut answers, repeat them, send parts or versions that were not requested, and fall silent.
So an answer is trusted only as far as its headers describe it: its status, where it begins and ends, the size of the
whole file, its encoding, and its version. Received bytes are kept; missing ones are requested again, after random
pauses that grow. Checksums detect the faults that answers do not show.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from shardkit.errors import (
    AccessError,
    ChangedFileError,
    MissingFileError,
    StorageError,
    hide_secrets,
)
from shardkit.storage.base import FileInfo, ended
from shardkit.storage.connections import Network, begin_anew, describe_failure, send_get
from shardkit.storage.responses import (
    MISSING,
    Refusal,
    Version,
    asked_pause,
    read_extent,
    read_refusal,
    read_version,
)
from shardkit.storage.retry import Attempts

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_PIECE_BYTES = 1 << 17  # read from a connection at once
_MAX_RESERVED_BYTES = 1 << 26
_READ_OVER = 1 << 21  # bytes that are read and skipped, because a new request would take as long
_MAX_WRONG_ANSWERS = 2  # in a read, before it is abandoned
_MAX_VERSIONS = 1 << 16  # that are remembered


class Signer(Protocol):
    """Turns the URL of a file into a request: an address, and headers with credentials."""

    follows: bool
    """Whether redirects are followed automatically."""

    @property
    def network(self) -> Network:
        """How the servers are reached."""
        ...

    def sign(self, url: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return the address and the headers to send."""
        ...

    def renew(self, url: str, refusal: Refusal) -> bool:
        """Return whether a refused request can be sent in another way, for example with new credentials."""
        ...

    def advise(self, refusal: Refusal) -> str:
        """Return what to do about a refusal for lack of permission."""
        ...


class Ranges:
    """Reads ranges of files from servers, each file in one version: the reading part of a ``Storage``.

    Args:
        signer: Makes the requests.
    """

    def __init__(self, signer: Signer) -> None:
        self.signer = signer
        self._versions: dict[str, Version] = {}

    @cached_property
    def network(self) -> Network:
        """How the servers are reached; determined at the first read, because it may need a session."""
        return self.signer.network

    def info(self, url: str) -> FileInfo:
        """Ask for the current version; later reads are of this version. See ``Storage.info``."""
        self.forget(url)
        RangeStream(self, url, 0, 1).close()
        version = self._versions.get(url, Version(None))
        if version.size is None:
            raise StorageError(
                f"{url}: the server does not say how large it is; serve it by one that knows Range or Content-Length",
                url=url,
            )
        return FileInfo(hide_secrets(url), version.size, version.etag or version.modified)

    def read_range(self, url: str, start: int, size: int, *, fresh: bool = False) -> bytes:
        """See ``Storage.read_range``."""
        if not size:
            return b""
        attempts = Attempts(url, self.network.total_timeout)
        with closing(RangeStream(self, url, start, start + size, attempts=attempts, fresh=fresh)) as stream:
            data = stream.read(size, attempts)
        if len(data) < size:
            raise ended(url, start, len(data), size)
        return data

    def read_into(self, url: str, start: int, out: memoryview, *, fresh: bool = False) -> None:
        """See ``Storage.read_into``."""
        if not len(out):
            return
        attempts = Attempts(url, self.network.total_timeout)
        with closing(RangeStream(self, url, start, start + len(out), attempts=attempts, fresh=fresh)) as stream:
            done = stream.read_into(out, attempts)
        if done < len(out):
            raise ended(url, start, done, len(out))

    def open(self, url: str, start: int = 0, *, fresh: bool = False) -> "RangeStream":
        """See ``Storage.open``."""
        return RangeStream(self, url, start, fresh=fresh)

    def forget(self, url: str) -> None:
        """Forget the version, so that the next read accepts the version that is current then."""
        self._versions.pop(url, None)

    def version(self, url: str) -> Version | None:
        """Return the version that is being read; None if any version is accepted."""
        return self._versions.get(url)

    def check_version(self, url: str, version: Version, *, fresh: bool = False) -> str:
        """Compare an answer's version with the version that is being read, or adopt it if none is known.

        Args:
            url: The file.
            version: The version that an answer states.
            fresh: Earlier data was wrong, so this answer is trusted if the two contradict each other.

        Returns:
            The contradiction, which means that one of the answers is wrong; empty if there is none.

        Raises:
            ChangedFileError: The file has another version.
        """
        known = self._versions.setdefault(url, version)
        if len(self._versions) > _MAX_VERSIONS:
            self._versions.pop(next(iter(self._versions)), None)
        difference = known.differs(version)
        if not difference:
            if known.size is None and version.size is not None:
                self._versions[url] = replace(known, size=version.size)
            return ""
        if not known.contradicts(version):
            raise changed(url, difference)
        self._versions[url] = version if fresh else known.settle(version)
        return "" if fresh else f"the server's answers contradict each other: {difference}"


class RangeStream:
    """A remote file, read forward; see ``ByteStream``. After a broken connection, reading resumes at the same byte.

    Args:
        ranges: Reads the file.
        url: The file.
        start: Where to begin.
        stop: Where to end, if before the file's end.
        attempts: Limits the number and the time of the tries of the first request; ``read`` takes its own.
        fresh: Fetch it over a new connection, bypassing caches.
    """

    def __init__(
        self,
        ranges: Ranges,
        url: str,
        start: int,
        stop: int | None = None,
        *,
        attempts: Attempts | None = None,
        fresh: bool = False,
    ) -> None:
        self.url = url
        self.size: int | None = None
        self._ranges = ranges
        self._position = start
        self._stop = stop
        self._fresh = fresh
        self._end: int | None = None  # of the readable bytes, once it is known
        self._response: BaseHTTPResponse | None = None
        self._address = url  # of the latest request
        self._at = 0  # the position of the response's next byte
        self._read_over = _READ_OVER
        self._pid = os.getpid()
        self._retry(attempts or self._new_attempts(), self._connect)

    @property
    def _doing(self) -> str:
        return f"cannot be read from byte {self._position:,} on"

    def _new_attempts(self) -> Attempts:
        return Attempts(self.url, self._ranges.network.total_timeout)

    def read(self, n: int, /, attempts: Attempts | None = None) -> bytes:
        """See ``ByteStream.read``."""
        attempts = attempts or self._new_attempts()
        first = self._retry(attempts, self._read_piece, n) if n > 0 else b""
        if len(first) in (0, n):
            return first
        # Small pieces are read into memory that is allocated once: this is three times as fast as joining them.
        data = io.BytesIO()
        if n <= _MAX_RESERVED_BYTES:
            data.seek(n - 1)
            data.write(b"\0")
            data.seek(0)
        data.write(first)
        while (missing := n - data.tell()) and (piece := self._retry(attempts, self._read_piece, missing)):
            data.write(piece)
        data.truncate()
        return data.getvalue()

    def read_into(self, out: memoryview, attempts: Attempts) -> int:
        """Fill ``out`` as far as there are bytes; return their number."""
        done = 0
        while done < len(out) and (piece := self._retry(attempts, self._read_piece, len(out) - done)):
            out[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def skip(self, n: int, /) -> None:
        """See ``ByteStream.skip``."""
        self._position += max(0, n)

    def close(self) -> None:
        """See ``ByteStream.close``."""
        self._drop()

    def _retry(self, attempts: Attempts, step: Callable[..., bytes], *args: int) -> bytes:
        """Repeat a step until it succeeds; after each failure, use another connection."""
        from urllib3.exceptions import HTTPError

        while True:
            try:
                return step(attempts, *args)
            except HTTPError as error:
                self._drop()
                begin_anew(self._address, self._ranges.network)
                problem, can_be_retried = describe_failure(error)
                attempts.fail(self._doing, problem, is_final=not can_be_retried)
            except BaseException:
                self._drop()
                raise

    def _read_piece(self, attempts: Attempts, n: int) -> bytes:
        """Return some of the next ``n`` bytes, or none at the end."""
        while True:
            if self._end is not None:
                n = min(n, self._end - self._position)
                if n <= 0:
                    return b""
            self._connect(attempts)
            response, skipped = self._response, self._position - self._at
            if response is None:
                return b""
            piece = response.read1(min(skipped or n, _PIECE_BYTES))
            attempts.check_time(self._doing)
            if not piece:
                self._drop()
                if self._end is None and not skipped:
                    self._end = self._position  # no header stated the length
                    return b""
                attempts.fail(self._doing, "the answer ended too early")
                continue
            self._at += len(piece)
            attempts.receive(len(piece), is_wanted=not skipped)
            if not skipped:
                self._position += len(piece)
                return piece

    def _drop(self) -> None:
        """Release the answer, and close its connection if the answer was not read to its end."""
        response, self._response = self._response, None
        if response is not None:
            response.close()

    def _connect(self, attempts: Attempts) -> bytes:
        """Ensure that there is an answer for the position, unless the file ends before it."""
        ahead = self._position - self._at
        if self._response is not None and self._pid == os.getpid() and 0 <= ahead <= self._read_over:
            return b""
        self._drop()
        self._pid = os.getpid()
        while True:
            attempts.check_time(self._doing)
            response = self._send(attempts)
            if response.status in (200, 206):
                problem = self._accept(response)
            else:
                refusal = read_refusal(response, attempts, self._doing)
                problem = self._end_before(refusal) if refusal.status == 416 else self._handle(refusal, attempts)
            if problem is None:
                return b""
            if problem:
                self._drop()
                attempts.wrong_answers += 1
                if attempts.wrong_answers > _MAX_WRONG_ANSWERS:
                    raise self._wrong(problem)
                attempts.fail(self._doing, problem)

    def _send(self, attempts: Attempts) -> "BaseHTTPResponse":
        last = "" if self._stop is None else self._stop - 1
        headers = {
            "Range": f"bytes={self._position}-{last}",
            "Accept-Encoding": "identity",
            "User-Agent": "shardkit",
        }
        if self._fresh:
            headers["Cache-Control"] = "no-cache"
        known = self._ranges.version(self.url)
        if known is not None:
            headers |= known.condition
        signer = self._ranges.signer
        self._address, headers = signer.sign(self.url, headers)
        return send_get(
            self._address,
            headers,
            self._ranges.network,
            seconds=max(0.001, attempts.seconds_left),
            follow=signer.follows,
            fresh=self._fresh,
        )

    def _accept(self, response: "BaseHTTPResponse") -> str | None:
        """Adopt the range and version of an answer; return the problem if they are not the requested ones."""
        self._response = response
        try:
            self._at, stop, size = read_extent(response, self._position)
        except ValueError as error:
            return str(error)
        version = read_version(response, size)
        if problem := self._ranges.check_version(self.url, version, fresh=self._fresh):
            return problem
        known = self._ranges.version(self.url) or version
        self.size = known.size if size is None else size
        self._read_over = _READ_OVER if response.status == 206 else sys.maxsize
        end = stop if self.size is None else self.size
        self._end = end if end is None or self._stop is None else min(end, self._stop)
        if stop is not None and self._end is not None and stop > self._end:
            return f"bytes {self._at:,} to {stop:,} arrived, more than exist or were requested"
        return None

    def _wrong(self, problem: str) -> StorageError:
        return StorageError(
            f"{self.url}: at byte {self._position:,} the server's answers are not what was asked for: {problem}; "
            "none of them was used. Look for a proxy or a server that changes what it passes on",
            url=self.url,
            offset=self._position,
        )

    def _end_before(self, refusal: Refusal) -> str | None:
        """Record that the file has no byte at the position; return the problem if that is impossible."""
        size = 0 if refusal.size is None and self._position == 0 else refusal.size
        if size is not None:
            if size > self._position:
                return f"{refusal}, though the file has {size:,} bytes"
            known = self._ranges.version(self.url) or Version(None)  # the requested version
            version = Version(size, refusal.headers.get("etag", known.etag), known.modified)
            if problem := self._ranges.check_version(self.url, version, fresh=self._fresh):
                return problem
        self.size = size
        self._end = self._position
        return None

    def _handle(self, refusal: Refusal, attempts: Attempts) -> str:
        """Wait until another try makes sense, or raise."""
        url, status = self.url, refusal.status
        if refusal.may_pass:
            attempts.fail(self._doing, str(refusal), pause=asked_pause(refusal.headers.get("retry-after")))
            return ""
        if attempts.renewals < 2 and self._ranges.signer.renew(url, refusal):
            attempts.renewals += 1
            return ""
        if status in MISSING:
            raise MissingFileError(f"{url}: does not exist ({refusal}); correct the URL", url=url)
        if refusal.is_forbidden:
            raise AccessError(f"{url}: access is refused: {refusal}; {self._ranges.signer.advise(refusal)}", url=url)
        if status == 412:
            raise changed(url, "the server has another version")
        raise StorageError(f"{url}: cannot be read: {refusal}; correct the URL, or repair the server", url=url)


def changed(url: str, difference: str) -> ChangedFileError:
    """Return the error for a file that was replaced."""
    return ChangedFileError(
        f"{url}: was replaced while it was in use: {difference}; open what it belongs to again to read the new one",
        url=url,
    )
