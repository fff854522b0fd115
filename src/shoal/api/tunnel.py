"""Websockets at a standby: those of meetings go to the leader, links of nodes are refused."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from litestar.types import Receive, Send

from shoal.api.relay import CONNECT_S, GONE_S
from shoal.client import reaching
from shoal.client.keepalive import keep_alive
from shoal.link.meeting import MESSAGE_BYTES_MAX, PARTNER_GONE, wire_log
from shoal.model.views import Problem

# Without a leader, a link is refused when there is one, and at the latest after this time. A
# thousand nodes then wait for the next leader without dialling every second.
HOLD_S_MAX = 5.0
LOOK_S = 0.1
PIECE_BYTES = 64 * 1024
# The library makes these itself.
HANDSHAKE = (b"sec-websocket-", b"upgrade", b"connection", b"host")


class Named(Protocol):
    @property
    def url(self) -> str: ...


async def hold_link(receive: Receive, send: Send, leader: Callable[[], Named | None]) -> None:
    """Refuse a node's link, and say where the leader is. The node dials it at once."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HOLD_S_MAX
    await receive()  # websocket.connect
    gone = asyncio.ensure_future(receive())
    try:
        while (found := leader()) is None and loop.time() < until:
            await asyncio.wait([gone], timeout=LOOK_S)
            if gone.done():
                return
    finally:
        gone.cancel()
    known = [(reaching.LEADER.lower().encode(), found.url.encode())] if found else []
    await _refuse(receive, send, 503, "this head does not lead", known)


async def refuse(receive: Receive, send: Send, status: int, message: str) -> None:
    await receive()
    await _refuse(receive, send, status, message, [])


async def _refuse(
    receive: Receive, send: Send, status: int, message: str, more: list[tuple[bytes, bytes]]
) -> None:
    body = msgspec.json.encode(Problem(message=message))
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), *more]
    headers.append((b"content-length", b"%d" % len(body)))
    start: Any = {"type": "websocket.http.response.start", "status": status, "headers": headers}
    end: Any = {"type": "websocket.http.response.body", "body": body, "more_body": False}
    await send(start)
    await send(end)
    # The server would complain if this ended before the connection has.
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(receive(), LOOK_S)


async def tunnel(
    scope: Any,
    receive: Receive,
    send: Send,
    url: str,
    headers: list[tuple[bytes, bytes]],
    trust: Callable[[], ssl.SSLContext],
) -> None:
    """Messages in both directions, one at a time, until either end is closed."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, WebSocketException

    await receive()  # websocket.connect
    query = scope.get("query_string", b"")
    path = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    kept = [(n.decode(), v.decode("latin-1")) for n, v in headers if not n.startswith(HANDSHAKE)]
    how: dict[str, Any] = {"ssl": trust()} if url.startswith("https:") else {}
    try:
        far = await connect(
            f"ws{url.removeprefix('http')}{path.decode('ascii')}",
            additional_headers=kept,
            **how,
            proxy=None,
            compression=None,
            open_timeout=CONNECT_S,
            ping_interval=None,
            close_timeout=1.0,
            max_size=MESSAGE_BYTES_MAX,
            max_queue=4,
            write_limit=PIECE_BYTES,
            logger=wire_log,
        )
    except InvalidStatus as error:
        await _refuse(receive, send, error.response.status_code, "the leader refuses this", [])
        return
    except (OSError, TimeoutError, WebSocketException):
        await _refuse(receive, send, 503, "the head that leads cannot be reached", [])
        return
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
