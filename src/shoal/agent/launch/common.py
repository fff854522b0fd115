"""What the programs in the members of a job with `launcher` share: messages, files, shells."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pwd
import secrets
import socket
import struct
from typing import Any

KEY, PLAN = "SHOAL_LAUNCH_KEY", "SHOAL_LAUNCH_PLAN"
MAGIC = b"shoal-launch-1\n"
NONCE_BYTES = PROOF_BYTES = 32
REQUEST_BYTES_MAX = 4 * 1024 * 1024
PIECE_BYTES = 64 * 1024
HANDSHAKE_S = 20.0
HEADER = struct.Struct("!cI")


class Wrong(Exception):
    """What went wrong, as a line for people."""


def exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(PIECE_BYTES, size - len(data)))
        if not piece:
            raise OSError("the other end is gone")
        data += piece
    return bytes(data)


def send(link: socket.socket, kind: bytes, data: bytes = b"") -> None:
    link.sendall(HEADER.pack(kind, len(data)) + data)


def receive(link: socket.socket) -> tuple[bytes, bytes]:
    kind, size = HEADER.unpack(exactly(link, HEADER.size))
    if size > REQUEST_BYTES_MAX:
        raise OSError("the other end sends too much at once")
    return kind, exactly(link, size)


def ask(link: socket.socket, key: bytes, request: dict[str, Any]) -> None:
    """Our side of the handshake. What is asked for is signed with the other end's nonce, so that
    nobody can send it again."""
    link.settimeout(HANDSHAKE_S)
    greeting = exactly(link, len(MAGIC) + NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise Wrong("another program answers there")
    text = json.dumps(request).encode()
    send(link, b"Q", hmac.digest(key, greeting + text, "sha256") + text)
    kind, answer = receive(link)
    if kind != b"A":
        raise Wrong(answer.decode(errors="replace") or "it refused")
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def answer(link: socket.socket, key: bytes) -> dict[str, Any]:
    """The other side of it."""
    link.settimeout(HANDSHAKE_S)
    greeting = MAGIC + secrets.token_bytes(NONCE_BYTES)
    link.sendall(greeting)
    kind, data = receive(link)
    proof, text = data[:PROOF_BYTES], data[PROOF_BYTES:]
    if kind != b"Q" or not hmac.compare_digest(proof, hmac.digest(key, greeting + text, "sha256")):
        send(link, b"R", b"it does not know the key of this job")
        raise Wrong("a stranger asked")
    send(link, b"A")
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    request = json.loads(text)
    assert isinstance(request, dict)
    return request


def listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", port), backlog=1024)


def address_of(link: socket.socket) -> str:
    host: str = link.getpeername()[0]
    return host[7:] if host.startswith("::ffff:") else host


def write(path: str, text: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(handle, "w") as file:
        file.write(text)


def shell() -> str:
    """As sshd does: the user's own, if there is one."""
    with contextlib.suppress(KeyError):
        found = pwd.getpwuid(os.getuid()).pw_shell
        if os.access(found, os.X_OK) and os.path.basename(found) not in ("false", "nologin"):
            return found
    return "/bin/sh"


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
