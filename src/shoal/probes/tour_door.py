"""The door of a host on a tour: lets in the hosts of the same tour, and nobody else.

A visitor shows that it knows the tour's key, and says who it is, what it wants, and how far it is.
It waits at the door until its round has come. A stranger gets no byte of an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from statistics import median
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


# What a pair of hosts measures: how long a byte takes, and how many arrive per second.
#
# What was sent proves nothing: it may wait in buffers on the way. So the host that receives counts,
# by the time at which bytes arrive, and leaves out the beginning, when TCP is slow and a shaper
# still lets a burst through. It ends when two halves of what it counted agree, or when its time is
# up.


BLOCK_BYTES = 1024 * 1024
PINGS_WARM = 5
PINGS = 100
PINGS_MIN = 10
PINGS_S = 0.15
SKIPPED = 0.4  # of the time so far: slow start, bursts
AGREES = 0.05  # the halves of the rest differ by less
STRETCH = 3.0  # links that are unsteady are measured this much longer
ROUND_TRIPS = 20  # slow start takes about ten of them
LONG_S = 1.5  # but no longer than this
FAST_BYTES_S = 1e9  # one stream (one core) may be too slow for such a link
FAST_S = 0.1  # ... which is soon seen
STREAMS = 8
SILENT_S = 3.0
WAKE_S = 0.1  # how soon a thread notices that it is to end
SPARE_S = 5.0

# Linux can count bytes of TCP without copying them, so that a receiver keeps up with fast links.
UNCOPIED = socket.MSG_TRUNC if sys.platform == "linux" else 0
RATE = struct.Struct("!Q")
DRAINED = b"q"
PING = b"p"


class Latency(NamedTuple):
    """One way, taken as half of the round trip."""

    median_s: float
    least_s: float


def streams_for_fast() -> int:
    return max(2, min(STREAMS, os.cpu_count() or 1))


def ping(line: socket.socket) -> Latency:
    took: list[float] = []
    until = time.monotonic() + PINGS_S
    for number in range(PINGS_WARM + PINGS):
        began = time.perf_counter()
        line.sendall(PING)
        exactly(line, 1)
        if number >= PINGS_WARM:
            took.append((time.perf_counter() - began) / 2)
        if len(took) >= PINGS_MIN and time.monotonic() > until:
            break
    return Latency(median(took), min(took))


def duration_s(pair_s: float, latency: Latency) -> float:
    return max(pair_s, min(LONG_S, ROUND_TRIPS * 2 * latency.least_s))


def give(line: socket.socket, streams: list[socket.socket], limit_s: float) -> float:
    """Send as fast as it goes until the other one has counted enough; returns its bytes per second.
    The last byte goes the way of the data, so all of it has left the way when it arrives."""
    ends = threading.Event()
    threads = [_thread(_pour, one, ends) for one in streams]
    try:
        line.settimeout(limit_s)
        (rate,) = RATE.unpack(exactly(line, RATE.size))
    finally:
        _end(threads, ends)
    line.sendall(DRAINED)
    return float(rate)


def take(
    line: socket.socket,
    streams: list[socket.socket],
    least_s: float,
    limit_s: float,
    *,
    exactly_so: bool = False,
) -> float:
    """Count what arrives; returns bytes per second. `exactly_so`: for this time, no longer."""
    ends = threading.Event()
    counts: list[list[tuple[float, int]]] = [[] for _ in streams]
    threads = [
        _thread(_count, one, ends, count) for one, count in zip(streams, counts, strict=True)
    ]
    try:
        looks = [least_s] if exactly_so else _looks(least_s, early=len(streams) == 1)
        rate = _steady(counts, threads, least_s, looks)
    finally:
        _end(threads, ends)
    line.settimeout(limit_s)
    line.sendall(RATE.pack(max(1, round(rate))))
    exactly(line, 1)
    return rate


def _looks(least_s: float, *, early: bool) -> list[float]:
    fast = [FAST_S] if early and least_s > FAST_S else []
    return fast + [least_s * part for part in (1, 1.5, 2, 2.5, STRETCH)]


def _steady(
    counts: list[list[tuple[float, int]]],
    threads: list[threading.Thread],
    least_s: float,
    looks: list[float],
) -> float:
    began = time.perf_counter()
    while not any(counts):
        if time.perf_counter() > began + SILENT_S:
            raise TimeoutError("no data arrives")
        time.sleep(0.002)
    first = min(count[0][0] for count in counts if count)
    rate = 0.0
    for look in looks:
        while (now := time.perf_counter()) < first + look:
            time.sleep(first + look - now)
        if not all(thread.is_alive() for thread in threads):
            raise ConnectionResetError("it hung up while it was sending")
        events = sorted(event for count in counts for event in count)
        rate, agrees = rate_of(events, first + SKIPPED * look, first + look)
        if look < least_s:
            if rate >= FAST_BYTES_S:
                break
        elif agrees:
            break
    return rate


def rate_of(events: list[tuple[float, int]], begin: float, end: float) -> tuple[float, bool]:
    """Bytes per second from the first to the last arrival within this time, and whether both halves
    of it agree. A link so slow that hardly anything arrived is taken as a whole."""
    rate = _between(events, begin, end)
    if rate is None:
        return sum(size for _, size in events) / max(1e-9, end - events[0][0]), False
    middle = (begin + end) / 2
    one, other = _between(events, begin, middle), _between(events, middle, end)
    if one is None or other is None:
        return rate, False
    return rate, abs(one - other) <= AGREES * max(one, other)


def _between(events: list[tuple[float, int]], begin: float, end: float) -> float | None:
    """The bytes that came first do not count: when they were begun to be sent is not known."""
    within = [(at, size) for at, size in events if begin <= at <= end]
    if len(within) < 3 or within[-1][0] <= within[0][0]:
        return None
    return sum(size for _, size in within[1:]) / (within[-1][0] - within[0][0])


def _thread(work: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def _end(threads: list[threading.Thread], ends: threading.Event) -> None:
    ends.set()
    for thread in threads:
        thread.join(timeout=SPARE_S)


def _pour(line: socket.socket, ends: threading.Event) -> None:
    block = memoryview(bytes(BLOCK_BYTES))
    line.settimeout(WAKE_S)
    with contextlib.closing(line):
        while not ends.is_set():
            try:
                line.send(block)
            except TimeoutError:
                continue
            except OSError:  # the other one has counted enough
                return
        _drop(line)


def _count(line: socket.socket, ends: threading.Event, count: list[tuple[float, int]]) -> None:
    buffer = bytearray(BLOCK_BYTES)
    line.settimeout(WAKE_S)
    with contextlib.closing(line):
        while not ends.is_set():
            try:
                got = line.recv_into(buffer, BLOCK_BYTES, UNCOPIED)
            except TimeoutError:
                continue
            except OSError:
                return
            if not got:
                return
            count.append((time.perf_counter(), got))
        _drop(line)


def _drop(line: socket.socket) -> None:
    """What still waits to be sent is dropped when the line is closed, and nobody waits for it."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
