"""One request and its answer: turns the messages of an ASGI application into the bytes of HTTP/1.1.

In place of uvicorn's own, because every request passes through it: the head of an answer goes with
the first part of its body, and its headers are looked at together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from shoal.api.http import NO_BODY, ASGIApp, Message

log = logging.getLogger("shoal.api")

STATUS_LINE = {one.value: f"HTTP/1.1 {one.value} {one.phrase}".encode() for one in HTTPStatus}


class Exchange:
    """`done` is called when the answer is complete."""

    __slots__ = (
        "_body",
        "_chunked",
        "_done",
        "_expects_continue",
        "_flow",
        "_head",
        "_left",
        "_method",
        "_scope",
        "_transport",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
    )

    def __init__(
        self,
        scope: dict[str, Any],
        transport: asyncio.Transport,
        flow: FlowControl,
        done: Callable[[], None],
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._scope, self._method = scope, scope["method"]
        self._transport, self._flow, self._done = transport, flow, done
        self._expects_continue = expects_continue
        self.keep_alive = keep_alive
        self.message_event = asyncio.Event()  # there is more to receive
        self.disconnected = False
        self.more_body = True
        self._body = b""
        self.response_started = self.response_complete = False
        self._chunked = False
        self._left = 0  # bytes of the answer that its length promises
        self._head = b""  # of the answer, as long as it is not sent

    async def run_asgi(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self.receive, self.send)
            if not (self.response_complete or self.disconnected):
                raise RuntimeError("the application has not answered")
        except BaseException as error:
            log.error("%s %s failed", self._method, self._scope["path"], exc_info=error)
            if self.response_started or self.disconnected:
                self._transport.close()
                return
            self.keep_alive = False
            headers = [(b"content-length", b"0")]
            await self.send({"type": "http.response.start", "status": 500, "headers": headers})
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._done = _nothing

    # -- the request ---------------------------------------------------------------------------

    def add(self, body: bytes) -> None:
        self._body = self._body + body if self._body else body
        if len(self._body) > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        self.message_event.set()

    def end(self) -> None:
        """Its body is complete."""
        self.more_body = False
        self.message_event.set()

    async def receive(self) -> Message:
        if self._expects_continue and not self._transport.is_closing():
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not (self.disconnected or self.response_complete):
            self._flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    # -- the answer ----------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message["status"], message["headers"])
            self.response_started, self._expects_continue = True, False
            if self._chunked:  # nobody knows when its first part comes
                asyncio.get_running_loop().call_soon(self._send_head)
            return
        if self.response_complete:
            raise RuntimeError("the answer was complete already")
        more = message.get("more_body", False)
        self._write(message.get("body", b""), more=more)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self._transport.close()
            self._done()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        lines, length, chunked = [STATUS_LINE[status]], None, False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
                continue
            lines.append(name + b": " + value)
        if not self.keep_alive:
            lines.append(b"connection: close")
        if self._method == "HEAD" or status in NO_BODY:
            length = 0
        elif length is None:
            self._chunked = True
            if not chunked:
                lines.append(b"transfer-encoding: chunked")
        self._left = length or 0
        head = b"\r\n".join(lines)
        if not len(lines) - 1 == head.count(b"\r") == head.count(b"\n") or b"\0" in head:
            raise RuntimeError("a header of the answer has a line of its own in it")
        self._head = head + b"\r\n\r\n"

    def _write(self, body: bytes, *, more: bool) -> None:
        if self._method == "HEAD":
            body = b""
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        else:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the answer is not as long as it says")
        head, self._head = self._head, b""
        if head or body:
            self._transport.write(head + body if head else body)

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


def _nothing() -> None: ...
