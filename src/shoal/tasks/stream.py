"""Frames between machines: the same frames over TCP, with large bodies streamed into files.

Both ends prove that they know the map's secret before anything is unpickled. Nothing is encrypted:
a map's data is as private as the network between the nodes.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
from collections import deque
from typing import IO, Any

from shoal.tasks.frames import HEADER, RECEIVE_BYTES, Body, Frame, Parcel, Reader
from shoal.tasks.portable import send_file

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
