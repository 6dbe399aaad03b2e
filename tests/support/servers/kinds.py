"""The kinds of faults: what becomes of a request that a rule of the proxy takes.

Each has the exchange, the rule, and the rule's arguments. A position (``after``, ``at``) counts bytes of the body of
this request or response, and is its middle where none is given.
"""

import gzip as gzip_module
import re

from tests.support.servers.exchange import Broken, flipped, interrupted, join, only, translated, trickled

OTHER_VERSION = '"another-version"'
OTHER_BYTES = bytes(byte ^ 0x55 for byte in range(256))


async def cut(x, _rule, *, after=None, reset=False, framing=None):
    """End the response's body early; its end may be told by "chunked" or only by the connection, "closed"."""
    answer = await x.ask()
    position = answer.position(after)
    if framing:
        answer.reframe(framing)

    async def break_off():
        raise Broken(reset=reset)

    answer.body = interrupted(answer.body, position, break_off)
    await x.answer(answer)


async def frame(x, _rule, *, framing):
    """Tell the end of the response by "chunked", or only by the connection, "closed"."""
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
    """Say nothing more in the middle of the response's body, until the client has gone."""
    answer = await x.ask()
    answer.body = interrupted(answer.body, answer.position(after), x.client_has_gone)
    await x.answer(answer)


async def silence(x, _rule):
    """Take the request and say nothing, until the client has gone."""
    await x.drop_body()
    await x.client_has_gone()


async def trickle(x, _rule, *, after=None, rate=1):
    """Send so many bytes a second from some position on."""
    answer = await x.ask()
    answer.body = trickled(answer.body, answer.position(after), rate)
    await x.answer(answer)


async def drop(x, _rule, *, reset=False, forwarded=False):
    """End the connection without an answer; if forwarded, the server has done what was asked."""
    if forwarded:
        await join((await x.ask()).body)
    else:
        await x.drop_body()
    raise Broken(reset=reset)


async def status(x, _rule, *, status, code=None, headers=None, forwarded=False):
    """Answer with a status and S3's error; if forwarded, the server has done what was asked."""
    if forwarded:
        await join((await x.ask()).body)
    await x.say(status, headers or {}, code=code)


async def redirect(x, _rule, *, status, to=""):
    """Send the client to the same path at another server, or to this one again."""
    to = to or f"http://{x.headers.get('Host')}"
    await x.say(status, {"Location": f"{to.format(port=x.listener.port)}{x.target}"})


async def edit(x, _rule, *, without=(), headers=None):
    """Leave out headers of the request, and replace some of the response."""
    for name in without:
        x.headers.set(name, None)
    answer = await x.ask()
    for name, value in (headers or {}).items():
        answer.headers.set(name, value)
    await x.answer(answer)


async def wrong_range(x, _rule, *, shift=1, total=None):
    """Say that the bytes are others than they are: shifted, or of a whole of another size."""
    answer = await x.ask()
    if answer.status == 206:
        first, last, size = map(int, re.findall(r"\d+", answer.headers.get("Content-Range")))
        answer.headers.set("Content-Range", f"bytes {first + shift}-{last + shift}/{total or size}")
    await x.answer(answer)


async def short(x, _rule, *, after=None, is_all=False):
    """End the body early, with headers that agree; with ``is_all`` they say that the whole ends there."""
    answer = await x.ask()
    position = answer.position(after)
    answer.resize(position, is_all=is_all)
    body = await join(answer.body)
    answer.body = only(body[:position])
    await x.answer(answer)


async def empty(x, _rule):
    """Answer 200 and nothing."""
    await x.drop_body()
    await x.say(200, {}, content="")


async def long(x, _rule, *, extra=100):
    """Send more bytes than were asked for; Content-Length agrees."""
    answer = await x.ask()
    answer.headers.set("Content-Length", int(answer.headers.get("Content-Length")) + extra)
    answer.body = only(await join(answer.body), bytes(extra))
    await x.answer(answer)


async def gzip(x, _rule):
    """Compress the body though nobody asked for it."""
    answer = await x.ask()
    body = gzip_module.compress(await join(answer.body))
    answer.headers.set("Content-Encoding", "gzip")
    answer.headers.set("Content-Length", len(body))
    answer.body = only(body)
    await x.answer(answer)


async def overwritten(x, _rule, *, if_match=True, etag=OTHER_VERSION):
    """Be another version of the object, of the same size; without ``if_match`` as a server that ignores If-Match."""
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
    """End the connection in the middle of the request's body; the server sees that, too."""

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
