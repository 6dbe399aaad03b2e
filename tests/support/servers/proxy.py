"""A program of HTTP proxies that inject faults and emulate distant servers. ``faults.py`` controls it.

Requests, with their Host and signature, and responses are forwarded unchanged, unless a rule says otherwise. Each
connection of a client is served by one task; each request has a connection of its own to the server.

The program takes commands on a control port, which is its only argument: a POST has the name of a method of ``Control``
and its arguments, as JSON, and the response has the method's result.
"""

import asyncio
import contextlib
import fnmatch
import inspect
import itertools
import json
import socket
import sys
from urllib.parse import urlsplit

from tests.support.servers.exchange import BLOCK, Broken, Exchange, end, head_bytes, read_head
from tests.support.servers.kinds import KINDS


class Rule:
    """The requests that a fault affects: ``times`` of those that match all conditions, after the first ``skip``.

    ``query`` and ``containing`` are parts of the request's query and of its whole head.
    """

    def __init__(
        self,
        kind,
        *,
        method=None,
        path="*",
        query="",
        ranged=None,
        mid_file=None,
        header=None,
        containing="",
        skip=0,
        times=1,
        **arguments,
    ):
        self.kind = kind
        self.method = method
        self.path = path
        self.query = query
        self.ranged = ranged
        self.mid_file = mid_file
        self.header = header
        self.containing = containing
        self.skip = skip
        self.times = times
        self.arguments = arguments
        self.hits = 0
        self.held = asyncio.Event()
        self.released = asyncio.Event()
        inspect.signature(KINDS[kind]).bind(None, None, **arguments)

    def takes(self, x):
        """Return whether a request gets this fault, and count it."""
        url = urlsplit(x.target)
        asked = x.headers.get("Range")
        conditions = [
            self.method in {None, x.method},
            fnmatch.fnmatchcase(url.path, self.path),
            self.query in url.query,
            self.ranged in {None, bool(asked)},
            self.mid_file in {None, bool(asked) and not asked.startswith("bytes=0-")},
            self.header is None or bool(x.headers.get(self.header)),
            self.containing.encode() in head_bytes(x.target, x.headers),
        ]
        if not all(conditions) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times = None if self.times is None else self.times - 1
        self.hits += 1
        return True

    async def hold(self):
        """Wait until the rule is released."""
        self.held.set()
        await self.released.wait()


class Connection:
    """A client's connection."""

    def __init__(self, listener, number, reader, writer):
        self.listener = listener
        self.number = number
        self.reader = reader
        self.writer = writer
        self.clear_at = 0.0  # when all data sent so far has passed
        writer.transport.set_write_buffer_limits(high=0)  # sent data is on its way, whatever happens next

    @property
    def step(self):
        """The number of bytes to send at once: at most what passes in five milliseconds."""
        return min(BLOCK, int(self.listener.rate / 200) + 1) if self.listener.rate else BLOCK

    def begin(self):
        """Begin a body: idle time before it does not count."""
        self.clear_at = max(self.clear_at, asyncio.get_running_loop().time())

    async def pace(self, size):
        """Wait until this many more bytes have passed at the connection's rate."""
        if self.listener.rate:
            now = asyncio.get_running_loop().time()
            # Timers are late by about a millisecond. This is compensated, but delays caused by a slow client are not.
            self.clear_at = max(self.clear_at, now - 0.02) + size / self.listener.rate
            await asyncio.sleep(self.clear_at - now)

    async def send(self, data):
        """Send data to the client."""
        self.writer.write(data)
        await self.writer.drain()

    async def serve(self):
        """Answer requests until the connection ends."""
        distance = 2 * self.listener.rtt  # the first request also waits for the connection to be made
        while True:
            first, headers = await read_head(self.reader)
            await asyncio.sleep(distance)
            distance = self.listener.rtt
            if not await self.serve_one(Exchange(self, first, headers)):
                return

    async def serve_one(self, x):
        """Answer a request; return whether the connection can be used for another."""
        self.listener.log.append(x.entry)
        rule = next((rule for rule in self.listener.rules if rule.takes(x)), None)
        try:
            if rule:
                x.entry["fault"] = rule.kind
                await KINDS[rule.kind](x, rule, **rule.arguments)
            else:
                await x.answer(await x.ask())
            return await x.finish()
        finally:
            x.close()


