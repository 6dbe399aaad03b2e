"""The ceiling: reading a socket without examining the bytes."""

import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from loading.job import Batch, Job, Passes

from remote.pieces import PIECE, passes_over_blocks


class Connection:
    """A connection to the server of a URL, over which the URL can be requested repeatedly.

    Args:
        url: The URL to request.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode()

    def ask(self, extra: bytes = b"") -> bytes:
        """Send a request, and return the part of the body that came with the response's header."""
        self._socket.sendall(self._head + extra + b"\r\n")
        came = bytearray()
        while b"\r\n\r\n" not in came:
            part = self._socket.recv(4096)
            if not part:
                raise ConnectionError(came.decode(errors="replace"))
            came += part
        head, _, body = came.partition(b"\r\n\r\n")
        if bytes(head.split()[1]) not in (b"200", b"206"):
            raise ConnectionError(head.decode())
        return bytes(body)

    def fill(self, out: memoryview, body: bytes = b"") -> None:
        """Fill ``out`` with the bytes received so far, and then from the socket."""
        out[: len(body)] = body
        done = len(body)
        while done < len(out):
            count = self._socket.recv_into(out[done:])
            if not count:
                raise ConnectionError(f"it ended {len(out) - done} bytes early")
            done += count

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def open_passes(job: Job) -> Passes:
    """Return a function that reads the file once: forward, or, with the option ``block``, in blocks."""
    url, size = job.options["url"], job.options["size"]
    if "block" not in job.options:
        connection = Connection(url)

        def forward() -> Iterator[Batch]:
            body = connection.ask()
            piece = memoryview(bytearray(PIECE))  # one buffer for all pieces; a caller that keeps a piece copies it
            for _ in range(0, size, PIECE):
                connection.fill(piece, body)
                body = b""
                yield [piece], None

        return forward
    mine = threading.local()

    def read(start: int, count: int) -> Any:
        if not hasattr(mine, "connection"):
            mine.connection = Connection(url)
            mine.out = memoryview(bytearray(count))
        body = mine.connection.ask(f"Range: bytes={start}-{start + count - 1}\r\n".encode())
        out = mine.out if job.workers == 1 else memoryview(bytearray(count))
        mine.connection.fill(out, body)
        return out

    return passes_over_blocks(job, read)
