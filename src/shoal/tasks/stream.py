"""Workers on other machines: the same frames over TCP, with large bodies streamed into files.

Both ends prove that they know the map's secret before anything is unpickled. Nothing is encrypted:
a map's data is as private as the network between the nodes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
from collections import deque
from typing import IO, TYPE_CHECKING, Any

from shoal.tasks import frames
from shoal.tasks.frames import HEADER, RECEIVE_BYTES, Body, Frame, Parcel, Reader, parcel
from shoal.tasks.process import send_file
from shoal.tasks.worker import NOT_BEGUN

if TYPE_CHECKING:
    from shoal.link.meeting import Way


MAGIC = b"shoal-tasks-1\n"
NONCE_BYTES = 32
DIGEST_BYTES = 32
INFO_BYTES_MAX = 4096
HANDSHAKE_S_MAX = 10.0

_LENGTH = struct.Struct("!I")


class HandshakeFailed(Exception):
    """The other end does not know the secret, or speaks another protocol."""


def greet(connection: socket.socket, secret: bytes) -> dict[str, Any]:
    """The client's side of the handshake: what the worker says about itself."""
    connection.settimeout(HANDSHAKE_S_MAX)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(MAGIC + nonce)
    if _exactly(connection, len(MAGIC)) != MAGIC:
        raise HandshakeFailed("speaks another protocol")
    theirs = _exactly(connection, NONCE_BYTES)
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > INFO_BYTES_MAX:
        raise HandshakeFailed("sends too long a description")
    info = _exactly(connection, length)
    proof = _exactly(connection, DIGEST_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"worker", nonce + theirs + info)):
        raise HandshakeFailed("does not know the secret")
    connection.sendall(_proof(secret, b"client", nonce + theirs))
    found: dict[str, Any] = json.loads(info)
    return found


def introduce(connection: socket.socket, secret: bytes, about: dict[str, Any]) -> None:
    """The worker's side of the handshake: describes itself and checks the client."""
    connection.settimeout(HANDSHAKE_S_MAX)
    if _exactly(connection, len(MAGIC)) != MAGIC:
        raise HandshakeFailed("speaks another protocol")
    theirs = _exactly(connection, NONCE_BYTES)
    nonce, info = secrets.token_bytes(NONCE_BYTES), json.dumps(about).encode()
    proof = _proof(secret, b"worker", theirs + nonce + info)
    connection.sendall(MAGIC + nonce + _LENGTH.pack(len(info)) + info + proof)
    answer = _exactly(connection, DIGEST_BYTES)
    if not hmac.compare_digest(answer, _proof(secret, b"client", theirs + nonce)):
        raise HandshakeFailed("does not know the secret")


def _proof(secret: bytes, who: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, who + what, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise HandshakeFailed("went away")
        data += more
    return data


class Incoming(Reader):
    """Turns bytes into frames; a large body grows in a file without a name."""

    def __init__(self) -> None:
        super().__init__()
        self._file: IO[bytes] | None = None
        self._header: tuple[int, int, int, int] = (0, 0, 0, 0)

    def _read(self, connection: socket.socket) -> bytes:
        return connection.recv(RECEIVE_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> Frame | None:
        if self._file is None:
            if len(self._buffer) < HEADER.size:
                return None
            kind, by_file, _, number, extra, length = HEADER.unpack_from(self._buffer)
            if not by_file:
                end = HEADER.size + length
                if len(self._buffer) < end:
                    return None
                body: Body = bytes(memoryview(self._buffer)[HEADER.size : end])
                del self._buffer[:end]
                return Frame(kind, number, extra, body)
            del self._buffer[: HEADER.size]
            self._header = kind, number, extra, length
            self._file = tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115 - over many calls
        return self._grow(self._file)

    def _grow(self, file: IO[bytes]) -> Frame | None:
        kind, number, extra, length = self._header
        part = min(len(self._buffer), length - file.tell())
        file.write(memoryview(self._buffer)[:part])
        del self._buffer[:part]
        if file.tell() < length:
            return None
        file.flush()
        body = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
        self.close()
        return Frame(kind, number, extra, body)


class Outgoing:
    """Parcels that wait for room in a socket."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self._sent = 0  # bytes of the first parcel's file

    def add(self, ready: Parcel) -> None:
        self._parcels.append(ready)

    def push(self, connection: socket.socket) -> bool:
        """Send what the socket accepts now; True when everything is sent."""
        try:
            while self._parcels:
                data, file = self._parcels[0]
                if data:
                    sent = connection.send(data)
                    self._parcels[0] = Parcel(data[sent:], file)
                elif file is not None and self._sent < (size := os.fstat(file.fileno()).st_size):
                    left = size - self._sent
                    self._sent += send_file(connection, file.fileno(), self._sent, left)
                else:
                    self._parcels.popleft()
                    self._sent = 0
                    if file is not None:
                        file.close()
        except BlockingIOError:
            return False
        except OSError:
            self.clear()  # the other end is gone, which the pool will notice
        return True

    def clear(self) -> None:
        while self._parcels:
            file = self._parcels.popleft().file
            if file is not None:
                file.close()


# The pool's view of a worker on another machine: the far end of a connection.


INNOCENT = 1  # in a DIED frame: it was stopped on request


class Remote:
    """One connection per worker: its host connects again for the next one."""

    pidfd: int | None = None

    def __init__(
        self, connection: socket.socket, about: dict[str, Any], way: Way | None = None
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.pid = int(about.get("pid", 0))
        self.known: set[int] = set()
        self.ready = False
        self.failure: BaseException | None = None
        self._where = f"{about.get('node', '?')} (member {about.get('member', '?')})"
        self._how = "was lost"  # with its node, its host or the connection
        self._position: int | None = None
        self._reported = False  # its host reported its death
        self._innocent = False
        self._way = way  # if it came through the head
        self._outgoing = Outgoing()
        self._incoming = Incoming()

    @property
    def position(self) -> int | None:
        return self._position

    @property
    def innocent(self) -> bool:
        """Neither is a worker to blame that vanished before it was ready, nor one that was cut off
        because the head restarted or this machine was away."""
        if self._innocent or (self._way is not None and self._way.broken and not self._reported):
            return True
        return not self.ready and not self._reported and self.failure is None

    def begin(self) -> None:
        pass  # its host knows the current task

    def died(self, frame: Frame) -> None:
        self._reported = True
        self._position = frame.extra - 1  # -1: not begun
        self._innocent = frame.number == INNOCENT
        self._how = bytes(frame.body).decode(errors="replace")

    def send(self, ready: Parcel) -> None:
        self._outgoing.add(ready)
        self.push()

    def push(self) -> bool:
        return self._outgoing.push(self.socket)

    def receive(self) -> list[Frame] | None:
        try:
            return self._incoming.receive(self.socket)
        except BlockingIOError:
            return []
        except OSError:
            return None

    def kill(self) -> None:
        """Its host ends it when the connection closes, and connects again with another."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Its host ends too."""
        self._outgoing.clear()
        self.send(parcel(frames.BYE))
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reap(self) -> str:
        self.socket.close()
        self._outgoing.clear()
        self._incoming.close()
        return f"on {self._where} {self._how}"


assert NOT_BEGUN == -1, "a DIED frame carries a position plus one"
