"""The API of a standby: it answers what the log alone decides, and forwards the rest to the leader.

A request goes to the leader at most once. If the leader ends before it has answered, the caller is
told that the outcome is unknown, and decides whether to repeat it. A request that was forwarded is
never forwarded again, so two standbys cannot send one back and forth.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from shoal.api.access import Access, proven
from shoal.api.forwarded import (
    ACCESS,
    FORWARDED,
    HEADER,
    RETRY_S,
    SEQ,
    SERVED,
    UNKNOWN,
    Elsewhere,
    Forwarded,
    Headers,
    answer,
    headed,
    header,
)
from shoal.api.handling import is_schema
from shoal.api.http import ASGIApp, Connection, Receive, Scope, Send
from shoal.api.principal import SAFE_METHODS, Principal
from shoal.api.problems import Refusal
from shoal.api.routing import App
from shoal.calls.call import Head, Needs
from shoal.calls.table import match
from shoal.client import reaching
from shoal.client.keepalive import keep_alive
from shoal.control.loop import Unreadable
from shoal.link.channel import LINK_PATH
from shoal.link.http import CONNECT_S, GONE_S, Line, Relay, Unsent, request_head
from shoal.link.meeting import PARTNER_GONE, open_channel
from shoal.model.ids import number_of
from shoal.model.service import GatewayEntry

BEHIND_S_MAX = 1.0  # a reader who has seen newer events waits this long for them
LOOK_S = 0.5  # whether the leader that has our request still leads
UNDER_WAY_MAX = 512  # requests at the leader ...
STRANGERS_MAX = 64  # ... and those of callers who have not shown a token that we know
AS_OF = reaching.AS_OF.encode()
OF_ONE_CONNECTION = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade expect proxy-connection".split()
)
NOBODY = "no head leads at the moment; try again in a few seconds"
NOT_OURS = "this is not a name of this controller; use its address, or localhost"
BUSY = "too many requests are under way"

Ended = Callable[[str], Awaitable[bool]]


async def unknown(_: str) -> bool:
    """No job is known to have ended."""
    return False


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
    app: App,
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
            try:
                await self._websocket(scope, receive, send)
            except Refusal as error:
                await refuse(receive, send, error)
        else:
            try:
                await self._http(scope, receive, send)
            except Refusal as error:
                await answer(send, error)

    # -- requests ------------------------------------------------------------------------------

    async def _http(self, scope: Any, receive: Receive, send: Send) -> None:
        who, leader = self._sender(scope), self._heads.leader()
        if scope.get(FORWARDED):
            raise Elsewhere(503, "this head does not lead")
        if await self._is_ours(scope, who, leader is None):
            if leader is None and _meant(scope)[0] is not Head.ANY:
                receive, send = self._until_led(receive), self._dated(send)
            await self._app(scope, receive, send)
            return
        if leader is None:
            raise Elsewhere(503, NOBODY)
        called = match(scope["method"], scope["path"])
        node = called is not None and called[0].may is Needs.NODE  # a proxy may have any name
        if not node and self._access.is_foreign(Connection(scope)):
            raise Refusal(421, NOT_OURS, "host")
        with self._room(who is None):
            if who is not None:
                proven(Connection(scope), who)
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
            try:
                return await unless(lambda: self._heads.leader() is not None, receive(), LOOK_S)
            except OSError:
                return {"type": "http.disconnect"}

        return received

    def _dated(self, send: Send) -> Send:
        when = datetime.fromtimestamp(self._heads.as_of_ms / 1000, UTC)
        text = when.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()

        async def dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (AS_OF, text)]
            await send(message)

        return dated

    @contextlib.contextmanager
    def _room(self, stranger: bool) -> Iterator[None]:
        if self._under_way >= UNDER_WAY_MAX or (stranger and self._strangers >= STRANGERS_MAX):
            raise Refusal(503, BUSY, "", RETRY_S)
        self._under_way += 1
        self._strangers += stranger
        try:
            yield
        finally:
            self._under_way -= 1
            self._strangers -= stranger

    async def _forward(self, scope: Any, receive: Receive, send: Send, leader: Leader) -> None:
        def over() -> bool:
            """A leader that was stopped does not answer."""
            now = self._heads.leader()
            return now is None or now.url != leader.url

        try:
            line = await self._relay.take(leader.url)
        except Unsent as error:
            message = f"the head that leads ({leader.name}) cannot be reached ({error})"
            raise Elsewhere(503, message) from None
        line.begin(self._head(scope, leader.url))
        started, whole = False, asyncio.Event()
        sending = asyncio.create_task(_send_body(scope, receive, line, whole))
        try:
            status, headers = await unless(over, line.head(), LOOK_S)
            kept = [pair for pair in headers if pair[0] not in OF_ONE_CONNECTION]
            started = True
            await send({"type": "http.response.start", "status": status, "headers": kept})
            while piece := await unless(over, line.piece(), LOOK_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError:
            line.abort()
            if started:  # cut off, so that nobody takes a part for the whole
                return
            raise Elsewhere(502, UNKNOWN) from None
        except BaseException:
            line.abort()
            raise
        finally:
            sending.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if whole.is_set():
            self._relay.give(line)
        else:
            line.abort()

    def _head(self, scope: Any, url: str) -> bytes:
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        headers = self.headers(scope, url)
        if _is_chunked(scope):
            headers.append((b"transfer-encoding", b"chunked"))
        return request_head(scope["method"], path + (b"?" + query if query else b""), headers)

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
        await receive()  # websocket.connect
        if scope["path"] == LINK_PATH:
            await hold_link(receive, send, self._heads.leader)
            return
        leader = None if scope.get(FORWARDED) else self._heads.leader()
        if leader is None:
            raise Refusal(503, NOBODY, "", RETRY_S)
        if self._access.is_foreign(Connection(scope)):
            raise Refusal(421, NOT_OURS)
        with self._room(stranger=False):
            headers = self.headers(scope, leader.url)
            await tunnel(scope, receive, send, leader.url, headers, self._trust)


def _meant(scope: Any) -> tuple[Head, str]:
    """Which head answers what is read here, and the job that it is about."""
    path: str = scope["path"]
    if is_schema(path):
        return Head.ANY, ""
    called = match("GET", path)
    if called is None:
        return Head.LEADER, ""
    return called[0].head, called[1].get("job_id", "")


def _is_chunked(scope: Any) -> bool:
    return bool(header(scope, b"transfer-encoding"))


async def _send_body(scope: Any, receive: Receive, line: Line, whole: asyncio.Event) -> None:
    """Then wait for the caller to leave: the leader must not work for somebody who has gone."""
    chunked = _is_chunked(scope)
    if not chunked and header(scope, b"content-length") in (b"", b"0"):
        whole.set()
    take: Callable[[], Awaitable[Any]] = receive
    with contextlib.suppress(OSError):  # the answer may be there already
        while (message := await take())["type"] != "http.disconnect":
            if whole.is_set():
                continue
            data, more = message.get("body", b""), message.get("more_body", False)
            if chunked:
                data = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
                data += b"" if more else b"0\r\n\r\n"
            if data:
                await line.write(data)
            if not more:
                whole.set()
        line.abort()


# Websockets: those of meetings go to the leader, links of nodes are refused.


# Without a leader, a link is refused when there is one, and at the latest after this time. A
# thousand nodes then wait for the next leader without dialling every second.
HOLD_S_MAX = 5.0
LINK_LOOK_S = 0.1
# The library makes these itself.
HANDSHAKE = (b"sec-websocket-", b"upgrade", b"connection", b"host")


Result = TypeVar("Result")


class Leader(Protocol):
    """A row of the table `heads`."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...


