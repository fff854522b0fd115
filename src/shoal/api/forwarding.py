"""The API of a standby: it answers what the log alone decides, and forwards the rest to the leader.

A request goes to the leader at most once. If the leader ends before it has answered, the caller is
told that the outcome is unknown, and decides whether to repeat it. A request that was forwarded is
never forwarded again, so two standbys cannot send one back and forth.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.types import ASGIApp, Receive, Scope, Send

from shoal.api.access import Access, proven
from shoal.api.forwarded import (
    ACCESS,
    FORWARDED,
    HEADER,
    SEQ,
    SERVED,
    UNKNOWN,
    Forwarded,
    answer,
    headed,
    header,
)
from shoal.api.handling import is_schema
from shoal.api.principal import SAFE_METHODS, Principal
from shoal.api.problems import Refusal
from shoal.api.relay import Line, Relay, Unsent
from shoal.api.tunnel import hold_link, refuse, tunnel
from shoal.calls.call import Head, Needs
from shoal.calls.table import match
from shoal.client import reaching
from shoal.control.loop import Unreadable
from shoal.link.channel import LINK_PATH
from shoal.model.ids import number_of
from shoal.model.service import GatewayEntry

BEHIND_S_MAX = 1.0  # a reader who has seen newer events waits this long for them
LOOK_S = 0.5  # whether the leader that has our request still leads
RETRY_S = 1
UNDER_WAY_MAX = 512  # requests at the leader ...
STRANGERS_MAX = 64  # ... and those of callers who have not shown a token that we know
AS_OF = reaching.AS_OF.lower().encode()
OF_ONE_CONNECTION = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade expect proxy-connection".split()
)
NOBODY = "no head leads at the moment; try again in a few seconds"

Connection = ASGIConnection[Any, Any, Any, Any]
Ended = Callable[[str], Awaitable[bool]]


async def unknown(_: str) -> bool:
    """No job is known to have ended."""
    return False


class Leader(Protocol):
    """A row of the table `heads`."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...


class Heads(Protocol):
    """What a standby knows of the others."""

    @property
    def last_seq(self) -> int:
        """The newest event in the state that it follows."""

    @property
    def as_of_ms(self) -> int:
        """When it last saw the end of the log."""

    def leader(self) -> Leader | None:
        """None: nobody leads, or it is not known who."""

    async def wait_for(self, seq: int, timeout_s: float) -> bool:
        """Whether the state has this event, at the latest after the timeout."""


def at_standby(
    app: Litestar,
    heads: Heads,
    token: str,
    trust: Callable[[], ssl.SSLContext],
    ended: Ended = unknown,
    entry: Callable[[], GatewayEntry] | None = None,
) -> Forwarding:
    """Have the app of a standby forward what it cannot answer: before its server is made."""
    made = Forwarding(app, heads, app.state[ACCESS], token, trust, ended, entry)
    app.state[SERVED] = headed(app, token, lambda: heads.last_seq, made, made.close)
    return made


