"""Connections from a standby to the leader: a request and its answer, streamed both ways."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from shoal.client.keepalive import keep_alive

CONNECT_S = 2.0
IDLE_S = 3.0  # less than the 5 s after which a head closes a connection without a request
IDLE_MAX = 32
QUEUED_BYTES_MAX = 256 * 1024  # of an answer that our client has not taken yet
GONE_S = 5  # without a sign of life from the leader's kernel

Headers = list[tuple[bytes, bytes]]


class Unsent(OSError):
    """The leader was not reached, so it does not know of the request."""


class Relay:
    """Keeps a few connections open. `trust` gives what verifies the leader's certificate."""

    def __init__(self, trust: Callable[[], ssl.SSLContext]) -> None:
        self._trust = trust
        self._idle: dict[str, deque[tuple[float, Line]]] = {}

    async def take(self, url: str) -> Line:
        """A connection to a head, for one request. `Unsent` if it does not answer."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(url, deque())
        while idle:
            since, line = idle.pop()
            if line.usable and loop.time() - since < IDLE_S:
                return line
            line.abort()
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        try:
            async with asyncio.timeout(CONNECT_S):
                _, line = await loop.create_connection(
                    lambda: Line(url),
                    parts.hostname or "",
                    parts.port or (443 if secure else 80),
                    ssl=self._trust() if secure else None,
                    server_hostname=parts.hostname if secure else None,
                )
        except (OSError, TimeoutError) as error:
            raise Unsent(str(error) or "it does not answer") from None
        return line

    def give(self, line: Line) -> None:
        """After the end of an answer."""
        idle = self._idle.setdefault(line.url, deque())
        if line.usable and len(idle) < IDLE_MAX:
            idle.append((asyncio.get_running_loop().time(), line))
        else:
            line.abort()

    def close(self) -> None:
        for idle in self._idle.values():
            for _, line in idle:
                line.abort()
        self._idle.clear()


class Line(asyncio.Protocol):
    """One connection. What arrives waits here, up to a bound, until `next` takes it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._parser: httptools.HttpResponseParser | None = None
        self._bare = False  # an answer to HEAD: its length is that of a body that does not come
        self._lost: Exception | None = None
        self._headers: Headers = []
        self._queue: deque[tuple[int, Headers] | bytes | None] = deque()
        self._queued = 0
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._done = True
        self._keeps = True

    @property
    def usable(self) -> bool:
        return self._done and self._keeps and self._lost is None

    # -- the request ---------------------------------------------------------------------------

    def begin(self, method: str, head: bytes) -> None:
        """Send the head of a request."""
        self._parser = httptools.HttpResponseParser(self)
        self._bare = method == "HEAD"
        self._headers, self._done = [], False
        self._queue.clear()
        self._queued = 0
        self._send(head)

    async def write(self, data: bytes) -> None:
        await self._writable.wait()
        self._send(data)

    def _send(self, data: bytes) -> None:
        """A transport that is closed raises what is no OSError; `next` tells of the loss."""
        if self._lost is None and not self._transport.is_closing():
            self._transport.write(data)
        else:
            self._fail(OSError("the connection to the leader ended"))

    # -- the answer ----------------------------------------------------------------------------

    async def next(self) -> tuple[int, Headers] | bytes | None:
        """First the status and headers, then the body's pieces, then None. OSError if the leader
        ends before that."""
        while not self._queue:
            if self._lost is not None:
                raise OSError(str(self._lost))
            self._arrived.clear()
            await self._arrived.wait()
        piece = self._queue.popleft()
        if isinstance(piece, bytes):
            self._queued -= len(piece)
            ended = self._lost is not None or self._transport.is_closing()
            if self._queued < QUEUED_BYTES_MAX // 2 and not ended:
                self._transport.resume_reading()
        return piece

    def abort(self) -> None:
        self._transport.abort()

    # -- asyncio's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            keep_alive(connection, GONE_S)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done:
            self.abort()  # an answer that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.abort()

    def eof_received(self) -> None:
        self._fail(OSError("the leader closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or OSError("the connection to the leader ended"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _fail(self, error: Exception) -> None:
        self._lost = self._lost or error
        self._arrived.set()
        self._writable.set()

    def _put(self, piece: tuple[int, Headers] | bytes | None) -> None:
        self._queue.append(piece)
        self._arrived.set()

    # -- the parser's side ---------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self._keeps = self._parser.should_keep_alive() and not self._bare
        self._put((status, self._headers))
        if self._bare:
            self._finish()

    def on_body(self, body: bytes) -> None:
        if self._bare:
            return
        self._put(body)
        self._queued += len(body)
        if self._queued > QUEUED_BYTES_MAX:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200 and not self._done:
            self._finish()

    def _finish(self) -> None:
        self._done = True
        self._put(None)
