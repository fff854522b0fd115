"""HTTP/1.1 on httptools' parser: what both sides share, and connections to replicas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from http import HTTPStatus

import httptools

HEAD_BYTES_MAX = 128 << 10
HEADERS_MAX = 256
AHEAD_BYTES_MAX = 256 << 10  # read from one side before the other has taken it
IDLE_S = 4.0  # uvicorn closes a connection after 5 s without a request
IDLE_MAX = 64  # connections kept for each replica
OF_THE_HOP = {
    b"connection",
    b"expect",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
NOT_COPIED = OF_THE_HOP | {b"content-length"}
OURS = b"x-shoal-"
Headers = list[tuple[bytes, bytes]]


class Lost(Exception):
    """The connection to a replica ended, or what came was not HTTP. `sent`: whether the replica may
    have seen the request."""

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class Inbox:
    """Bytes that have come and wait to be taken, of one message."""

    __slots__ = ("chunks", "news", "size", "whole", "why")

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        self.size = 0
        self.whole = False
        self.why = ""  # no more will come, and it is not whole
        self.news: asyncio.Future[None] | None = None

    def put(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)
        self.tell()

    def finish(self) -> None:
        self.whole = True
        self.tell()

    def fail(self, why: str) -> None:
        self.why = self.why or why
        self.tell()

    def tell(self) -> None:
        news, self.news = self.news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def wait(self) -> None:
        self.news = asyncio.get_running_loop().create_future()
        await self.news

    async def read(self, flow: Flow) -> bytes:
        """The next part; b"" at the end."""
        while not self.chunks:
            if self.whole:
                return b""
            if self.why:
                raise Lost(self.why)
            await self.wait()
        data = b"".join(self.chunks) if len(self.chunks) > 1 else self.chunks[0]
        self.chunks.clear()
        self.size = 0
        flow.unhold()
        return data


class Flow(asyncio.Protocol):
    """What both sides share: reading is held while much waits, and a writer may have to wait."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.closed = False
        self.raw: Flow | None = None  # after an upgrade: the other side
        self._held = False
        self._room: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.closed = True
        self.resume_writing()
        if self.raw is not None and not self.raw.closed:
            self.raw.transport.close()

    def pause_writing(self) -> None:
        if self.raw is not None:
            self.raw.hold()
        elif self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self.raw is not None:
            self.raw.unhold()
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def drain(self) -> None:
        if self._room is not None:
            await asyncio.shield(self._room)

    def hold(self) -> None:
        if not self._held and not self.closed:
            self._held = True
            self.transport.pause_reading()

    def unhold(self) -> None:
        if self._held and not self.closed:
            self._held = False
            self.transport.resume_reading()


def join(one: Flow, other: Flow) -> None:
    """From now on, each gets the bytes of the other."""
    one.raw, other.raw = other, one
    one.unhold()
    other.unhold()


