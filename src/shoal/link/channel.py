"""A websocket as a stream of bytes: what carries a `wire.Link` between machines.

The head's end is a connection of its API; an agent dials. Only the sans-I/O part of the websockets
library is used, so that a thousand links cost the head little.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, Protocol
from websockets.uri import parse_uri

from shoal.client.keepalive import SILENT_S, keep_alive
from shoal.client.reaching import LEADER
from shoal.client.transport import trust_in
from shoal.link.wire import Link, LinkFile

LINK_PATH = "/v1/link"
MESSAGE_BYTES = 64 * 1024  # of the stream in one websocket message
MESSAGE_BYTES_MAX = 256 * 1024  # what we accept in one
OPEN_S_MAX = 10.0
CONNECT_S = 2.0  # to one of several heads ...
GONE_S = 6  # ... which is given up without a sign of life for this long
NOT_LEADING = 503
ANSWER_BYTES_MAX = 200  # of a refusal, for a log line

quiet = logging.getLogger("shoal.link.channel")
quiet.setLevel(logging.WARNING)  # the library would log keys


class Channel:
    """The transport of a link, at either end of an open websocket."""

    def __init__(self, conn: Protocol, transport: asyncio.Transport) -> None:
        self._conn = conn
        self._transport = transport

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        with contextlib.suppress(InvalidState):  # it is being closed
            for start in range(0, len(data), MESSAGE_BYTES):
                self._conn.send_binary(data[start : start + MESSAGE_BYTES])
        self._transport.write(b"".join(self._conn.data_to_send()))

    def ping(self) -> None:
        with contextlib.suppress(InvalidState):
            self._conn.send_ping(b"")
        self._transport.write(b"".join(self._conn.data_to_send()))

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()


class Refused(OSError):
    """The head is there, and does not let us in."""


class Unanswered(OSError):
    """The head was there, and ended before it answered: perhaps it begins to lead."""


class NotLeading(OSError):
    """The head is there, and another one leads: at `leader`, if that is known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class Dialled(asyncio.Protocol):
    """An agent's end of the websocket. `link` gets the stream as soon as the head has answered."""

    def __init__(self, url: str, key: str, link: Callable[[], Link]) -> None:
        self._conn = ClientProtocol(
            parse_uri(f"ws{url.removeprefix('http')}{LINK_PATH}"),
            max_size=MESSAGE_BYTES_MAX,
            logger=quiet,
        )
        self._key = key
        self._make = link
        self._link: Link | None = None
        self.channel: Channel | None = None
        self.heard_at = time.monotonic()
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        request = self._conn.connect()
        request.headers["Authorization"] = f"Bearer {self._key}"
        self._conn.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        self._conn.receive_data(data)
        for event in self._conn.events_received():
            if isinstance(event, Response):
                self._answered(event)
            elif (
                isinstance(event, Frame)
                and event.opcode in (Opcode.BINARY, Opcode.CONT)
                and self._link is not None
            ):
                self._link.data_received(bytes(event.data))
        self._flush()
        if self._conn.parser_exc is not None or self._conn.close_expected():
            self._transport.close()

    def eof_received(self) -> None:
        self._conn.receive_eof()
        for event in self._conn.events_received():
            if isinstance(event, Response):
                self._answered(event)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            why = exc or self._conn.handshake_exc or "the connection ended before it was answered"
            self.opened.set_exception(Unanswered(str(why)))
        if self._link is not None:
            self._link.connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        self._transport.abort()

    def _answered(self, answer: Response) -> None:
        if self._conn.state is OPEN:
            self.opened.set_result(None)
            self._link = self._make()
            self.channel = Channel(self._conn, self._transport)
            self._link.connection_made(self.channel)
        elif not self.opened.done():
            text = bytes(answer.body or b"")[:ANSWER_BYTES_MAX].decode(errors="replace")
            text = f"status {answer.status_code} {text}".strip()
            self.opened.set_exception(_refusal(answer, text))

    def _flush(self) -> None:
        data = b"".join(self._conn.data_to_send())
        if data and not self._transport.is_closing():
            self._transport.write(data)


def _refusal(answer: Response, text: str) -> OSError:
    if answer.status_code in (401, 403):
        return Refused(text)
    if answer.status_code == NOT_LEADING:
        return NotLeading(text, answer.headers.get(LEADER, ""))
    return Unanswered(text)


async def dial(url: str, file: LinkFile, link: Callable[[], Link]) -> Dialled:
    """A link to the head at one of its URLs. OSError: nobody answers; Refused: not with our key;
    NotLeading: another head leads. One of several that is switched off costs little time."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    several = len(file.ways) > 1
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(OPEN_S_MAX):
        port = parts.port or (443 if secure else 80)
        # A head that many nodes dial at once may take long for TLS, but its kernel answers.
        async with asyncio.timeout(CONNECT_S if several else None):
            connection = await _connected(parts.hostname or "", port)
        transport, made = await loop.create_connection(
            lambda: Dialled(url, file.key, link),
            sock=connection,
            ssl=trust_in(file.certificate) if secure else None,
            server_hostname=file.ways.get(url, parts.hostname) if secure else None,
        )
        try:
            keep_alive(connection, GONE_S if file.heads else SILENT_S)
            await made.opened
        except BaseException:
            transport.abort()
            raise
    return made


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem = OSError(f"{host} has no address")
    for family, kind, number, _, where in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        made = socket.socket(family, kind, number)
        made.setblocking(False)
        try:
            await loop.sock_connect(made, where)
        except OSError as error:
            made.close()
            problem = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise problem