class Forwarding:
    """`ended`: whether the store has this job, and it does not live."""

    def __init__(
        self,
        app: ASGIApp,
        heads: Heads,
        access: Access,
        token: str,
        trust: Callable[[], ssl.SSLContext],
        ended: Ended = unknown,
        entry: Callable[[], GatewayEntry] | None = None,
    ) -> None:
        self._app = app
        self._heads = heads
        self._access = access
        self._token = token
        self._trust = trust
        self._ended = ended
        self._entry = entry
        self._relay = Relay(trust)
        self._under_way = self._strangers = 0

    def close(self) -> None:
        self._relay.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind: str = scope["type"]
        if kind == "lifespan":
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await self._websocket(scope, receive, send)
        else:
            with contextlib.suppress(_Answered):
                await self._http(scope, receive, send)

    # -- requests ------------------------------------------------------------------------------

    async def _http(self, scope: Any, receive: Receive, send: Send) -> None:
        who, leader = self._sender(scope), self._heads.leader()
        if scope.get(FORWARDED):
            await _answer(
                send, 503, "this head does not lead", retry_s=RETRY_S, standby="no leader"
            )
        if await self._is_ours(scope, who, leader is None):
            if leader is None and _meant(scope)[0] is not Head.ANY:
                await self._app(scope, self._until_led(receive), self._dated(send))
            else:
                await self._app(scope, receive, send)
            return
        if leader is None:
            await _answer(send, 503, NOBODY, retry_s=RETRY_S, standby="no leader")
        called = match(scope["method"], scope["path"])
        node = called is not None and called[0].may is Needs.NODE  # a proxy may have any name
        if not node and self._access.is_foreign(Connection(scope)):
            message = "this is not a name of this controller; use its address, or localhost"
            await _answer(send, 421, message, "host")
        async with self._room(who, send):
            await self._forward(scope, receive, send, leader)

    def _sender(self, scope: Any) -> Principal | None:
        """As the state that we follow knows them. The leader decides."""
        connection = Connection(scope)
        try:
            known = self._access.principal(connection)
            return known or self._access.of_session(self._access.session(connection))
        except (Unreadable, ValueError):
            return None

    async def _is_ours(self, scope: Any, who: Principal | None, alone: bool) -> bool:
        head, job = _meant(scope)
        if scope["method"] not in SAFE_METHODS or head is Head.ONLY_LEADER:
            return False
        if head is Head.ANY:
            return True
        seen = header(scope, SEQ)
        # The first request of a client goes to the leader: what it has done before, by another
        # program, is not known here.
        if not alone and (who is None or not seen or not await self._decided(head, job)):
            return False
        number = int(seen) if seen.isdigit() and len(seen) <= reaching.DIGITS_MAX else 0
        return number <= self._heads.last_seq or await self._heads.wait_for(number, BEHIND_S_MAX)

    async def _decided(self, head: Head, job: str) -> bool:
        """By the log alone."""
        if head is not Head.ENDED:
            return head is Head.LOG
        try:
            return number_of(job) > 0 and await self._ended(job)
        except Unreadable:
            return False

    def _until_led(self, receive: Receive) -> Receive:
        """A stream that was begun without a leader ends when there is one, and its reader comes
        back to be forwarded."""

        async def received() -> Any:
            asking = asyncio.ensure_future(receive())
            try:
                while not asking.done():
                    await asyncio.wait([asking], timeout=LOOK_S)
                    if not asking.done() and self._heads.leader() is not None:
                        return {"type": "http.disconnect"}
                return asking.result()
            finally:
                asking.cancel()

        return received

    def _dated(self, send: Send) -> Send:
        when = datetime.fromtimestamp(self._heads.as_of_ms / 1000, UTC)
        text = when.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()

        async def dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (AS_OF, text)]
            await send(message)

        return dated

    @contextlib.asynccontextmanager
    async def _room(self, who: Principal | None, send: Send) -> Any:
        stranger = who is None
        if self._under_way >= UNDER_WAY_MAX or (stranger and self._strangers >= STRANGERS_MAX):
            await _answer(send, 503, "too many requests are under way", retry_s=RETRY_S)
        self._under_way += 1
        self._strangers += stranger
        try:
            yield
        finally:
            self._under_way -= 1
            self._strangers -= stranger

    async def _forward(self, scope: Any, receive: Receive, send: Send, leader: Leader) -> None:
        who = self._sender(scope)
        if who is not None:
            try:
                proven(Connection(scope), who)
            except Refusal as error:
                await _answer(send, error.status, error.problem.message, retry_s=error.retry_s)
        try:
            line = await self._relay.take(leader.url)
        except Unsent as error:
            message = f"the head that leads ({leader.name}) cannot be reached ({error})"
            await _answer(send, 503, message, retry_s=RETRY_S, standby="no leader")
        started = False
        try:
            line.begin(scope["method"], self._head(scope, leader.url))
            body = _Body(scope, receive, line)
            sending = asyncio.create_task(body.send())
            try:
                while (piece := await self._next(line, leader)) is not None:
                    started = await _pass_on(send, piece)
            finally:
                sending.cancel()
        except OSError:
            line.abort()
            if not started:
                await _answer(send, 502, UNKNOWN, standby="outcome unknown")
            raise _Answered from None  # cut off, so that nobody takes a part for the whole
        except BaseException:
            line.abort()
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if body.sent:
            self._relay.give(line)
        else:
            line.abort()

    async def _next(self, line: Line, leader: Leader) -> Any:
        """OSError as soon as another head leads: a leader that was stopped does not answer."""
        reading = asyncio.ensure_future(line.next())
        try:
            while True:
                await asyncio.wait([reading], timeout=LOOK_S)
                if reading.done():
                    return reading.result()
                now = self._heads.leader()
                if now is None or now.url != leader.url:
                    raise OSError(UNKNOWN)
        finally:
            reading.cancel()

    def _head(self, scope: Any, url: str) -> bytes:
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        lines = [
            b"%s %s HTTP/1.1" % (scope["method"].encode(), path + (b"?" + query if query else b""))
        ]
        lines += [b"%s: %s" % pair for pair in self.headers(scope, url)]
        if _is_chunked(scope):
            lines.append(b"transfer-encoding: chunked")
        return b"\r\n".join([*lines, b"", b""])

    def headers(self, scope: Any, url: str) -> list[tuple[bytes, bytes]]:
        """The caller's own, and who they are."""
        kept = [
            (name, value)
            for name, value in scope["headers"]
            if name not in OF_ONE_CONNECTION and name != HEADER
        ]
        if not header(scope, b"host"):
            kept.append((b"host", url.partition("://")[2].encode()))
        client = scope.get("client")
        said = Forwarded(
            client=client[0] if client else "",
            scheme=scope.get("scheme", "http"),
            entry=self._entry() if self._entry else None,
        )
        return [*kept, (HEADER, said.signed(self._token))]

    # -- websockets ----------------------------------------------------------------------------

    async def _websocket(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] == LINK_PATH:
            await hold_link(receive, send, self._heads.leader)
            return
        leader = None if scope.get(FORWARDED) else self._heads.leader()
        if leader is None:
            await refuse(receive, send, 503, NOBODY)
        elif self._access.is_foreign(Connection(scope)):
            await refuse(receive, send, 421, "this is not a name of this controller")
        elif self._under_way >= UNDER_WAY_MAX:
            await refuse(receive, send, 503, "too many requests are under way")
        else:
            self._under_way += 1
            try:
                headers = self.headers(scope, leader.url)
                await tunnel(scope, receive, send, leader.url, headers, self._trust)
            finally:
                self._under_way -= 1


