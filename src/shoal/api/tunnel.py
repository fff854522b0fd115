"""Websockets at a standby: those of meetings go to the leader, links of nodes are refused."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from litestar.types import Receive, Send

from shoal.api.forwarded import RETRY_S, Headers, answer
from shoal.api.problems import Refusal
from shoal.client import reaching
from shoal.client.keepalive import keep_alive
from shoal.link.http import CONNECT_S, GONE_S
from shoal.link.meeting import PARTNER_GONE, open_channel

# Without a leader, a link is refused when there is one, and at the latest after this time. A
# thousand nodes then wait for the next leader without dialling every second.
HOLD_S_MAX = 5.0
LOOK_S = 0.1
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
            await unless(lambda: bool(leader()) or loop.time() >= until, receive(), LOOK_S)
            return  # it has left
    found = leader()
    known = [(reaching.LEADER.lower().encode(), found.url.encode())] if found else []
    await refuse(receive, send, Refusal(503, "this head does not lead", retry_s=RETRY_S), known)


async def refuse(receive: Receive, send: Send, error: Refusal, more: Headers = ()) -> None:
    await answer(send, error, "websocket.", more)
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
