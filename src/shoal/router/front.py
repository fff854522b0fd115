"""A connection from the proxy: requests as they come, and how they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import unquote_to_bytes

import httptools

from shoal.router.books import say
from shoal.router.wire import (
    AHEAD_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    NOT_COPIED,
    OURS,
    Flow,
    Headers,
    Inbox,
    Lost,
    reason,
)

PIPELINED_MAX = 64
SKIP_BYTES_MAX, SKIP_S = 64 << 20, 10.0  # of a body that was refused
# Two of these may be read in two ways: the proxy by the one, the replica by the other.
ONCE = {b"host", b"content-length", b"content-type", b"transfer-encoding", b"authorization"}


class Gone(Exception):
    """The client has hung up."""


class Request:
    """What a client asked for."""

    __slots__ = (
        "began",
        "headers",
        "inbox",
        "keep",
        "length",
        "method",
        "old",
        "target",
        "upgrade",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.headers: Headers = []
        self.length: int | None = None  # None: in parts
        self.upgrade = False
        self.keep = True
        self.old = False  # HTTP/1.0
        self.inbox = Inbox()
        self.began = time.monotonic()

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    @property
    def path(self) -> bytes:
        """As engines read it, so that none can be reached by another spelling."""
        return unquote_to_bytes(self.target.partition(b"?")[0])

    def problem(self) -> str:
        """Why it is refused before anybody reads it; "" if it is not."""
        seen: set[bytes] = set()
        for name, _ in self.headers:
            if name in seen and (name in ONCE or name.startswith(OURS)):
                return f"the header {name.decode('latin-1')} is there twice"
            seen.add(name)
        if b"content-length" in seen and b"transfer-encoding" in seen:
            return "it has a content-length and a transfer-encoding"
        return ""


class Front(Flow):
    """A connection from the proxy. Requests on it are answered one after the other."""

    def __init__(
        self, handle: Callable[[Front, Request], Awaitable[None]], open_: set[Front], most: int
    ) -> None:
        super().__init__()
        self._handle = handle
        self._open = open_
        self._most = most
        self._parser = httptools.HttpRequestParser(self)
        self._building = Request()
        self._head_bytes = 0
        self._requests: deque[Request] = deque()  # the first one is being answered
        self._why = "not HTTP/1.1 that can be read in one way only"
        self._status = 400
        self._task: asyncio.Task[None] | None = None
        self._chunked = False  # the answer
        self.began = False  # the answer has
        self.rest = b""  # what came behind a request for an upgrade

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._open) >= self._most:
            self.transport.abort()  # the proxy goes straight to a replica
        else:
            self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._open.discard(self)
        if self._task is not None:
            self._task.cancel()

    @property
    def idle(self) -> bool:
        return self._task is None and self.raw is None

    def data_received(self, data: bytes) -> None:
        if self.raw is not None:
            self.raw.transport.write(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.rest += data[upgrade.args[0] :]
            self.hold()
        except httptools.HttpParserError:
            self._reject()

    def _reject(self) -> None:
        """Requests before it are lost with it: whoever sends such a thing is no proxy of ours."""
        if self._task is not None:
            self._task.cancel()
        if not self.closed and not self.began:
            self.transport.write(refusal(self._status, self._why, close=True))
        self.transport.close()

    # -- what the parser calls

    def on_message_begin(self) -> None:
        self._building = Request()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._building.target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._building.headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX or len(self._building.headers) > HEADERS_MAX:
            self._status, self._why = 431, "its head is too long"
            raise ValueError(self._why)

    def on_headers_complete(self) -> None:
        request = self._building
        request.method = self._parser.get_method()
        request.upgrade = bool(self._parser.should_upgrade())
        request.keep = bool(self._parser.should_keep_alive())
        request.old = self._parser.get_http_version() == "1.0"
        length = request.header(b"content-length")
        if length:
            request.length = int(length)
        elif not request.header(b"transfer-encoding"):
            request.length = 0
        problem = request.problem()
        if not problem and len(self._requests) >= PIPELINED_MAX:
            problem = "too many requests at once"
        if problem:
            self._why = problem
            raise ValueError(problem)
        self._requests.append(request)
        if len(self._requests) > 1:
            self.hold()
        else:
            self._start()

    def on_body(self, data: bytes) -> None:
        self._building.inbox.put(data)
        if self._building.inbox.size > AHEAD_BYTES_MAX:
            self.hold()

    def on_message_complete(self) -> None:
        self._building.inbox.finish()

    # -- what an answer is made with

    def _start(self) -> None:
        self.began = False
        self._task = asyncio.get_running_loop().create_task(self._answer(self._requests[0]))

    async def _answer(self, request: Request) -> None:
        try:
            await self._handle(self, request)
            if not request.inbox.whole and not request.upgrade:
                await self._skip(request)
        except (Gone, asyncio.CancelledError):
            self.transport.abort()
            return
        except Exception as error:
            # Its text may have words of a prompt in it.
            say(f"{type(error).__name__} at {place(error)}")
            if not self.began:
                self.transport.write(refusal(500, "the router failed; see its log", close=True))
            self.transport.close()
            return
        finally:
            self._task = None
        if self.closed or self.raw is not None:
            return
        self._requests.popleft()
        if not request.keep or not request.inbox.whole or request.upgrade:
            self.transport.close()
        elif self._requests:
            self._start()
        else:
            self.unhold()

    async def _skip(self, request: Request) -> None:
        """The rest of a body that nobody wants. Closing at once would take the answer from a client
        that still sends."""
        size = 0
        with contextlib.suppress(TimeoutError, Lost):
            async with asyncio.timeout(SKIP_S):
                while size < SKIP_BYTES_MAX and (data := await request.inbox.read(self)):
                    size += len(data)

    def go_on(self, request: Request) -> None:
        if request.header(b"expect").lower() == b"100-continue" and not request.inbox.size:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def switch(self, headers: Headers) -> None:
        """To another protocol."""
        self.began = True
        head = [b"%s: %s\r\n" % one for one in headers if one[0] not in NOT_COPIED]
        head += [b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"]
        self.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n" + b"".join(head))

    def begin(
        self,
        request: Request,
        status: int,
        headers: Headers,
        length: int | None,
        bare: bool = False,
    ) -> None:
        """`length` None: the body comes in parts. `bare`: there is none, and its length is not
        said."""
        self.began = True
        self._chunked = length is None and not request.old
        if length is None and request.old:
            request.keep = False
        head = [b"HTTP/1.1 %d %s\r\n" % (status, reason(status))]
        head += [b"%s: %s\r\n" % one for one in headers if one[0] not in NOT_COPIED]
        if length is not None and not bare:
            head.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            head.append(b"transfer-encoding: chunked\r\n")
        if not request.keep:
            head.append(b"connection: close\r\n")
        self.transport.write(b"".join([*head, b"\r\n"]))

    async def write(self, data: bytes) -> None:
        if self.closed:
            raise Gone
        if self._chunked:
            self.transport.writelines([b"%x\r\n" % len(data), data, b"\r\n"])
        else:
            self.transport.write(data)
        await self.drain()

    def end(self) -> None:
        if self._chunked and not self.closed:
            self.transport.write(b"0\r\n\r\n")

    async def answer(self, request: Request, status: int, headers: Headers, body: bytes) -> None:
        self.begin(request, status, headers, len(body))
        if request.method != b"HEAD":
            await self.write(body)


def refusal(status: int, why: str, close: bool = False) -> bytes:
    body = why.encode() + b"\n"
    head = b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%s\r\n%s"
    return head % (status, reason(status), len(body), b"connection: close\r\n" * close, body)


def place(error: BaseException) -> str:
    """Where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "?"
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
