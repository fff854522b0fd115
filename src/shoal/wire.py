"""How a controller and an agent talk: length-prefixed msgpack frames over one stream."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from shoal.model.commands import Envelope
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk, NodeReport, PackagePiece
from shoal.model.secret import SealedSecrets, SecretsWanted

log = logging.getLogger("shoal.wire")

FRAME_BYTES_MAX = 64 * 1024 * 1024
PIECE_BYTES = 512 * 1024  # of a package, at a time
# In an agent's environment, from its engine: the directory or address that holds a place for the
# checkpoints of each job. All nodes that a job may run on should see the same one.
CHECKPOINT_ROOT = "SHOAL_CHECKPOINT_ROOT"
# A machine may join if it has the same number as the head. It changes when agents and controllers
# of two versions no longer understand each other; a field with a default does not change it.
PROTOCOL = 1


class Heard(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: the node's inventory."""

    report: NodeReport


class Log(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: a piece of output. An empty one asks how much is kept."""

    chunk: LogChunk


class Need(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: send this package, from `offset` on. Asked for piece by piece, so an
    agent never has more under way than it can take; what is not answered is asked for again."""

    package: str
    offset: int


class Wants(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: send the secrets of this member, which I am to start. The controller
    sends them only to the life of the node on which it has placed the member."""

    wanted: SecretsWanted


class Commands(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent."""

    envelope: Envelope


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: how many bytes of this member's output are kept."""

    ref: MemberRef
    size: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: report now."""


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: a piece of a package, or why it cannot be had."""

    piece: PackagePiece


class Handed(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: the secrets of a member, or why it cannot have them."""

    secrets: SealedSecrets


class LinkFile(msgspec.Struct, frozen=True, kw_only=True):
    """`link.json` in the folder of a node on another machine: where its agent dials the head (the
    first URL that answers), the name that the head's certificate must be for, the certificate that
    it must be or be signed by (PEM; empty: the system decides), and the node's own key."""

    urls: tuple[str, ...]
    key: str
    name: str = ""
    certificate: str = ""


LINK_FILE = "link.json"

FromAgent = Heard | Log | Need | Wants
ToAgent = Commands | Kept | Ask | Piece | Handed

_LENGTH = struct.Struct("!I")
encode = msgspec.msgpack.Encoder().encode


class Link(asyncio.Protocol):
    """One end of the stream. Calls `on_message` for each frame and `on_close` once.

    A message that cannot be read, or that its receiver fails on, is logged and skipped: the next
    one may be a command to stop something."""

    def __init__(
        self,
        incoming: Any,  # the union of messages that this end receives
        on_open: Callable[[Link], None],
        on_message: Callable[[Any], None],
        on_close: Callable[[Link], None],
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has transports of its own that are like asyncio's but not derived from them
        self._transport = cast(asyncio.Transport, transport)
        try:
            self._on_open(self)
        except Exception:
            log.exception("a connection failed at its start and is closed")
            self.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                self.close()
                return
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            self._take(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]

    def _take(self, body: bytes) -> None:
        try:
            message = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("a message of %d bytes could not be read: %s", len(body), error)
            return
        try:
            self._on_message(message)
        except Exception:
            log.exception("a %s could not be handled", type(message).__name__)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._on_close(self)

    def send(self, message: msgspec.Struct) -> None:
        """Dropped if the link is down: whatever matters is sent again when it is up."""
        if self._transport is not None:
            body = encode(message)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the other side has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