class Line(Flow):
    """A connection to a replica."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: Headers = []
        self.inbox = Inbox()
        self._keep = False
        self._bare = 0  # bytes that came since the last one of a body
        self.heard = time.monotonic()

    def begin(self, *data: bytes) -> None:
        self.status, self.headers, self.inbox, self._bare = 0, [], Inbox(), 0
        self.heard = time.monotonic()
        self.transport.writelines(data)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if self.raw is not None:
            self.raw.transport.write(data)
            return
        self._bare += len(data)  # the parser keeps a header until its end
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.inbox.put(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.give_up("the replica's answer is not HTTP")
        if self._bare > len(data) + HEAD_BYTES_MAX:
            self.give_up("the replica's headers are too long")

    def eof_received(self) -> None:
        if self.status and not self._framed():
            self.inbox.finish()  # such an answer ends with its connection

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.inbox.fail("the replica closed the connection")

    def give_up(self, why: str) -> None:
        self.inbox.fail(why)
        if not self.closed:
            self.transport.abort()

    def _framed(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        if len(self.headers) > HEADERS_MAX or len(name) + len(value) > HEAD_BYTES_MAX:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            self.headers = []  # 100 and the like: the answer follows
            return
        self.status = status
        self._keep = bool(self._parser.should_keep_alive())  # it is forgotten at the end
        self.inbox.tell()

    def on_body(self, data: bytes) -> None:
        self._bare = 0
        self.inbox.put(data)
        if self.inbox.size > AHEAD_BYTES_MAX:
            self.hold()

    def on_message_complete(self) -> None:
        if self.status:
            self.inbox.finish()

    def write(self, data: bytes, chunked: bool) -> None:
        if chunked:
            self.transport.writelines([b"%x\r\n" % len(data), data, b"\r\n"])
        else:
            self.transport.write(data)

    async def head(self) -> int:
        """The status of the answer; its headers are there then."""
        while not self.status:
            if self.inbox.why:
                raise Lost(self.inbox.why)
            await self.inbox.wait()
        return self.status

    async def read(self) -> bytes:
        """The next part of the body; b"" at its end."""
        return await self.inbox.read(self)

    @property
    def reusable(self) -> bool:
        return self.inbox.whole and not self.closed and not self.inbox.chunks and self._keep


class Pool:
    """Connections to one replica. `lag_s`: how late this process is. It is no replica's fault."""

    lag_s = 0.0

    def __init__(self, address: str, port: int) -> None:
        self.address, self.port = address, port
        self._idle: list[Line] = []
        self.busy: set[Line] = set()

    async def take(self, timeout_s: float, fresh: bool = False) -> Line:
        """`fresh`: a new connection, for what must not be sent twice."""
        now = time.monotonic()
        while self._idle and not fresh:
            line = self._idle.pop()
            if not line.closed and now - line.heard < IDLE_S:
                self.busy.add(line)
                return line
            if not line.closed:
                line.transport.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s + 10 * self.lag_s):
                _, line = await loop.create_connection(Line, self.address, self.port)
        except (OSError, TimeoutError) as error:
            raise Lost(f"cannot connect: {type(error).__name__}", sent=False) from None
        self.busy.add(line)
        return line

    def put(self, line: Line) -> None:
        """Back, when its answer was read; whatever cannot be used again is closed."""
        self.busy.discard(line)
        if line.reusable and len(self._idle) < IDLE_MAX:
            line.heard = time.monotonic()
            self._idle.append(line)
        elif not line.closed:
            line.transport.abort()

    async def tunnel(self, line: Line) -> None:
        """Until either side ends it."""
        while not line.closed:
            await line.inbox.wait()
        self.busy.discard(line)

    def sweep(self, now: float, silence_s: float) -> None:
        """Close what is idle for long; give up what is silent for too long."""
        for line in [one for one in self._idle if one.closed or now - one.heard >= IDLE_S]:
            self._idle.remove(line)
            if not line.closed:
                line.transport.close()
        for line in list(self.busy):
            if now - line.heard > silence_s and line.raw is None:
                line.give_up("the replica was silent for too long")

    def close(self) -> None:
        """Those in use go on."""
        for line in self._idle:
            line.transport.close()
        self._idle.clear()


def request_head(method: bytes, target: bytes, headers: Headers, length: int | None) -> bytes:
    head = [b"%s %s HTTP/1.1\r\n" % (method, target)]
    head += [b"%s: %s\r\n" % one for one in headers]
    if length is None:
        head.append(b"transfer-encoding: chunked\r\n")
    elif length or method not in (b"GET", b"HEAD", b"OPTIONS"):
        head.append(b"content-length: %d\r\n" % length)
    return b"".join([*head, b"\r\n"])


def for_a_replica(headers: Headers, drop: frozenset[bytes] = frozenset()) -> Headers:
    """Without what is between two hops, and without what only the proxy may say, in any spelling
    that a server could take for it."""
    named = {
        one.strip().lower()
        for key, value in headers
        if key == b"connection"
        for one in value.split(b",")
    }
    return [
        (name, value)
        for name, value in headers
        if name not in NOT_COPIED
        and name not in named
        and name not in drop
        and not name.replace(b"_", b"-").startswith(OURS)
    ]


def reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"
