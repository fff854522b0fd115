"""Numbered streams of bytes over one session, in order and each once, though connections may
break.

A receiver grants a number of bytes, and grants more as they are used, so that a slow stream holds
up neither the others nor the words between the two ends.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from shoal.model.session import Kind

WINDOW_BYTES = 512 * 1024  # of a stream, granted and not used
PIECE_BYTES = 64 * 1024  # of a stream in one message
STREAMS_MAX = 128  # of a session
NOTHING_LEFT = b""
CLOSED = "closed"  # a reset without a reason

SAY, OPEN, DATA, END, RESET, GRANT = range(6)
_HEAD = struct.Struct("!BI")
_NUMBER = struct.Struct("!I")


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Client to node: the size of its terminal."""

    rows: int
    columns: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """Node to client: it is under way."""

    note: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Node to client, as its last word: the exit code, or why it failed."""

    code: int = 0
    why: str = ""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Client to node: for the process."""

    number: int


class Port(msgspec.Struct, frozen=True):
    """In the opening of a stream to a port; 0: the member's own $PORT."""

    port: int


Word = Resize | Began | Ended | Signal
_words = msgspec.msgpack.Decoder(Word)


class Stream:
    """One of them. `read` returns b"" at the other side's end."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self._number = number
        self._arrived: deque[bytes] = deque()
        self._arrived_bytes = 0
        self._used = 0  # read, and not granted again
        self._may = 0  # bytes that we may send
        self._ended = False  # the other side sends nothing more
        self._closed = False  # we send nothing more
        self.reset_why: str | None = None
        self._news = asyncio.Event()

    async def read(self) -> bytes:
        while not self._arrived:
            if self.reset_why is not None:
                raise ConnectionResetError(self.reset_why)
            if self._ended:
                return NOTHING_LEFT
            self._news.clear()
            await self._news.wait()
        data = self._arrived.popleft()
        self._arrived_bytes -= len(data)
        self._used += len(data)
        if self._used >= WINDOW_BYTES // 4:
            self.grant(self._used)
            self._used = 0
        return data

    async def write(self, data: bytes) -> None:
        """Returns when all of it is on its way. ConnectionResetError if nobody reads it."""
        start = 0
        while start < len(data):
            while self._may <= 0 and self.reset_why is None:
                self._news.clear()
                await self._news.wait()
            if self.reset_why is not None:
                raise ConnectionResetError(self.reset_why)
            piece = data[start : start + min(PIECE_BYTES, self._may)]
            self._may -= len(piece)
            start += len(piece)
            await self._streams.send(DATA, self._number, piece)

    def end(self) -> None:
        """We send nothing more."""
        if not self._closed and self.reset_why is None:
            self._closed = True
            self._streams.push(END, self._number)
            self._streams.tidy(self._number, self)

    @property
    def refused(self) -> str:
        """Why the other side did not want it, if it said so."""
        return "" if self.reset_why in (None, CLOSED) else str(self.reset_why)

    def reset(self, why: str = CLOSED) -> None:
        """Nothing more in either direction."""
        if self.reset_why is None:
            self.reset_why = why
            self._streams.push(RESET, self._number, why.encode()[:1024])
            self._streams.forget(self._number)
            self._news.set()

    def grant(self, count: int) -> None:
        if not self._ended and self.reset_why is None:
            self._streams.push(GRANT, self._number, _NUMBER.pack(count))

    @property
    def over(self) -> bool:
        return self._ended and self._closed

    # -- what the other side says --------------------------------------------------------------

    def heard(self, kind: int, body: bytes) -> None:
        if kind == DATA:
            self._arrived_bytes += len(body)
            if self._arrived_bytes > WINDOW_BYTES:
                raise Broken("more was sent than was granted")
            self._arrived.append(body)
        elif kind == END:
            self._ended = True
        elif kind == GRANT:
            self._may += _NUMBER.unpack(body)[0]
        elif kind == RESET and self.reset_why is None:
            self.reset_why = body.decode(errors="replace") or CLOSED
        self._news.set()

    def lost(self, why: str) -> None:
        self.reset_why = self.reset_why or why
        self._news.set()


# Streams that a session of each kind has from its beginning: a process has one for its input and
# output, and one for its error output.
FIXED = {Kind.EXEC: 2, Kind.ATTACH: 2, Kind.SSH: 1, Kind.FORWARD: 0}
FIRST_OPENED = 16


class Streams:
    """`opened` gets streams that the other side opens, `said` gets its words."""

    def __init__(
        self,
        said: Callable[[Word], None],
        opened: Callable[[Stream, bytes], None] | None = None,
    ) -> None:
        self._said = said
        self._opened = opened
        self.used: Callable[[], None] = lambda: None  # called when bytes or a connection come
        self._streams: dict[int, Stream] = {}
        self._next = FIRST_OPENED
        self.reliable = Reliable(self._deliver)

    def open(self, about: Any = None) -> Stream:
        """Both sides may write at once, within what is granted."""
        if len(self._streams) >= STREAMS_MAX:
            raise ConnectionResetError(f"more than {STREAMS_MAX} connections at once")
        stream = self.known(self._next)
        self._next += 1
        body = msgspec.msgpack.encode(about)
        self.push(OPEN, stream._number, body)
        stream.grant(WINDOW_BYTES)
        return stream

    def fixed(self, kind: Kind) -> list[Stream]:
        """Those that both ends have from the beginning."""
        made = [self.known(number) for number in range(1, 1 + FIXED[kind])]
        for stream in made:
            stream.grant(WINDOW_BYTES)
        return made

    def known(self, number: int) -> Stream:
        stream = self._streams[number] = Stream(self, number)
        return stream

    def say(self, word: Word) -> None:
        self.push(SAY, 0, msgspec.msgpack.encode(word))

    def push(self, kind: int, number: int, body: bytes = b"") -> None:
        self.reliable.push(_HEAD.pack(kind, number) + body)

    async def send(self, kind: int, number: int, body: bytes) -> None:
        await self.reliable.send(_HEAD.pack(kind, number) + body)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def tidy(self, number: int, stream: Stream) -> None:
        if stream.over:
            self.forget(number)

    def lost(self, why: str) -> None:
        """The session is over."""
        for stream in list(self._streams.values()):
            stream.lost(why)
        self._streams.clear()

    def __len__(self) -> int:
        return len(self._streams)

    def _deliver(self, message: bytes) -> None:
        if len(message) < _HEAD.size:
            raise Broken("a message without a head")
        kind, number = _HEAD.unpack_from(message)
        body = message[_HEAD.size :]
        if kind == SAY:
            self._said(_words.decode(body))
        elif kind == OPEN:
            self.used()
            self._open_asked(number, body)
        elif (stream := self._streams.get(number)) is not None:
            stream.heard(kind, body)
            if kind == DATA:
                self.used()
            elif kind == RESET:
                self.forget(number)
            elif kind == END:
                self.tidy(number, stream)

    def _open_asked(self, number: int, body: bytes) -> None:
        if self._opened is None or number in self._streams:
            raise Broken("a stream that cannot be opened")
        stream = self.known(number)
        if len(self._streams) > STREAMS_MAX:
            stream.reset(f"more than {STREAMS_MAX} connections at once")
            return
        stream.grant(WINDOW_BYTES)
        self._opened(stream, body)


async def splice(
    stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Moves bytes between a stream and a socket until both directions have ended, or one broke."""

    async def outward() -> None:
        while data := await reader.read(PIECE_BYTES):
            await stream.write(data)
        stream.end()

    async def inward() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    moving = [asyncio.create_task(outward()), asyncio.create_task(inward())]
    try:
        await asyncio.gather(*moving)
    except OSError:
        stream.reset()
        writer.transport.abort()
    finally:
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        if not stream.over:
            stream.reset()
        writer.close()


# Messages between two ends of a session: in order and each once, though connections may break.
#
# Each end counts the messages that it got. On a new connection both say their count first, and go
# on with the next message. What the other end has not confirmed is kept, within a bound.


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