def _meant(scope: Any) -> tuple[Head, str]:
    """Which head answers what is read here, and the job that it is about."""
    path: str = scope["path"]
    if is_schema(path):
        return Head.ANY, ""
    called = match("GET", path)
    if called is None:
        return Head.LEADER, ""
    return called[0].head, called[1].get("job_id", "")


class _Answered(Exception):
    """Nothing is left to do for this request."""


async def _answer(send: Send, status: int, message: str, *more: Any, **words: Any) -> NoReturn:
    """Raises `_Answered`, so that nothing after it runs."""
    await answer(send, status, message, *more, **words)
    raise _Answered


def _is_chunked(scope: Any) -> bool:
    return bool(header(scope, b"transfer-encoding"))


class _Body:
    """The body of a request, on its way to the leader."""

    def __init__(self, scope: Any, receive: Receive, line: Line) -> None:
        self._receive, self._line = receive, line
        self._chunked = _is_chunked(scope)
        self.sent = not self._chunked and header(scope, b"content-length") in (b"", b"0")

    async def send(self) -> None:
        """Then wait for the caller to leave: the leader must not work for somebody who has gone."""
        while True:
            message: Any = await self._receive()
            if message["type"] == "http.disconnect":
                self._line.abort()
                return
            if self.sent:
                continue
            data, more = message.get("body", b""), message.get("more_body", False)
            if self._chunked:
                data = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
                data += b"" if more else b"0\r\n\r\n"
            if data:
                await self._line.write(data)
            self.sent = not more


async def _pass_on(send: Send, piece: Any) -> bool:
    if isinstance(piece, bytes):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    else:
        status, headers = piece
        kept = [pair for pair in headers if pair[0] not in OF_ONE_CONNECTION]
        await send({"type": "http.response.start", "status": status, "headers": kept})
    return True
