"""Faults by name, and the proxy that injects them.

``proxy`` (a fixture) makes a proxy in front of a server. The well-known faults of networks and stores have names::

    faulty = proxy(nginx.url)
    rule = faulty.inject("RST mid-body")             # affects the next GET
    read(faulty.url + "/a.tar")
    assert rule.hits == 1                            # the fault has happened

A name stands for a rule (``READ_FAULTS``, ``UPLOAD_FAULTS``), whose parts can be changed. A rule can also be made from
one of the kinds in ``kinds.py`` and conditions (``Rule`` in ``proxy.py``)::

    faulty.inject("503 once", path="*.parquet", times=None)     # for ever
    faulty.inject("expired token", containing="OLDKEY")         # for requests that still use it
    faulty.rule("cut", method="GET", after=1000, skip=1, reset=True)

The first rule that matches a request applies. A rule applies to one request, or to ``times`` requests; None means all.
``faulty.log()`` has every request. ``faulty.distance(rtt=0.03, rate=10e6, connections=16)`` emulates a distant server.

These faults are not made by a proxy: a host that does not exist (``nowhere.invalid``), an expired signed URL (``ceph``
refuses it), a killed server (``nginx.kill()``), a truncated shard. Rules that change a request's headers ("Range
ignored", and "overwritten mid-read, If-Match ignored") break a signature that covers headers: use them with ``moto``,
which checks no signature, or on signed URLs.
"""

import http.client
import json
from contextlib import closing

GET = {"method": "GET"}
PUT = {"method": "PUT"}
PART = {"method": "PUT", "query": "partNumber="}
CREATE = {"method": "POST", "query": "uploads"}
COMPLETE = {"method": "POST", "query": "uploadId="}
CONDITIONAL = {"method": "PUT", "header": "If-None-Match"}
FOR_EVER = {"times": None}

READ_FAULTS = {
    "FIN mid-body": GET | {"kind": "cut"},
    "FIN mid-body five times": GET | {"kind": "cut", "times": 5},
    "FIN mid-body for ever": GET | {"kind": "cut"} | FOR_EVER,
    "FIN after the head for ever": GET | {"kind": "cut", "after": 0} | FOR_EVER,
    "RST mid-body": GET | {"kind": "cut", "reset": True},
    "chunked body cut": GET | {"kind": "cut", "framing": "chunked"},
    "cut, no Content-Length": GET | {"kind": "cut", "framing": "closed"},
    "short body, headers agree": GET | {"kind": "short"},
    "short body, headers and size agree": GET | {"kind": "short", "is_all": True},
    "empty 200": GET | {"kind": "empty"},
    "503 once": GET | {"kind": "status", "status": 503},
    "503 four times": GET | {"kind": "status", "status": 503, "times": 4},
    "503 for ever": GET | {"kind": "status", "status": 503} | FOR_EVER,
    "429 with Retry-After": GET | {"kind": "status", "status": 429, "headers": {"Retry-After": "1"}},
    "500 once": GET | {"kind": "status", "status": 500},
    "drop before response": GET | {"kind": "drop"},
    "RST before response": GET | {"kind": "drop", "reset": True},
    "stall mid-body": GET | {"kind": "stall"},
    "stall before response": GET | {"kind": "silence"},
    "trickle": GET | {"kind": "trickle"} | FOR_EVER,
    "refused, then up": {"kind": "refuse", "seconds": 0.5},
    "Range ignored": GET | {"kind": "edit", "without": ["Range"], "ranged": True},
    "Range ignored for ever": GET | {"kind": "edit", "without": ["Range"], "ranged": True} | FOR_EVER,
    "Range ignored mid-file": GET | {"kind": "edit", "without": ["Range"], "mid_file": True},
    "Content-Range of other bytes": GET | {"kind": "wrong_range", "ranged": True},
    "Content-Range of another size": GET | {"kind": "wrong_range", "ranged": True, "shift": 0, "total": 1 << 40},
    "body too long": GET | {"kind": "long"},
    "gzip unasked": GET | {"kind": "gzip"},
    "stored Content-Encoding gzip": GET | {"kind": "edit", "headers": {"Content-Encoding": "gzip"}} | FOR_EVER,
    "HEAD 403": {"method": "HEAD", "kind": "status", "status": 403} | FOR_EVER,
    "HEAD 405": {"method": "HEAD", "kind": "status", "status": 405} | FOR_EVER,
    "no Content-Length": GET | {"kind": "frame", "framing": "closed"} | FOR_EVER,
    "chunked": GET | {"kind": "frame", "framing": "chunked"} | FOR_EVER,
    "301": GET | {"kind": "redirect", "status": 301},
    "302": GET | {"kind": "redirect", "status": 302},
    "307": GET | {"kind": "redirect", "status": 307},
    "redirect to another host": GET | {"kind": "redirect", "status": 302, "to": "http://localhost:{port}"},
    "redirect loop": GET | {"kind": "redirect", "status": 302} | FOR_EVER,
    "overwritten mid-read": GET | {"kind": "overwritten", "skip": 1} | FOR_EVER,
    "overwritten mid-read, If-Match ignored": GET | {"kind": "overwritten", "skip": 1, "if_match": False} | FOR_EVER,
    "overwritten mid-read, same ETag": (
        GET | {"kind": "overwritten", "skip": 1, "if_match": False, "etag": None} | FOR_EVER
    ),
    "deleted mid-read": GET | {"kind": "status", "status": 404, "skip": 1} | FOR_EVER,
    "expired token": {"kind": "status", "status": 400, "code": "ExpiredToken"} | FOR_EVER,
    "403": GET | {"kind": "status", "status": 403} | FOR_EVER,
    "404": GET | {"kind": "status", "status": 404} | FOR_EVER,
    "bit flip": GET | {"kind": "flip"},
    "bit flip for ever": GET | {"kind": "flip"} | FOR_EVER,
}

