"""The door of a host on a tour: lets in the hosts of the same tour, and nobody else.

A visitor shows that it knows the tour's key, and says who it is, what it wants, and how far it is.
It waits at the door until its round has come. A stranger gets no byte of an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import NamedTuple

MAGIC = b"shoaltr1"
HELLO = struct.Struct("!8s1sHHI16s32s")  # magic, kind, from, to, position, nonce, proof
ANSWER = struct.Struct("!1sI16s32s")  # word, position, nonce, proof
PROOF_BYTES = 32
NONCE_BYTES = 16

VISIT, KNOCK, STREAM = b"v", b"k", b"s"
# What a host answers: it is not yet there; now; it has been there; it has measured with you.
WAIT, NOW, PASSED, DONE = b"w", b"n", b"p", b"d"

HELLO_S = 3.0  # within this time after it connected, a visitor has said who it is
STRANGERS_MAX = 64  # connected, and not yet known; the oldest has to go
STREAMS_MAX = 64  # that wait to be used
AWAKE_S = 1.0  # how often hosts that wait hear that this one is alive
TICK_S = 0.2
OVER = 0xFFFFFFFF  # the position of a host that has ended


class Hello(NamedTuple):
    kind: bytes
    own: int
    position: int
    nonce: bytes


class Answer(NamedTuple):
    word: bytes
    position: int
    nonce: bytes


class Line(NamedTuple):
    """Somebody of the tour is at the other end; it has yet to prove that it is not a recording."""

    socket: socket.socket
    hello: Hello
    nonce: bytes  # as it was sent there


class Refused(OSError):
    """Something answers at that port, and it is not on this tour."""


def proof(key: bytes, *parts: bytes | int) -> bytes:
    text = b"|".join(part if isinstance(part, bytes) else b"%d" % part for part in parts)
    return hmac.new(key, text, hashlib.sha256).digest()


def greet(
    line: socket.socket, key: bytes, kind: bytes, own: int, peer: int, position: int
) -> Answer:
    """Say who we are, and hear what the other one says. Sets no time limit."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    shown = proof(key, b"hello", kind, own, peer, position, nonce)
    line.sendall(HELLO.pack(MAGIC, kind, own, peer, position, nonce, shown))
    said = exactly(line, ANSWER.size)
    word, theirs, fresh, shown = ANSWER.unpack(said)
    expected = proof(key, b"answer", word, own, peer, theirs, nonce, fresh)
    if not hmac.compare_digest(shown, expected):
        raise Refused("something else answers at that port")
    return Answer(word, theirs, fresh)


def exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise ConnectionResetError("it hung up")
        found += part
    return found


