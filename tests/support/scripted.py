"""A web server that sends a test's own bytes, for responses that no real server gives."""

import contextlib
import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A client's request: the first line, its parts, and the headers by their names in lower case."""

    target: str
    headers: dict


def answer(status, body=b"", **headers):
    """Return the bytes of a response. A header is passed as ``content_range=``; a missing Content-Length is added."""
    named = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    if "content-length" not in named and "transfer-encoding" not in named and "content_length" not in headers:
        named["content-length"] = len(body)
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def part(content, start, stop, **headers):
    """Return a response with a part of some content."""
    return answer(206, content[start:stop], content_range=f"bytes {start}-{stop - 1}/{len(content)}", **headers)


class Scripted:
    """Sends its responses in order, each on a connection of its own unless that is kept; the last one is repeated.

    A response is bytes or a function of the request. ``None`` closes the connection without a response.
    ``one_at_a_time`` makes connections wait until the previous one is closed. With ``tls``, a context, it serves https.
    """

    def __init__(self, *answers, keeps=False, one_at_a_time=False, tls=None):
        self.answers = list(answers)
        self.requests = []
        self.connections = 0
        self._keeps = keeps
        self._one_at_a_time = one_at_a_time
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """Refuse connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            server = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            server.start()
            if self._one_at_a_time:
                server.join()

    def _serve(self, connection):
        with contextlib.suppress(ConnectionError), connection, connection.makefile("rb") as file:
            while first := file.readline():
                lines = iter(file.readline, b"\r\n")
                named = (line.decode().partition(":") for line in lines)
                headers = {name.lower(): value.strip() for name, _, value in named}
                request = Request(first.split()[1].decode(), headers)
                self.requests.append(request)
                said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                said = said(request) if callable(said) else said
                if said is None:
                    return
                if self._keeps:
                    connection.sendall(said)
                else:
                    connection.sendall(said.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
                    return