UPLOAD_FAULTS = {
    "PUT cut": PUT | {"kind": "cut_upload"},
    "part cut": PART | {"kind": "cut_upload"},
    "PUT 503": PUT | {"kind": "status", "status": 503},
    "PUT 403": PUT | {"kind": "status", "status": 403} | FOR_EVER,
    "part 503": PART | {"kind": "status", "status": 503},
    "part 500 for ever": PART | {"kind": "status", "status": 500} | FOR_EVER,
    "Complete 500": COMPLETE | {"kind": "status", "status": 500},
    "Complete 500, but done": COMPLETE | {"kind": "status", "status": 500, "forwarded": True},
    "Complete 200 with an error": COMPLETE | {"kind": "status", "status": 200, "code": "InternalError"},
    "Complete 200 with an error, but done": (
        COMPLETE | {"kind": "status", "status": 200, "code": "InternalError", "forwarded": True}
    ),
    "lost response to PUT": PUT | {"kind": "drop", "forwarded": True},
    "lost response to conditional PUT": CONDITIONAL | {"kind": "drop", "forwarded": True},
    "lost response to a part": PART | {"kind": "drop", "forwarded": True},
    "lost response to Create": CREATE | {"kind": "drop", "forwarded": True},
    "lost response to Complete": COMPLETE | {"kind": "drop", "forwarded": True},
    "409 to conditional PUT": CONDITIONAL | {"kind": "status", "status": 409},
    "409 to Complete": COMPLETE | {"kind": "status", "status": 409},
    "412 to conditional PUT": CONDITIONAL | {"kind": "status", "status": 412},
    "412 to Complete": COMPLETE | {"kind": "status", "status": 412},
    "501 to conditional PUT": CONDITIONAL | {"kind": "status", "status": 501} | FOR_EVER,
    "no answer to PUT": PUT | {"kind": "silence"},
    "bit flip in PUT": PUT | {"kind": "flip_upload"},
    "ETag is no MD5": {"kind": "edit", "headers": {"ETag": '"0123-of-my-own"'}} | FOR_EVER,
}

FAULTS = READ_FAULTS | UPLOAD_FAULTS


def tell(control, do, /, **arguments):
    """Send a command to the proxy's program; return its result."""
    with closing(http.client.HTTPConnection("127.0.0.1", control, timeout=120)) as connection:
        connection.request("POST", "/", json.dumps([do, arguments]))
        response = connection.getresponse()
        said = json.loads(response.read())
    if response.status != 200:
        message = f"the proxy cannot {do} with {arguments}: {said}"
        raise ValueError(message)
    return said


class InjectedRule:
    """A rule that a proxy follows."""

    def __init__(self, control, number):
        self.control = control
        self.number = number

    @property
    def hits(self):
        """The number of requests that it has affected."""
        return tell(self.control, "hits", rule=self.number)

    def wait(self):
        """Wait until a request is held."""
        tell(self.control, "held", rule=self.number)

    def release(self):
        """Let a held request continue."""
        tell(self.control, "release", rule=self.number)


class FaultProxy:
    """A proxy in front of a server. It can be pickled, and used by any process while the test runs."""

    def __init__(self, control, server):
        self.control = control
        self.port = tell(control, "open", server=server)
        self.url = f"http://127.0.0.1:{self.port}"

    def inject(self, fault, **changes):
        """Add the rule of a name; "refused, then up" begins at once and has no rule."""
        return self.rule(**FAULTS[fault] | changes)

    def rule(self, kind, **rule):
        """Add a rule."""
        if kind == "refuse":
            return self.refuse(**rule)
        return InjectedRule(self.control, tell(self.control, "rule", port=self.port, kind=kind, **rule))

    def hold(self, *, after=None, **rule):
        """Add a rule that holds the next GET before it is forwarded, or after some bytes of the response's body."""
        return self.rule(**{"method": "GET", "kind": "hold", "after": after} | rule)

    def clear(self):
        """Remove all rules, release the requests that they hold, and clear the log."""
        tell(self.control, "clear", port=self.port)

    def log(self):
        """Return a dict for each request, in order; see ``Exchange``. All that a client has seen is in it."""
        return tell(self.control, "log", port=self.port)

    def connections(self):
        """Return the number of connections, and the most that were open at the same time."""
        return tell(self.control, "connections", port=self.port)

    def distance(self, *, rtt=0.0, rate=None, connections=None):
        """Emulate a distance: seconds per round trip, bytes per second and connection, connections served at a time."""
        tell(self.control, "distance", port=self.port, rtt=rtt, rate=rate, connections=connections)

    def refuse(self, *, seconds=None):
        """Reset all connections and refuse new ones, for some time or until ``listen``."""
        tell(self.control, "refuse", port=self.port, seconds=seconds)

    def listen(self):
        """Accept connections again."""
        tell(self.control, "listen", port=self.port)

    def close(self):
        """End the proxy."""
        tell(self.control, "close", port=self.port)