def listen(port: int) -> socket.socket:
    """On all addresses, IPv6 and IPv4, because which of them peers use is not known here."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
    return socket.create_server(("", port), backlog=128)


class Door:
    """`position` is where this host is on its tour, and `done` whom it has measured with. Both are
    written by the tour and read by the thread of the door."""

    def __init__(self, port: int, key: bytes, own: int, hosts: int) -> None:
        self.position = 0
        self.done: set[int] = set()
        self._key, self._own, self._hosts = key, own, hosts
        self._changed = threading.Condition()
        self._visitors: dict[int, Line] = {}
        self._streams: deque[Line] = deque()
        self._strangers: dict[socket.socket, tuple[float, bytearray]] = {}
        self._ends = False
        self._socket = listen(port)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._ends:
            return
        self.position = OVER
        self._ends = True
        self._thread.join(timeout=5)
        for line in (*self._visitors.values(), *self._streams):
            line.socket.close()
        for one in self._strangers:
            one.close()
        self._selector.close()
        self._socket.close()

    # -- for the tour ----------------------------------------------------------------------

    def visitor(self, host: int, position: int, until: float) -> Line | None:
        """The line of this host, as soon as it stands here for this position; None if it does not
        come in time."""

        def there() -> bool:
            found = self._visitors.get(host)
            return found is not None and found.hello.position == position

        with self._changed:
            self._changed.wait_for(there, timeout=max(0.0, until - time.monotonic()))
            return self._visitors.pop(host) if there() else None

    def streams(self, host: int, count: int, until: float) -> list[Line]:
        """So many lines of the host that is being measured with, for data."""

        def mine() -> list[Line]:
            return [line for line in self._streams if line.hello.own == host]

        with self._changed:
            self._changed.wait_for(
                lambda: len(mine()) >= count, timeout=max(0.0, until - time.monotonic())
            )
            found = mine()
            for line in found:
                self._streams.remove(line)
        for line in found[count:]:
            line.socket.close()
        if len(found) < count:
            for line in found:
                line.socket.close()
            raise TimeoutError("its connections for data did not come")
        return found[:count]

    # -- the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        awake = time.monotonic()
        while not self._ends:
            for event, _ in self._selector.select(TICK_S):
                if event.fileobj is self._socket:
                    self._accept()
                elif isinstance(event.fileobj, socket.socket):
                    self._hear(event.fileobj)
            now = time.monotonic()
            for line in [one for one, (since, _) in self._strangers.items() if now > since]:
                self._turn_away(line)
            if now >= awake + AWAKE_S:
                awake = now
                self._keep_awake()

    def _accept(self) -> None:
        try:
            line, _ = self._socket.accept()
        except OSError:  # it went away, or there are too many: those who come again are served
            return
        line.setblocking(False)
        self._strangers[line] = time.monotonic() + HELLO_S, bytearray()
        self._selector.register(line, selectors.EVENT_READ)
        if len(self._strangers) > STRANGERS_MAX:
            self._turn_away(next(iter(self._strangers)))

    def _turn_away(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._strangers[line]
        line.close()

    def _hear(self, line: socket.socket) -> None:
        """No more is read than a hello has, so a flood costs nothing."""
        said = self._strangers[line][1]
        try:
            part = line.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if not part or not MAGIC.startswith(bytes(said[: len(MAGIC)])):
            self._turn_away(line)
        elif len(said) == HELLO.size:
            hello = self._known(bytes(said))
            if hello is None:
                self._turn_away(line)
                return
            self._selector.unregister(line)
            del self._strangers[line]
            try:
                self._answer(line, hello)
            except OSError:
                line.close()

    def _known(self, said: bytes) -> Hello | None:
        _, kind, own, peer, position, nonce, shown = HELLO.unpack(said)
        expected = proof(self._key, b"hello", kind, own, peer, position, nonce)
        if not hmac.compare_digest(shown, expected):
            return None
        if peer != self._own or own == self._own or own >= self._hosts:
            return None
        return Hello(kind, own, position, nonce)

    def _answer(self, line: socket.socket, hello: Hello) -> None:
        word = self._word(hello)
        fresh = secrets.token_bytes(NONCE_BYTES)
        at = self.position
        shown = proof(self._key, b"answer", word, hello.own, self._own, at, hello.nonce, fresh)
        line.send(ANSWER.pack(word, at, fresh, shown))  # fits into the buffer of a new line
        stays = hello.kind == STREAM or (hello.kind == VISIT and word in (WAIT, NOW))
        if not stays:
            line.close()
            return
        line.setblocking(True)
        line.settimeout(HELLO_S)
        with self._changed:
            old: Line | None = None
            if hello.kind == VISIT:
                old = self._visitors.pop(hello.own, None)
                self._visitors[hello.own] = Line(line, hello, fresh)
            else:
                self._streams.append(Line(line, hello, fresh))
                if len(self._streams) > STREAMS_MAX:
                    old = self._streams.popleft()
            if old is not None:
                old.socket.close()
            self._changed.notify_all()

    def _word(self, hello: Hello) -> bytes:
        if hello.kind == STREAM:
            return NOW
        if hello.own in self.done:
            return DONE
        if hello.position < self.position:
            return PASSED
        return NOW if hello.position == self.position else WAIT

    def _keep_awake(self) -> None:
        """Those who wait hear that we are here, or that we gave them up."""
        with self._changed:
            for host, line in list(self._visitors.items()):
                word = self._word(line.hello)
                try:
                    line.socket.send(WAIT if word == NOW else word, socket.MSG_DONTWAIT)
                except OSError:
                    word = PASSED
                if word in (PASSED, DONE):
                    del self._visitors[host]
                    line.socket.close()
