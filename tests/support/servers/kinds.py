"""The kinds of faults: how the proxy handles a request that matches a rule.

Each function takes the exchange, the rule and the rule's arguments. A position (``after``, ``at``) counts bytes of the
body of this request or response; the default is the middle.
"""

import gzip as gzip_module
import re

from tests.support.servers.exchange import Broken, flipped, interrupted, join, only, translated, trickled

OTHER_VERSION = '"another-version"'
OTHER_BYTES = bytes(byte ^ 0x55 for byte in range(256))


async def cut(x, _rule, *, after=None, reset=False, framing=None):
    """End the response's body early; its end may be marked by "chunked", or only by the connection, "closed"."""
    answer = await x.ask()
    position = answer.position(after)
    if framing:
        answer.reframe(framing)

    async def break_off():
        raise Broken(reset=reset)

    answer.body = interrupted(answer.body, position, break_off)
    await x.answer(answer)


async def frame(x, _rule, *, framing):
    """Mark the end of the response by "chunked", or only by the connection, "closed"."""
    answer = await x.ask()
    answer.reframe(framing)
    await x.answer(answer)


async def hold(x, rule, *, after=None):
    """Stop in the response's body until the rule is released; without ``after``, before the request is forwarded."""
    if after is None:
        await rule.hold()
    answer = await x.ask()
    if after is not None:
        answer.body = interrupted(answer.body, after, rule.hold)
    await x.answer(answer)


async def stall(x, _rule, *, after=None):
    """Stop sending in the middle of the response's body, until the client disconnects."""
    answer = await x.ask()
    answer.body = interrupted(answer.body, answer.position(after), x.client_has_gone)
    await x.answer(answer)


async def silence(x, _rule):
    """Read the request and send nothing, until the client disconnects."""
    await x.drop_body()
    await x.client_has_gone()


async def trickle(x, _rule, *, after=None, rate=1):
    """Send this many bytes per second from a position on."""
    answer = await x.ask()
    answer.body = trickled(answer.body, answer.position(after), rate)
    await x.answer(answer)


async def drop(x, _rule, *, reset=False, forwarded=False):
    """End the connection without a response; if forwarded, the server has executed the request."""
    if forwarded:
        await join((await x.ask()).body)
    else:
        await x.drop_body()
    raise Broken(reset=reset)


async def status(x, _rule, *, status, code=None, headers=None, forwarded=False):
    """Respond with a status and S3's error; if forwarded, the server has executed the request."""
    if forwarded:
        await join((await x.ask()).body)
    await x.say(status, headers or {}, code=code)


async def redirect(x, _rule, *, status, to=""):
    """Redirect the client to the same path at another server, or to this one again."""
    to = to or f"http://{x.headers.get('Host')}"
    await x.say(status, {"Location": f"{to.format(port=x.listener.port)}{x.target}"})


async def edit(x, _rule, *, without=(), headers=None):
    """Remove headers of the request, and replace headers of the response."""
    for name in without:
        x.headers.set(name, None)
    answer = await x.ask()
    for name, value in (headers or {}).items():
        answer.headers.set(name, value)
    await x.answer(answer)


async def wrong_range(x, _rule, *, shift=1, total=None):
    """Declare a wrong range of bytes: a shifted one, or one of an object of another size."""
    answer = await x.ask()
    if answer.status == 206:
        first, last, size = map(int, re.findall(r"\d+", answer.headers.get("Content-Range")))
        answer.headers.set("Content-Range", f"bytes {first + shift}-{last + shift}/{total or size}")
    await x.answer(answer)


async def short(x, _rule, *, after=None, is_all=False):
    """End the body early, with matching headers; with ``is_all`` they say that the whole object ends there."""
    answer = await x.ask()
    position = answer.position(after)
    answer.resize(position, is_all=is_all)
    body = await join(answer.body)
    answer.body = only(body[:position])
    await x.answer(answer)


async def empty(x, _rule):
    """Respond with status 200 and an empty body."""
    await x.drop_body()
    await x.say(200, {}, content="")


async def long(x, _rule, *, extra=100):
    """Send more bytes than were requested, with a matching Content-Length."""
    answer = await x.ask()
    answer.headers.set("Content-Length", int(answer.headers.get("Content-Length")) + extra)
    answer.body = only(await join(answer.body), bytes(extra))
    await x.answer(answer)


async def gzip(x, _rule):
    """Compress the body although the client did not request it."""
    answer = await x.ask()
    body = gzip_module.compress(await join(answer.body))
    answer.headers.set("Content-Encoding", "gzip")
    answer.headers.set("Content-Length", len(body))
    answer.body = only(body)
    await x.answer(answer)


async def overwritten(x, _rule, *, if_match=True, etag=OTHER_VERSION):
    """Serve another version of the object with the same size; without ``if_match``, act as if If-Match was ignored."""
    pinned = x.headers.get("If-Match")
    if if_match and pinned not in {"", etag}:
        await x.say(412, {})
        return
    x.headers.set("If-Match", None)
    answer = await x.ask()
    if etag:
        answer.headers.set("ETag", etag)
    answer.body = translated(answer.body, OTHER_BYTES)
    await x.answer(answer)


async def flip(x, _rule, *, at=None):
    """Flip a bit of the response's body."""
    answer = await x.ask()
    answer.body = flipped(answer.body, answer.position(at))
    await x.answer(answer)


async def flip_upload(x, _rule, *, at=None):
    """Flip a bit of the request's body."""
    x.body = flipped(x.body, x.position(at))
    await x.answer(await x.ask())


async def cut_upload(x, _rule, *, after=None, reset=True):
    """End the connection in the middle of the request's body; the server's connection ends, too."""

    async def break_off():
        raise Broken(reset=reset)

    x.body = interrupted(x.body, x.position(after), break_off)
    await x.answer(await x.ask())


KINDS = {
    kind.__name__: kind
    for kind in [
        *[
            cut,
            frame,
            hold,
            stall,
            silence,
            trickle,
            drop,
            status,
            redirect,
            edit,
            wrong_range,
            short,
            empty,
            long,
            gzip,
        ],
        *[overwritten, flip, flip_upload, cut_upload],
    ]
}
