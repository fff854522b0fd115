"""Messages between two ends of a session: in order and each once, though connections may break.

Each end counts the messages that it got. On a new connection both say their count first, and go on
with the next message. What the other end has not confirmed is kept, within a bound.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

KEPT_BYTES_MAX = 4 * 1024 * 1024  # sent and not confirmed; then writers wait
CONFIRM_BYTES = 256 * 1024  # a confirmation at least this often,
CONFIRM_MESSAGES = 64  # and this often
HELLO_S_MAX = 40.0  # for the first word of the other end

HELLO, CONFIRM, MESSAGE = b"H", b"C", b"M"
_COUNT = struct.Struct("!Q")


class Connection(Protocol):
    """A websocket, in our words."""

    async def send(self, data: bytes, /) -> None: ...

    async def recv(self) -> str | bytes: ...

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...


class Broken(Exception):
    """The other end does not follow the protocol, or is not who it was."""


class Reliable:
    """`deliver` gets each message once. It must not wait: streams bound what it can get."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self._deliver = deliver
        self._kept: deque[bytes] = deque()  # not confirmed; the first has the number `_first`
        self._kept_bytes = 0
        self._first = 0
        self._got = 0
        self._got_bytes = 0
        self._confirmed = 0
        self._cursor = 0  # the number of the next message to send on this connection
        self.met_at = 0.0  # when the other end was last there, by this machine's monotonic clock
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def push(self, message: bytes) -> None:
        """Without waiting: for short messages, whose number is bounded otherwise."""
        self._kept.append(message)
        self._kept_bytes += len(message)
        if self._kept_bytes >= KEPT_BYTES_MAX:
            self._room.clear()
        self._news.set()

    async def send(self, message: bytes) -> None:
        await self._room.wait()
        self.push(message)

    @property
    def flushed(self) -> bool:
        """Everything was sent on the present connection."""
        return self._cursor >= self._first + len(self._kept)

    async def carry(self, connection: Connection) -> None:
        """Until the connection ends, which raises or returns as the connection does."""
        await connection.send(HELLO + _COUNT.pack(self._got))
        first = await asyncio.wait_for(connection.recv(), HELLO_S_MAX)
        if not isinstance(first, bytes) or first[:1] != HELLO or len(first) != 9:
            raise Broken("the other end does not speak as expected")
        self._forget(_COUNT.unpack(first[1:])[0])
        self.met_at = time.monotonic()
        self._cursor = self._first
        self._confirmed, self._got_bytes = self._got, 0
        receiving = asyncio.create_task(self._receive_from(connection))
        sending = asyncio.create_task(self._send_on(connection))
        both = {receiving, sending}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        for task in done:
            task.result()

    async def _receive_from(self, connection: Connection) -> None:
        async for data in connection:
            if isinstance(data, bytes):
                self._take(data)

    async def _send_on(self, connection: Connection) -> None:
        while True:
            self._news.clear()
            if self._confirm_due:
                self._confirmed, self._got_bytes = self._got, 0
                await connection.send(CONFIRM + _COUNT.pack(self._got))
            if not self.flushed:
                message = self._kept[self._cursor - self._first]
                self._cursor += 1
                await connection.send(MESSAGE + message)
            elif not self._confirm_due:
                await self._news.wait()

    @property
    def _confirm_due(self) -> bool:
        many = self._got - self._confirmed >= CONFIRM_MESSAGES
        return many or self._got_bytes >= CONFIRM_BYTES

    def _take(self, data: bytes) -> None:
        kind = data[:1]
        if kind == MESSAGE:
            self._got += 1
            self._got_bytes += len(data)
            if self._confirm_due:
                self._news.set()
            self._deliver(data[1:])
        elif kind == CONFIRM and len(data) == 9:
            self._forget(_COUNT.unpack(data[1:])[0])

    def _forget(self, count: int) -> None:
        if not self._first <= count <= self._first + len(self._kept):
            raise Broken("the other end has lost what it got before")
        while self._first < count:
            self._kept_bytes -= len(self._kept.popleft())
            self._first += 1
        self._cursor = max(self._cursor, self._first)
        if self._kept_bytes < KEPT_BYTES_MAX:
            self._room.set()
