"""The protocol between a client and its workers: frames over a socket, large bodies in files.

Such a file has no name; its descriptor travels with the frame. So a process that is killed leaves
nothing behind.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections import deque
from typing import IO, NamedTuple

HELLO, FUNCTION, FORGET, CHUNK = 1, 2, 3, 4  # to a worker
BYE = 5  # to a worker's host: the map has ended
READY, RESULT, UNLOADABLE, INIT_FAILED = 11, 12, 13, 14  # from a worker
DIED = 15  # from a worker's host: how, and in which task

INLINE_BYTES_MAX = 1 << 20
RECEIVE_BYTES = 1 << 16  # from 128 KiB on, each call maps and unmaps memory: 18 us
DESCRIPTORS_MAX = 8

HEADER = struct.Struct("<BBHIQQ")  # kind, by file, -, number, extra, length of the body

Body = bytes | mmap.mmap


class Frame(NamedTuple):
    kind: int
    number: int
    extra: int
    body: Body


class Parcel(NamedTuple):
    """A frame ready to send. The file's descriptor, if any, goes with its first byte."""

    data: bytes
    file: IO[bytes] | None


def parcel(kind: int, number: int = 0, extra: int = 0, body: Body = b"") -> Parcel:
    if len(body) <= INLINE_BYTES_MAX:
        data = bytes(body)
        return Parcel(HEADER.pack(kind, 0, 0, number, extra, len(data)) + data, None)
    file = tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115 - the receiver closes it
    try:
        file.write(body)
        file.flush()
    except BaseException:
        file.close()
        raise
    return Parcel(HEADER.pack(kind, 1, 0, number, extra, len(body)), file)


class Reader:
    """Turns bytes and descriptors into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self, connection: socket.socket) -> list[Frame] | None:
        """The frames that are now complete; None at the end of the stream."""
        data = self._read(connection)
        if not data:
            return None
        self._buffer += data
        return list(iter(self._next, None))

    def _read(self, connection: socket.socket) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(connection, RECEIVE_BYTES, DESCRIPTORS_MAX)
        self._descriptors.extend(descriptors)
        return data

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _next(self) -> Frame | None:
        if len(self._buffer) < HEADER.size:
            return None
        kind, by_file, _, number, extra, length = HEADER.unpack_from(self._buffer)
        end = HEADER.size + (0 if by_file else length)
        if len(self._buffer) < end:
            return None
        body: Body = bytes(memoryview(self._buffer)[HEADER.size : end])
        del self._buffer[:end]
        if by_file:
            descriptor = self._descriptors.popleft()
            try:
                body = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        return Frame(kind, number, extra, body)


def send(connection: socket.socket, ready: Parcel) -> None:
    """Send all of it on a blocking socket."""
    if ready.file is None:
        connection.sendall(ready.data)
        return
    with ready.file as file:
        sent = socket.send_fds(connection, [ready.data], [file.fileno()])
        connection.sendall(memoryview(ready.data)[sent:])
