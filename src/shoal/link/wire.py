"""How a controller and an agent talk: length-prefixed msgpack frames over one stream.

On one machine the stream is a Unix socket, between machines a websocket (`channel.py`)."""

from __future__ import annotations

import asyncio
import logging
import struct
import zlib
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from shoal.model.blocks import Door, Seek, Sought
from shoal.model.commands import Envelope
from shoal.model.job import MemberRef
from shoal.model.kept import CopyHeld, FileAnswer, FilePiece, FileSent, FileWanted, Snapshot
from shoal.model.report import LogChunk, NodeGone, NodeReport, PackagePiece, Still
from shoal.model.secret import SealedSecrets, SecretsWanted
from shoal.model.session import SessionOrder
from shoal.model.tunnel import Tunnel, TunnelEnd

log = logging.getLogger("shoal.link.wire")

FRAME_BYTES_MAX = 64 * 1024 * 1024
UNREADABLE_MAX = 100  # messages that we cannot read, on one link
COMPRESS_FROM_BYTES = 1024  # a smaller message is sent as it is
COMPRESSED = 1 << 31  # in the length before a frame
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


class AsBefore(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: the inventory is as it was. Answered with `Ask` if it is not known."""

    still: Still


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


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: a piece of a file in a kept folder, or all its files together. Sent only
    to a controller that asked for it in a `Launch`."""

    what: FilePiece | Snapshot | CopyHeld


class WantsFile(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: send a file of a kept folder, to start a member from it."""

    wanted: FileWanted


class Opens(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: this node offers blocks to others, and this is its door. Said when it
    has something to offer first, and on each new link."""

    door: Door


class Seeks(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: blocks that it wants, and blocks that it has."""

    seek: Seek


class Joins(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: this node's end of a gang's encrypted network. Said again when no answer
    comes, and on each new link."""

    end: TunnelEnd


class Died(msgspec.Struct, frozen=True, tag=True):
    """Starter to controller: the agent's lock is free, and no agent will be started here."""

    gone: NodeGone


class Commands(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent."""

    envelope: Envelope


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: how many bytes of this member's output are kept."""

    ref: MemberRef
    size: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: report now. `heads`: the URLs of all heads, if there are several."""

    heads: tuple[str, ...] = ()


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: a piece of a package, or why it cannot be had."""

    piece: PackagePiece


class Handed(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: the secrets of a member, or why it cannot have them."""

    secrets: SealedSecrets


class Enter(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: somebody wants into a member, and waits in a meeting (ADR 48)."""

    order: SessionOrder


class FileKept(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: how far the copy of a file is kept."""

    answer: FileAnswer


class GivesFile(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: a piece of a file, or the list of them."""

    sent: FileSent


class Finds(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: where blocks are to be had."""

    sought: Sought


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: all ends of a gang's encrypted network."""

    tunnel: Tunnel


class LinkFile(msgspec.Struct, frozen=True, kw_only=True):
    """`link.json` in the folder of a node on another machine: where its agent dials the head (the
    first URL that answers), the name that the head's certificate must be for, the certificate that
    it must be or be signed by (PEM; empty: the system decides), and the node's own key. `heads` are
    the URLs that the cluster has named since then; their certificates are for their own names."""

    urls: tuple[str, ...]
    key: str
    name: str = ""
    certificate: str = ""
    heads: tuple[str, ...] = ()

    @property
    def ways(self) -> dict[str, str]:
        """Every URL, with the name that the certificate there must be for."""
        found = {url: self.name or (urlsplit(url).hostname or "") for url in self.urls}
        for url in self.heads:
            found.setdefault(url, urlsplit(url).hostname or "")
        return found


class Turned(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: you may not speak for this node, and why. The link ends."""

    why: str


FromAgent = Heard | AsBefore | Log | Need | Wants | Keep | WantsFile | Opens | Seeks | Joins | Died
ToAgent = (
    Commands | Kept | Ask | Piece | Handed | FileKept | GivesFile | Finds | Joined | Turned | Enter
)
# Archives were compressed when they were made, and most large files of jobs cannot be.
AS_THEY_ARE = (Piece, Keep, GivesFile)

_LENGTH = struct.Struct("!I")
encode = msgspec.msgpack.Encoder().encode


class Transport(Protocol):
    """What a link needs of the stream under it."""

    def write(self, data: bytes, /) -> None: ...

    def get_write_buffer_size(self) -> int: ...

    def abort(self) -> None: ...


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
        *,
        compress: bool = False,
        most: int = FRAME_BYTES_MAX,
    ) -> None:
        """`compress`: send large messages compressed; either end understands both. `most`: bytes
        of one message that this end accepts, also after it was decompressed."""
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._compress = compress
        self._most = most
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._buffer = bytearray()
        self._unreadable = 0
        self._transport: Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport | Transport) -> None:
        # uvloop has transports of its own that are like asyncio's but not derived from them
        self._transport = cast(Transport, transport)
        try:
            self._on_open(self)
        except Exception:
            log.exception("a connection failed at its start and is closed")
            self.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (said,) = _LENGTH.unpack_from(self._buffer, start)
            length = said & ~COMPRESSED
            if length > self._most:
                self._refuse(f"a message of {length} bytes")
                return
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
            if said & COMPRESSED:
                whole = self._decompressed(body)
                if whole is None:
                    return
                body = whole
            self._take(body)
            if self._transport is None:  # its receiver closed the link
                return
            start = end
        if start:
            del self._buffer[:start]

    def _decompressed(self, body: bytes) -> bytes | None:
        """None, and the link is closed, if it would be larger than we accept, or is damaged."""
        unpacker = zlib.decompressobj()
        try:
            whole = unpacker.decompress(body, self._most)
        except zlib.error as error:
            self._refuse(f"a message that cannot be decompressed ({error})")
            return None
        if not unpacker.eof:
            self._refuse(f"a message of more than {self._most} bytes")
            return None
        return whole

    def _refuse(self, what: str) -> None:
        log.error("a link sends %s, and is closed", what)
        self._buffer.clear()
        self.close()

    def _take(self, body: bytes) -> None:
        try:
            message = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._unreadable += 1
            if self._unreadable == 1:
                log.error("a message of %d bytes could not be read: %s", len(body), error)
            if self._unreadable > UNREADABLE_MAX:
                self._refuse("too many messages that cannot be read")
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
            body, flag = encode(message), 0
            small = len(body) < COMPRESS_FROM_BYTES or isinstance(message, AS_THEY_ARE)
            if self._compress and not small:
                packed = zlib.compress(body, 1)
                if len(packed) < len(body):
                    body, flag = packed, COMPRESSED
            self._transport.write(_LENGTH.pack(len(body) | flag) + body)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the other side has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
