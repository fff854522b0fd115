"""Frames between machines: the same frames over TCP, what is large as a stream into a file.

Both ends prove that they know the map's secret before anything is unpickled. Nothing is encrypted:
what a map sends and gets is as private as the network between the nodes.
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

from shoal.tasks.frames import HEADER, RECEIVE_BYTES, Body, Frame, Parcel

MAGIC = b"shoal-tasks-1\n"
NONCE_BYTES = 32
DIGEST_BYTES = 32
INFO_BYTES_MAX = 4096
HANDSHAKE_S_MAX = 10.0
# A peer whose machine is gone without a word is noticed after about half a minute.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_PAUSE_S = 5
KEEPALIVE_TRIES = 4

_LENGTH = struct.Struct("!I")


class Stranger(Exception):
    """Who is at the other end does not know the secret, or speaks another language."""


def watch_over(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PAUSE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    silence_ms = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PAUSE_S * KEEPALIVE_TRIES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)


def greet(connection: socket.socket, secret: bytes) -> dict[str, Any]:
    """The client's part: who is it? Raises Stranger."""
    connection.settimeout(HANDSHAKE_S_MAX)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(MAGIC + nonce)
    if _exactly(connection, len(MAGIC)) != MAGIC:
        raise Stranger("speaks another language")
    theirs = _exactly(connection, NONCE_BYTES)
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > INFO_BYTES_MAX:
        raise Stranger("says too much")
    info = _exactly(connection, length)
    proof = _exactly(connection, DIGEST_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"worker", nonce + theirs + info)):
        raise Stranger("does not know the secret")
    connection.sendall(_proof(secret, b"client", nonce + theirs))
    found: dict[str, Any] = json.loads(info)
    return found


def introduce(connection: socket.socket, secret: bytes, about: dict[str, Any]) -> None:
    """The worker's part: it tells who it is, and wants to know that the client is the one."""
    connection.settimeout(HANDSHAKE_S_MAX)
    if _exactly(connection, len(MAGIC)) != MAGIC:
        raise Stranger("speaks another language")
    theirs = _exactly(connection, NONCE_BYTES)
    nonce, info = secrets.token_bytes(NONCE_BYTES), json.dumps(about).encode()
    proof = _proof(secret, b"worker", theirs + nonce + info)
    connection.sendall(MAGIC + nonce + _LENGTH.pack(len(info)) + info + proof)
    answer = _exactly(connection, DIGEST_BYTES)
    if not hmac.compare_digest(answer, _proof(secret, b"client", theirs + nonce)):
        raise Stranger("does not know the secret")


def _proof(secret: bytes, who: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, who + what, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise Stranger("went away")
        data += more
    return data


class Incoming:
    """Bytes in, whole frames out; a large body grows in a file without a name."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._file: IO[bytes] | None = None
        self._header: tuple[int, int, int, int] = (0, 0, 0, 0)

    def receive(self, connection: socket.socket) -> list[Frame] | None:
        """The frames that became whole; None at the end of the stream."""
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            return None
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

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
    """Parcels that a socket takes when it has room for them."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self._sent = 0  # of the file at the front

    def add(self, ready: Parcel) -> None:
        self._parcels.append(ready)

    def push(self, connection: socket.socket) -> bool:
        """Send what the socket takes now; True when all is sent."""
        try:
            while self._parcels:
                data, file = self._parcels[0]
                if data:
                    sent = connection.send(data)
                    self._parcels[0] = Parcel(data[sent:], file)
                elif file is not None and self._sent < (size := os.fstat(file.fileno()).st_size):
                    left = size - self._sent
                    self._sent += os.sendfile(connection.fileno(), file.fileno(), self._sent, left)
                else:
                    self._parcels.popleft()
                    self._sent = 0
                    if file is not None:
                        file.close()
        except BlockingIOError:
            return False
        except OSError:
            self.clear()  # the other end is gone: that will be noticed
        return True

    def clear(self) -> None:
        while self._parcels:
            file = self._parcels.popleft().file
            if file is not None:
                file.close()