async def unless(over: Callable[[], bool], work: Awaitable[Result], look_s: float) -> Result:
    """What the work brings. OSError if it has not ended when `over` says so."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            await asyncio.wait([task], timeout=look_s)
            if task.done():
                return task.result()
            if over():
                raise OSError("it does not matter any more")
    finally:
        task.cancel()


async def hold_link(receive: Receive, send: Send, leader: Callable[[], Leader | None]) -> None:
    """Refuse a node's link, and say where the leader is. The node dials it at once."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HOLD_S_MAX
    if leader() is None:
        with contextlib.suppress(OSError):
            await unless(lambda: bool(leader()) or loop.time() >= until, receive(), LINK_LOOK_S)
            return  # it has left
    found = leader()
    known = [(reaching.LEADER.encode(), found.url.encode())] if found else []
    await refuse(receive, send, Refusal(503, "this head does not lead", retry_s=RETRY_S), known)


async def refuse(receive: Receive, send: Send, error: Refusal, more: Headers = ()) -> None:
    await answer(send, error, "websocket.", more)
    # The server would complain if this ended before the connection has.
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(receive(), LINK_LOOK_S)


async def tunnel(
    scope: Any,
    receive: Receive,
    send: Send,
    url: str,
    headers: list[tuple[bytes, bytes]],
    trust: Callable[[], ssl.SSLContext],
) -> None:
    """Messages in both directions, one at a time, until either end is closed."""
    from websockets.exceptions import InvalidStatus, WebSocketException

    query = scope.get("query_string", b"")
    path = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    kept = [(n.decode(), v.decode("latin-1")) for n, v in headers if not n.startswith(HANDSHAKE)]
    how: dict[str, Any] = {"ssl": trust()} if url.startswith("https:") else {}
    try:
        address = f"ws{url.removeprefix('http')}{path.decode('ascii')}"
        far = await open_channel(address, kept, CONNECT_S, None, **how)
    except InvalidStatus as error:
        raise Refusal(error.response.status_code, "the leader refuses this") from None
    except (OSError, TimeoutError, WebSocketException):
        message = "the head that leads cannot be reached"
        raise Refusal(503, message, retry_s=RETRY_S) from None
    keep_alive(far.transport.get_extra_info("socket"), GONE_S)
    await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
    try:
        await _pass(receive, send, far)
    finally:
        far.transport.abort()


async def _pass(receive: Receive, send: Send, far: Any) -> None:
    from websockets.exceptions import ConnectionClosed

    async def outward() -> None:
        while True:
            message: Any = await receive()
            if message["type"] == "websocket.disconnect":
                await far.close(_sendable(message.get("code")))
                return
            data = message.get("bytes")
            await far.send(data if data is not None else message.get("text") or "")

    async def inward() -> None:
        async for data in far:
            kind = "bytes" if isinstance(data, bytes) else "text"
            message: Any = {"type": "websocket.send", kind: data}
            await send(message)
        code = _sendable(far.close_code)
        await send({"type": "websocket.close", "code": code, "reason": far.close_reason or ""})

    moving = [asyncio.create_task(outward()), asyncio.create_task(inward())]
    try:
        await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in moving:
            task.cancel()
        for task in moving:
            with contextlib.suppress(
                asyncio.CancelledError, ConnectionClosed, OSError, RuntimeError
            ):
                await task
    if far.close_code is None or far.close_code == 1006:
        with contextlib.suppress(Exception):  # the caller may have left first
            lost: Any = {"type": "websocket.close", "code": PARTNER_GONE, "reason": ""}
            await send(lost)


def _sendable(code: int | None) -> int:
    """1005 and 1006 say that there was no code; they may not be sent."""
    return code if code is not None and (code == 1000 or 3000 <= code < 5000) else 1001
