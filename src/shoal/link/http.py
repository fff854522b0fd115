"""HTTP by hand, within bounds: a request and its answer, streamed over a connection of asyncio; or
all at once in a thread that may wait."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from shoal.client.keepalive import keep_alive

CONNECT_S = 2.0
HEAD_BYTES_MAX = 64 * 1024
PIECE_BYTES = 64 * 1024
IDLE_S = 3.0  # less than the 5 s after which a head closes a connection without a request
IDLE_MAX = 32
GONE_S = 5  # without a sign of life from the server's kernel

Headers = list[tuple[bytes, bytes]]


class Unsent(OSError):
    """The server was not reached, so it does not know of the request."""


def request_head(method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target)]
    lines += [b"%s: %s" % pair for pair in headers]
    return b"\r\n".join([*lines, b"", b""])


def last_answer(status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """One in JSON, after which the connection is closed."""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    more = b"".join(b"%s: %s\r\n" % pair for pair in headers)
    ending = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return head.encode() + more + ending + body


Connect = Callable[[str, int], socket.socket]


def fetch(
    url: str,
    body: bytes | None,
    headers: dict[str, str],
    connect: Connect,
    within_s: float,
    body_max: int = 0,
) -> tuple[int, bytes]:
    """The status, and `body_max` bytes of the answer, to a GET, or with a body to a POST. It
    blocks. Redirects are not followed, because they could lead where the URL itself may not, and
    proxies are not used. OSError, ValueError or HTTPException."""
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    usual = 443 if secure else 80
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sock = connect(host, parts.port or usual)
    with contextlib.closing(sock), ended_after(within_s, lambda: sock):
        if secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection = HTTPConnection(host, parts.port or usual)
        connection.default_port = usual
        connection.sock = sock
        with contextlib.closing(connection):
            headers = {**headers, "Connection": "close"}
            connection.request("GET" if body is None else "POST", target, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(body_max) if body_max else b""


@contextlib.contextmanager
def ended_after(seconds: float, sock: Callable[[], Any]) -> Iterator[None]:
    """Time limits of sockets are for each read; this one is for all of it."""

    def end() -> None:
        with contextlib.suppress(OSError, AttributeError):
            sock().shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Relay:
    """Connections, of which a few are kept for the next request. `trust` gives what verifies the
    server's certificate."""

    def __init__(self, trust: Callable[[], ssl.SSLContext]) -> None:
        self._trust = trust
        self._idle: deque[tuple[float, Line]] = deque()

    async def take(self, url: str) -> Line:
        """A connection to a server, for one request. `Unsent` if it does not answer."""
        loop = asyncio.get_running_loop()
        while self._idle:
            since, line = self._idle.pop()
            if line.url == url and line.usable and loop.time() - since < IDLE_S:
                return line
            line.abort()
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                line = await connect(parts.hostname or "", port, self._trust() if secure else None)
        except (OSError, TimeoutError) as error:
            raise Unsent(str(error) or "it does not answer") from None
        keep_alive(line.socket, GONE_S)
        line.url = url
        return line

    def give(self, line: Line) -> None:
        """After the end of an answer."""
        if line.usable and len(self._idle) < IDLE_MAX:
            self._idle.append((asyncio.get_running_loop().time(), line))
        else:
            line.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].abort()


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> Line:
    loop = asyncio.get_running_loop()
    reader = _Reader(PIECE_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=tls)
    return Line(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class _Reader(asyncio.StreamReader):
    asked = False
    surprised = False

    def feed_data(self, data: Any) -> None:
        """What arrives before a request would be taken for the answer to it."""
        self.surprised |= not self.asked
        super().feed_data(data)


class Line:
    """One connection, for one request after another. OSError if the server ends too soon, or does
    not speak HTTP."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self.url = ""
        self._reader, self._writer = reader, writer
        self._bare = False  # an answer to HEAD: its length is that of a body that does not come
        self._keeps = True
        self._chunked = self._within = False  # `within`: a chunk has begun
        self._left: int | None = 0  # bytes of this chunk or body; None: up to the connection's end

    @property
    def usable(self) -> bool:
        at_rest = self._keeps and not self._reader.asked and not self._reader.surprised
        return at_rest and not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def socket(self) -> Any:
        return self._writer.get_extra_info("socket")

    def begin(self, head: bytes) -> None:
        """Send the head of a request."""
        self._bare = head.startswith(b"HEAD ")
        self._reader.asked = True
        self._writer.write(head)

    async def write(self, data: bytes) -> None:
        if self._writer.is_closing():  # writing would raise what is not an OSError
            raise OSError("the connection has ended")
        self._writer.write(data)
        await self._writer.drain()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def status(self) -> int:
        """The first line of the answer."""
        with _as_os_error():
            while True:
                version, status = (await self._line()).split()[:2]
                if int(status) >= 200:
                    break
                await self._headers()
        self._keeps = version == b"HTTP/1.1" and not self._bare
        return int(status)

    async def head(self) -> tuple[int, Headers]:
        status = await self.status()
        with _as_os_error():
            headers = await self._headers()
            known = dict(headers)
            self._keeps &= b"close" not in known.get(b"connection", b"").lower()
            empty, self._within = self._bare or status in (204, 304), False
            coding = known.get(b"transfer-encoding", b"").lower()
            self._chunked = coding == b"chunked" and not empty
            length = b"0" if empty or self._chunked else known.get(b"content-length")
            self._left = _size(length, 10) if length is not None else None
        return status, headers

    async def piece(self) -> bytes:
        """The next part of the body; empty at its end."""
        with _as_os_error():
            if self._left == 0 and self._chunked:
                await self._next_chunk()
            if self._left == 0:
                self._reader.asked = False
                return b""
            data = await self._reader.read(min(self._left or PIECE_BYTES, PIECE_BYTES))
            if self._left is not None:
                if not data:
                    raise EOFError("the answer breaks off")
                self._left -= len(data)
            elif not data:
                self._keeps = False
            return data

    async def _next_chunk(self) -> None:
        if self._within:
            await self._line()  # the end of the one before
        self._left, self._within = _size((await self._line()).partition(b";")[0], 16), True
        if self._left == 0:
            self._chunked = False
            await self._headers()  # trailers

    async def _headers(self) -> Headers:
        headers: Headers = []
        read = 0
        while line := await self._line():
            name, _, value = line.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
            read += len(line)
            if read > HEAD_BYTES_MAX:
                raise ValueError("its headers do not end")
        return headers

    async def _line(self) -> bytes:
        return (await self._reader.readuntil(b"\n")).strip()


def _size(text: bytes, base: int) -> int:
    size = int(text, base)
    if size < 0:
        raise ValueError("less than nothing")
    return size


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise OSError(str(error)) from None