class Listener:
    """A proxy in front of one server."""

    def __init__(self, server):
        url = urlsplit(server)
        self.server = url.hostname, url.port
        self.rules = []
        self.log = []
        self.numbers = itertools.count(1)
        self.open = self.most = 0
        self.tasks = set()
        self.listening = None
        self.kept = socket.socket()  # it reserves the port while the proxy does not listen
        self.kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.kept.bind(("127.0.0.1", 0))
        self.port = self.kept.getsockname()[1]
        self.set_distance()

    def set_distance(self, rtt=0.0, rate=None, connections=None):
        """Emulate seconds per round trip, bytes per second of each connection, and a limit on connections."""
        self.rtt = rtt
        self.rate = rate
        self.slots = asyncio.Semaphore(connections) if connections else contextlib.nullcontext()

    async def listen(self):
        """Accept connections."""
        port = {"host": "127.0.0.1", "port": self.port, "reuse_address": True, "limit": 1 << 20, "backlog": 1024}
        self.listening = await asyncio.start_server(self.accept, **port)

    def refuse(self):
        """Refuse connections, and reset the existing ones."""
        if self.listening:
            self.listening.close()
        for task in self.tasks:
            task.cancel()

    async def accept(self, reader, writer):
        """Serve a connection to its end."""
        task = asyncio.current_task()
        self.tasks.add(task)
        how = {"reset": False}
        try:
            async with self.slots:
                self.open += 1
                self.most = max(self.most, self.open)
                try:
                    await Connection(self, next(self.numbers), reader, writer).serve()
                finally:
                    self.open -= 1
        except Broken as broken:
            how["reset"] = broken.reset
        except asyncio.IncompleteReadError as error:
            how["reset"] = bool(error.partial)
        except (OSError, asyncio.CancelledError):
            how["reset"] = True  # the server or the client has gone, or this proxy refuses connections
        finally:
            self.tasks.discard(task)
            end(writer, **how)


class Control:
    """The program's commands."""

    def __init__(self):
        self.listeners = {}
        self.rules = {}
        self.numbers = itertools.count(1)

    async def open(self, server):
        """Make a proxy in front of a server; return its port, which identifies it from then on."""
        listener = Listener(server)
        await listener.listen()
        self.listeners[listener.port] = listener
        return listener.port

    async def close(self, port):
        """End a proxy."""
        listener = self.listeners.pop(port)
        listener.refuse()
        listener.kept.close()

    async def rule(self, port, **rule):
        """Add a rule and return its number; the first rule that matches a request applies."""
        number = next(self.numbers)
        self.rules[number] = Rule(**rule)
        self.listeners[port].rules.append(self.rules[number])
        return number

    async def clear(self, port):
        """Remove all rules, release the requests that they hold, and clear the log."""
        listener = self.listeners[port]
        for rule in listener.rules:
            rule.released.set()
        listener.rules.clear()
        listener.log.clear()

    async def hits(self, rule):
        """Return the number of requests that a rule has affected."""
        return self.rules[rule].hits

    async def held(self, rule):
        """Return as soon as the rule holds a request."""
        await self.rules[rule].held.wait()

    async def release(self, rule):
        """Let the requests that the rule holds, now and later, continue."""
        self.rules[rule].released.set()

    async def log(self, port):
        """Return the record of each request."""
        return self.listeners[port].log

    async def connections(self, port):
        """Return the number of connections served now, and the most that were served at the same time."""
        return [self.listeners[port].open, self.listeners[port].most]

    async def distance(self, port, **distance):
        """Emulate a distance."""
        self.listeners[port].set_distance(**distance)

    async def refuse(self, port, seconds=None):
        """Refuse connections, for some time or until told to listen."""
        self.listeners[port].refuse()
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, lambda: asyncio.ensure_future(self.listen(port)))

    async def listen(self, port):
        """Accept connections again."""
        await self.listeners[port].listen()

    async def answer(self, reader, writer):
        """Execute the command in one request."""
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            _, headers = await read_head(reader)
            do, arguments = json.loads(await reader.readexactly(int(headers.get("Content-Length"))))
            status = "200 OK"
            try:
                content = await getattr(self, do)(**arguments)
            except Exception as error:  # noqa: BLE001 - who asked gets it
                status, content = "400 Bad Request", repr(error)
            body = json.dumps(content).encode()
            head = head_bytes(f"HTTP/1.1 {status}", [("Content-Length", len(body)), ("Connection", "close")])
            writer.write(head + body)
            await writer.drain()


async def main(port):
    """Serve until killed."""
    server = await asyncio.start_server(Control().answer, "127.0.0.1", port, reuse_address=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
