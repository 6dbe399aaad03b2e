"""HTTP as the proxy handles it: a request, the server's response, and changes to the bodies on the way."""

import asyncio
import contextlib
import re
import socket
import struct
from http import HTTPStatus

BLOCK = 1 << 18
CODES = {  # S3's code for a status, unless a rule sets one
    301: "PermanentRedirect",
    307: "TemporaryRedirect",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


class Broken(Exception):  # noqa: N818 - it is what was asked for
    """Raised to end a client's connection here, cleanly or by a reset."""

    def __init__(self, *, reset=False):
        super().__init__()
        self.reset = reset


class Headers(list):
    """Pairs of a name and a value, in the order and spelling in which they came."""

    def get(self, name):
        """Return the value of a header, empty if there is none."""
        return next((value for key, value in self if key.lower() == name.lower()), "")

    def set(self, name, value):
        """Replace or add a header; None removes it."""
        self[:] = [(key, other) for key, other in self if key.lower() != name.lower()]
        if value is not None:
            self.append((name, str(value)))


async def read_head(reader):
    """Return the first line of a message, and its headers."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    return first, Headers(tuple(part.strip() for part in line.split(":", 1)) for line in lines)


def head_bytes(first, headers):
    """Return the bytes of a head."""
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def framing_of(headers, otherwise):
    """Return how the end of a body is marked: by "chunked", "length", or otherwise."""
    if "chunked" in headers.get("Transfer-Encoding").lower():
        return "chunked"
    return "length" if headers.get("Content-Length") else otherwise


async def read_body(reader, framing, length):
    """Yield the data of a body."""
    if framing == "closed":
        while data := await reader.read(BLOCK):
            yield data
    elif framing == "length":
        async for data in read_exactly(reader, int(length)):
            yield data
    elif framing == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            async for data in read_exactly(reader, size):
                yield data
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers


async def read_exactly(reader, size):
    """Yield ``size`` bytes as they arrive."""
    while size:
        data = await reader.read(min(size, BLOCK))
        if not data:
            raise Broken
        size -= len(data)
        yield data


def framed(data, framing):
    """Return data in the framing of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if framing == "chunked" else data


async def interrupted(body, position, action):
    """Yield a body; call a function, which may raise, before its byte at a position, or at its end."""
    async for data in body:
        if position is not None and position < len(data):
            yield data[:position]
            await action()
            yield data[position:]
            position = None
        else:
            yield data
            position = None if position is None else position - len(data)
    if position is not None:
        await action()


async def trickled(body, position, rate):
    """Yield a body, limited to this many bytes per second from a position on."""
    async for data in body:
        yield data[: max(0, position)]
        for byte in data[max(0, position) :]:
            await asyncio.sleep(1 / rate)
            yield bytes([byte])
        position -= len(data)


async def flipped(body, position):
    """Yield a body with one bit flipped in the byte at a position."""
    async for data in body:
        changed = bytearray(data)
        if 0 <= position < len(data):
            changed[position] ^= 1
        position -= len(data)
        yield bytes(changed)


async def translated(body, table):
    """Yield a body with every byte replaced."""
    async for data in body:
        yield data.translate(table)


async def only(*parts):
    """Yield parts as a body."""
    for data in parts:
        yield data


async def join(body):
    """Return all the data of a body."""
    return b"".join([data async for data in body])


def end(writer, *, reset):
    """End a connection: written data is sent first, unless the connection is reset."""
    if reset:
        with contextlib.suppress(OSError):
            option = struct.pack("ii", 1, 0)
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        writer.transport.abort()
    else:
        writer.close()


def middle(headers):
    """Return the position of the middle of a body."""
    return int(headers.get("Content-Length") or 0) // 2


class Answer:
    """A response: its head, and its body as it arrives from the server."""

    def __init__(self, status, reason, headers, body, framing):
        self.status = status
        self.reason = reason
        self.headers = headers
        self.body = body
        self.framing = framing  # "none" for a response without a body

    def position(self, after):
        """Return a position in the body: the middle if none is given."""
        return middle(self.headers) if after is None else after

    def reframe(self, framing):
        """Mark the end of the body in another way."""
        if self.framing != "none":
            self.framing = framing
            self.headers.set("Content-Length", None)
            self.headers.set("Transfer-Encoding", "chunked" if framing == "chunked" else None)
            self.headers.set("Connection", "close" if framing == "closed" else None)

    def resize(self, size, *, is_all):
        """Declare another size of the body, and with ``is_all`` that the whole object ends there."""
        self.headers.set("Content-Length", size)
        if match := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", self.headers.get("Content-Range")):
            stop = int(match[1]) + size
            self.headers.set("Content-Range", f"bytes {match[1]}-{stop - 1}/{stop if is_all else match[2]}")


class Exchange:
    """A request and its processing."""

    def __init__(self, connection, first, headers):
        self.connection = connection
        self.listener = connection.listener
        self.first = first
        self.method, self.target, version = first.split(" ")
        self.headers = headers
        self.framing = framing_of(headers, "none")
        self.body = read_body(connection.reader, self.framing, headers.get("Content-Length"))
        self.sending = None
        self.upstream = None
        self.last = version == "HTTP/1.0" or headers.get("Connection").lower() == "close"
        self.entry = {
            "method": self.method,
            "path": self.target,
            "range": headers.get("Range"),
            "headers": {name.lower(): value for name, value in headers},
            "status": None,
            "sent": 0,
            "received": 0,
            "fault": "",
            "connection": connection.number,
        }

    async def ask(self):
        """Forward the request; return the response."""
        reader, self.upstream = await asyncio.open_connection(*self.listener.server, limit=1 << 20)
        self.upstream.write(head_bytes(self.first, self.headers))
        self.sending = asyncio.create_task(self.send_body())
        reading = asyncio.create_task(self.read_answer(reader))
        # A server may respond before it has read everything. If the client aborts its request, the server must notice.
        await asyncio.wait([self.sending, reading], return_when=asyncio.FIRST_COMPLETED)
        try:
            if self.sending.done():
                self.sending.result()
            return await reading
        finally:
            reading.cancel()

    async def send_body(self):
        """Forward the body; if the server accepts no more, drop the rest."""
        self.connection.begin()
        async for data in self.body:
            self.entry["received"] += len(data)
            await self.connection.pace(len(data))
            with contextlib.suppress(ConnectionError):
                if self.upstream:
                    self.upstream.write(framed(data, self.framing))
                    await self.upstream.drain()
        if self.upstream and self.framing == "chunked":
            self.upstream.write(framed(b"", "chunked"))

    async def read_answer(self, reader):
        """Return the server's response; "100 Continue" goes to the client at once."""
        while True:
            first, headers = await read_head(reader)
            status = int(first.split(" ")[1])
            if status >= 200:
                break
            self.connection.writer.write(head_bytes(first, headers))
        self.last |= first.startswith("HTTP/1.0") or headers.get("Connection").lower() == "close"
        bodiless = self.method == "HEAD" or status in {204, 304}
        framing = "none" if bodiless else framing_of(headers, "closed")
        body = read_body(reader, framing, headers.get("Content-Length"))
        return Answer(status, first.split(" ", 2)[2], headers, body, framing)

    async def answer(self, answer):
        """Send a response to the client."""
        if self.is_waiting_to_send():
            answer.headers.set("Connection", "close")
        self.last |= answer.framing == "closed" or answer.headers.get("Connection") == "close"
        self.entry["status"] = answer.status
        self.connection.begin()
        await self.connection.send(head_bytes(f"HTTP/1.1 {answer.status} {answer.reason}", answer.headers))
        async for block in answer.body:
            for begin in range(0, len(block), self.connection.step):
                data = block[begin : begin + self.connection.step]
                await self.connection.pace(len(data))
                self.entry["sent"] += len(data)
                await self.connection.send(framed(data, answer.framing))
        if answer.framing == "chunked":
            await self.connection.send(framed(b"", "chunked"))

    async def say(self, status, headers, content=None, code=None):
        """Respond with a status and S3's error, or other content, after reading the client's body."""
        await self.drop_body()
        code = code or CODES.get(status, HTTPStatus(status).phrase.replace(" ", ""))
        content = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>" if content is None else content
        headers = Headers([("Content-Type", "application/xml"), ("Content-Length", len(content)), *headers.items()])
        body, framing = (only(), "none") if self.method == "HEAD" else (only(content.encode()), "length")
        await self.answer(Answer(status, HTTPStatus(status).phrase, headers, body, framing))

    def position(self, after):
        """Return a position in the request's body: the middle if none is given."""
        return middle(self.headers) if after is None else after

    def is_waiting_to_send(self):
        """Return whether the client waits for "100 Continue" before sending its body, and has not got it."""
        return bool(self.headers.get("Expect")) and self.framing != "none" and not self.entry["received"]

    async def drop_body(self):
        """Read the request's body, unless it has been forwarded or will not be sent."""
        if not self.sending and not self.is_waiting_to_send():
            await self.send_body()

    async def client_has_gone(self):
        """Wait until the client has ended the connection; then do so, too."""
        while await self.connection.reader.read(BLOCK):
            pass
        raise Broken

    async def finish(self):
        """Finish the request; return whether its connection can be used for another."""
        if self.sending and not self.last:
            await self.sending
        return not self.last

    def close(self):
        """Close the connection to the server, which sees an unfinished request as aborted."""
        if self.sending:
            self.sending.cancel()
        if self.upstream:
            end(self.upstream, reset=False)
