"""A request and its answer on a connection: sent as one piece, read as one piece where it is short.

`http.client` sends the body by itself, and reads headers as those of a mail: together that takes as
long as all else that a call does, and the server one more read."""

from __future__ import annotations

import socket
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from typing import IO, NamedTuple

HEAD_BYTES_MAX = 64 * 1024
PIECE_BYTES = 64 * 1024
NO_BODY = (204, 304)
Body = bytes | IO[bytes] | None


class Answer(NamedTuple):
    """Names of headers are in lower case. `last`: the connection cannot be used again."""

    status: int
    headers: dict[str, str]
    body: bytes
    last: bool


class Wrong(HTTPException):
    """What came is not HTTP."""


def exchange(
    sock: socket.socket, method: str, path: str, host: str, headers: dict[str, str], body: Body
) -> Answer:
    """OSError or HTTPException. A body that is not bytes needs its length among the headers."""
    given = {"Host": host, "Accept-Encoding": "identity", **headers}
    if isinstance(body, bytes):
        given["Content-Length"] = str(len(body))
    elif body is None and method != "GET":
        given["Content-Length"] = "0"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header must not have several lines")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    try:
        sock.sendall(head + body if isinstance(body, bytes) else head)
        if body is not None and not isinstance(body, bytes):
            while piece := body.read(PIECE_BYTES):
                sock.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        if body is None:
            raise
        # A long body may be refused before all of it is sent: the answer is here already.
    return _read(sock)


def _read(sock: socket.socket) -> Answer:
    data = sock.recv(PIECE_BYTES)
    if not data:
        raise RemoteDisconnected("the connection was closed without an answer")
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > HEAD_BYTES_MAX:
            raise Wrong("the answer's headers do not end")
        data += _more(sock, data)
    status, headers = _parsed(data[:end])
    rest = data[end + 4 :]
    if status < 200:  # an interim answer: the real one follows
        raise Wrong("an answer that was not asked for")
    last = headers.get("connection", "").lower() == "close"
    if status in NO_BODY:
        return Answer(status, headers, b"", last)
    if "chunked" in headers.get("transfer-encoding", ""):
        return Answer(status, headers, _chunked(sock, rest), last)
    length = headers.get("content-length", "")
    if not length:
        while piece := sock.recv(PIECE_BYTES):
            rest += piece
        return Answer(status, headers, rest, last=True)
    if not length.isdigit():
        raise Wrong(f"{length[:20]!r} is not a length")
    return Answer(status, headers, _exactly(sock, rest, int(length)), last)


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise Wrong(f"{first[:40]!r} is not an answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), value.strip())
    if version == "HTTP/1.0":
        headers["connection"] = "close"
    return int(status), headers


def _exactly(sock: socket.socket, data: bytes, count: int) -> bytes:
    if len(data) >= count:
        return data[:count]
    parts, left = [data], count - len(data)
    while left > 0:
        parts.append(_more(sock, data))
        left -= len(parts[-1])
    return b"".join(parts)[:count]


def _chunked(sock: socket.socket, data: bytes) -> bytes:
    body = b""
    while True:
        line, data = _line(sock, data)
        size = int(line.partition(b";")[0] or b"x", 16)
        if not size:
            while True:  # trailers
                line, data = _line(sock, data)
                if not line:
                    return body
        while len(data) < size + 2:
            data += _more(sock, data)
        body, data = body + data[:size], data[size + 2 :]


def _line(sock: socket.socket, data: bytes) -> tuple[bytes, bytes]:
    while b"\r\n" not in data:
        data += _more(sock, data)
        if len(data) > 2 * HEAD_BYTES_MAX:
            raise Wrong("a line does not end")
    line, _, rest = data.partition(b"\r\n")
    return line, rest


def _more(sock: socket.socket, read: bytes) -> bytes:
    piece = sock.recv(PIECE_BYTES)
    if not piece:
        raise IncompleteRead(read)
    return piece
