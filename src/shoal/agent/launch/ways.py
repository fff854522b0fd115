"""`ssh`, `rsh` and `pdsh` as a launcher finds them: they start processes in the other members."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pwd
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

LOST = 255  # the exit code of an ssh that lost its connection
# Flags that are followed by a value.
SSH_VALUES, PDSH_VALUES = "BbcDEeFIiJLlmOopQRSWw", "wxftulR"


def read_plan() -> dict[str, Any]:
    with open(os.environ[PLAN]) as file:
        plan: dict[str, Any] = json.load(file)
    return plan


def words_after(arguments: list[str], valued: str) -> tuple[dict[str, str], list[str]]:
    """The flags, and the words after them."""
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        for at, letter in enumerate(word[1:], 1):
            if letter in valued:
                flags[letter] = word[at + 1 :] or (rest.pop(0) if rest else "")
                break
            flags[letter] = ""
    return flags, rest


def ssh(name: str, arguments: list[str]) -> int:
    plan = read_plan()
    flags, rest = words_after(arguments, SSH_VALUES)
    host = rest.pop(0).rpartition("@")[2] if rest else ""
    if rest and rest[0].startswith("-"):  # flags may also follow the host
        more, rest = words_after(rest, SSH_VALUES)
        flags.update(more)
    if host not in plan["hosts"] and host != plan["own"]:
        return real(name, arguments, host, plan)
    if not rest:
        raise Wrong("name a command; for a shell, use: shoal exec -it JOB.MEMBER -- bash")
    if host == plan["own"]:
        os.execv(shell(), [shell(), "-c", " ".join(rest)])
    return Remote(plan, host).run(" ".join(rest), stdin="n" not in flags)


def real(name: str, arguments: list[str], host: str, plan: dict[str, Any]) -> int:
    """Another host: this machine's own ssh, if it has one."""
    own = os.path.dirname(os.environ[PLAN])
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        found = os.path.join(folder, name)
        if os.access(found, os.X_OK) and not folder.startswith(own):
            os.execv(found, [name, *arguments])
    known = ", ".join([plan["own"], *plan["hosts"]][:8])
    raise Wrong(f"{host or 'no host'} is not a node of this job; its nodes are {known}")


class Remote:
    """A command in another member."""

    def __init__(self, plan: dict[str, Any], host: str, prefix: str = "") -> None:
        self._key, self._place, self._host = plan["key"].encode(), plan["hosts"][host], host
        self._prefix = prefix.encode()
        self._link: socket.socket | None = None

    def run(self, command: str, *, stdin: bool) -> int:
        try:
            link = self._link = socket.create_connection(tuple(self._place), timeout=HANDSHAKE_S)
            ask(link, self._key, {"do": "start", "command": command})
            if stdin:
                threading.Thread(target=self._inward, args=(link,), daemon=True).start()
            else:
                send(link, b"I")
            while True:
                kind, data = receive(link)
                if kind == b"X":
                    link.close()
                    return int(data)
                out = sys.stdout if kind == b"O" else sys.stderr
                out.buffer.write(self._marked(data))
                out.flush()
        except (OSError, Wrong) as error:
            print(f"{self._host}: {error}", file=sys.stderr)
            return LOST

    def end(self, number: int) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                send(self._link, b"S", str(int(number)).encode())

    def _inward(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, PIECE_BYTES):
                send(link, b"I", data)
            send(link, b"I")

    def _marked(self, data: bytes) -> bytes:
        if not self._prefix:
            return data
        return b"".join(self._prefix + line for line in data.splitlines(keepends=True))


def pdsh(arguments: list[str]) -> int:
    """All hosts at once. As soon as one fails, the others end: its peers would wait for it."""
    plan = read_plan()
    flags, rest = words_after(arguments, PDSH_VALUES)
    named = [host for host in flags.get("w", "").split(",") if host]
    strange = [host for host in named if host not in plan["hosts"] and host != plan["own"]]
    if strange or not named:
        raise Wrong(f"{', '.join(strange) or 'no host'} is not a node of this job")
    codes: dict[str, int] = {}
    running: list[Callable[[int], None]] = []

    def one(number: int, host: str) -> None:
        command = " ".join(rest).replace("%n", str(number)).replace("%h", host)
        if host == plan["own"]:
            process = subprocess.Popen([shell(), "-c", command], stdin=subprocess.DEVNULL)
            running.append(process.send_signal)
            codes[host] = shell_code(process.wait())
        else:
            remote = Remote(plan, host, f"{host}: ")
            running.append(remote.end)
            codes[host] = remote.run(command, stdin=False)
        if codes[host]:
            end(signal.SIGTERM)

    def end(number: int) -> None:
        for stop in running:
            with contextlib.suppress(OSError):
                stop(number)

    signal.signal(signal.SIGTERM, lambda *_: end(signal.SIGTERM))
    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(named)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
    return next((code for code in codes.values() if code), 0)  # the first that failed


# What the programs in the members of a job with `launcher` share: messages, files, shells.


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
