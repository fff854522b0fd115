"""Fetches blocks from several neighbors and the origin at once, and verifies each of them.

A `Gathering` fills a holding. It is told which blocks its neighbors have, with their hashes
(`offer`), and which it may read from the origin (`claim`). Threads take them as they come, those of
wished files first. With a manifest, `fetch_manifest` and `gather` are all that is needed:

    manifest = fetch_manifest(peers, name, own)
    holding = Holding(folder, manifest.layout, mark=name)
    problems = gather(holding, manifest, peers, own)

Without problems, all of it is there and verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from shoal.agent.blocks.door import ANSWER, HELLO, REQUEST, WANTS_MANIFEST, Hello, exactly
from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.store import HEADER_BYTES_MAX, Holding
from shoal.model.blocks import (
    BLOCK_BYTES,
    BadManifest,
    Manifest,
    Peer,
    decode_manifest,
)

PEER_LINES = 4  # connections to neighbors, for one set of files
ORIGIN_LINES = 8  # reads of the origin at a time
CONNECT_S = 3.0
SILENT_S = 20.0  # a neighbor that sends nothing for so long is left
ENDS_S = 5.0
FAILS_MAX = 3  # then nothing more is asked of it

Origin = Callable[[int], bytes]
Work = TypeVar("Work")


class NotGiven(Exception):
    """A neighbor does not have it, or gave something else. `lie`: the latter."""

    def __init__(self, node: str, why: str, *, lie: bool = False) -> None:
        super().__init__(f"{node} {why}")
        self.node = node
        self.lie = lie


class Line:
    """A connection to the door of a neighbor. Nothing is sent before its certificate was compared,
    and nothing is believed before its hash was."""

    def __init__(self, peer: Peer, own: str) -> None:
        self.node = peer.node
        self._line: socket.socket | None = None
        try:
            self._line = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
            self._line.settimeout(SILENT_S)
            self._line = line = _context().wrap_socket(self._line)
            shown = line.getpeercert(binary_form=True) or b""
            if hashlib.sha256(shown).digest() != peer.fingerprint:
                raise NotGiven(peer.node, "is not what answers at its port", lie=True)
            hello = msgspec.msgpack.encode(Hello(peer.key, own, peer.until_s, peer.ticket))
            line.sendall(HELLO.pack(len(hello)) + hello)
            there, _ = ANSWER.unpack(exactly(line, ANSWER.size))
            if not there:
                raise NotGiven(peer.node, "no longer has it")
        except OSError as error:
            what = "hangs up" if self._line is not None else "cannot be reached"
            self.close()
            raise NotGiven(peer.node, f"{what}: {error.strerror or error}") from None
        except NotGiven:
            self.close()
            raise

    def block(self, number: int, size: int, name: bytes) -> bytes:
        data = self._ask(number, BLOCK_BYTES)
        if len(data) != size or hashlib.sha256(data).digest() != name:
            raise NotGiven(self.node, f"gave a corrupt block {number}: refused", lie=True)
        return data

    def manifest(self, name: str) -> Manifest:
        """Raises BadManifest if it is not the one of this name, or lies."""
        return decode_manifest(self._ask(WANTS_MANIFEST, HEADER_BYTES_MAX), name)

    def close(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.close()

    def _ask(self, number: int, most: int) -> bytes:
        assert self._line is not None
        try:
            self._line.sendall(REQUEST.pack(number))
            here, size = ANSWER.unpack(exactly(self._line, ANSWER.size))
            if not here:
                raise NotGiven(self.node, f"does not have block {number}")
            if size > most:
                raise NotGiven(self.node, f"sends {size} bytes for a block", lie=True)
            return exactly(self._line, size)
        except OSError as error:
            raise NotGiven(self.node, f"hangs up: {error}") from None


def _context() -> ssl.SSLContext:
    """The fingerprint is what is compared; names and signers of the certificate mean nothing."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    return made


class Gathering:
    """`own`: this node's name, as in its tickets. `origin` reads a block; without it, neighbors are
    all there is. The callbacks come from threads: `on_got` (a block is here, with its hash),
    `on_failed` (nobody could give it: which nodes did not, and which gave something else)."""

    def __init__(
        self,
        holding: Holding,
        own: str,
        origin: Origin | None = None,
        *,
        on_got: Callable[[int, bytes], None] = lambda *_: None,
        on_failed: Callable[[int, tuple[tuple[str, bool], ...]], None] = lambda *_: None,
        pace: Pace | None = None,
    ) -> None:
        self.holding = holding
        self._pace = pace or Pace()
        self.problems: deque[str] = deque(maxlen=16)  # of neighbors, newest last
        self.error: Exception | None = None  # of the origin or this disk; the threads have ended
        self._own = own
        self._origin = origin
        self._on_got, self._on_failed = on_got, on_failed
        self._peers: dict[str, Peer] = {}
        self._fails: dict[str, int] = {}
        self._offered: dict[int, tuple[bytes, tuple[str, ...]]] = {}
        self._claimed: dict[int, None] = {}
        self._wished: tuple[int, ...] = ()
        self._busy = {True: 0, False: 0}  # threads at neighbors, and at the origin
        self._under_way: set[int] = set()
        self._more = threading.Condition()
        self._over = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        works = [self._from_peers] * PEER_LINES
        if self._origin is not None:
            works += [self._from_origin] * ORIGIN_LINES
        for work in works:
            thread = threading.Thread(target=work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def offer(
        self, peers: Iterable[Peer], blocks: Iterable[tuple[int, bytes, Sequence[str]]]
    ) -> None:
        """Blocks with their hashes, and the neighbors that have them."""
        with self._more:
            self._peers.update({peer.node: peer for peer in peers})
            for number, name, nodes in blocks:
                if number not in self.holding.have and number not in self._under_way:
                    self._offered[number] = name, tuple(nodes)
            self._more.notify_all()

    def claim(self, numbers: Iterable[int]) -> None:
        """Blocks that this node is to read from the origin."""
        with self._more:
            self._claimed.update(dict.fromkeys(numbers))
            self._more.notify_all()

    def want(self, files: Iterable[int]) -> None:
        """These files next, in this order: somebody waits for them."""
        with self._more:
            self._wished = tuple(file for file in files if not self.holding.is_whole(file))

    def wishes(self) -> list[int]:
        """Blocks of these files that are not under way, for whoever asks for more blocks."""
        with self._more:
            coming = (self.holding.have, self._under_way, self._claimed, self._offered)
            return [
                one
                for file in self._wished
                for one in self.holding.layout.blocks(file)
                if not any(one in there for there in coming)
            ]

    def waiting(self) -> tuple[int, int]:
        """How many blocks could be taken on: from the origin, and from neighbors."""
        with self._more:
            origin = ORIGIN_LINES + 2 - len(self._claimed) - self._busy[False]
            return max(0, origin), max(0, 8 * PEER_LINES - len(self._offered) - self._busy[True])

    def rest(self) -> bool:
        """Nothing is left to do."""
        with self._more:
            return not (self._claimed or self._offered or any(self._busy.values()))

    def wait(self, timeout_s: float) -> None:
        """Until something has happened."""
        with self._more:
            self._more.wait(timeout_s)

    def pause(self, least_s: float) -> None:
        """So long, unless all threads have ended."""
        with self._more:
            self._more.wait_for(lambda: self._over, least_s)

    def close(self) -> None:
        with self._more:
            self._over = True
            self._more.notify_all()
        until = time.monotonic() + ENDS_S  # a read of the origin may hang
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    # -- the threads -----------------------------------------------------------------------

    def _from_origin(self) -> None:
        assert self._origin is not None
        while (task := self._next(self._claimed, peers=False)) is not None:
            number, _ = task
            try:
                if number not in self.holding.have:
                    self._pace.take(self.holding.layout.span(number).size)
                    self._keep(number, self._origin(number))
            except Exception as error:  # of any library that reads the origin, or of the disk
                self._fail(error)
            finally:
                self._done(number, peers=False)

    def _from_peers(self) -> None:
        lines: dict[str, Line] = {}
        while (task := self._next(self._offered, peers=True)) is not None:
            number, (name, nodes) = task
            try:
                if number not in self.holding.have:
                    self._ask_around(lines, number, name, nodes)
            except OSError as error:  # of this disk: those of neighbors are `NotGiven`
                self._fail(error)
            finally:
                self._done(number, peers=True)
        for line in lines.values():
            line.close()

    def _ask_around(
        self, lines: dict[str, Line], number: int, name: bytes, nodes: Sequence[str]
    ) -> None:
        size, failed = self.holding.layout.span(number).size, []
        self._pace.take(size)
        turn = number % len(nodes) if nodes else 0
        for node in (*nodes[turn:], *nodes[:turn]):
            with self._more:
                peer = self._peers.get(node)
                if peer is None or self._fails.get(node, 0) >= FAILS_MAX:
                    continue
            try:
                line = lines.get(node)
                if line is None:
                    line = lines[node] = Line(peer, self._own)
                data = line.block(number, size, name)
            except NotGiven as problem:
                if node in lines:
                    lines.pop(node).close()
                failed.append((node, problem.lie))
                with self._more:
                    self.problems.append(str(problem))
                    self._fails[node] = self._fails.get(node, 0) + 1
                continue
            self._keep(number, data, name)
            return
        self._on_failed(number, tuple(failed))

    def _keep(self, number: int, data: bytes, name: bytes = b"") -> None:
        self._on_got(number, self.holding.write(number, data, name))

    def _next(self, queue: dict[int, Work], *, peers: bool) -> tuple[int, Work] | None:
        """None: it is over."""
        with self._more:
            while not self._over:
                if queue:
                    number = self._first(queue)
                    self._busy[peers] += 1
                    self._under_way.add(number)
                    return number, queue.pop(number)
                self._more.wait()
            return None

    def _first(self, queue: Mapping[int, object]) -> int:
        for file in self._wished:
            for number in self.holding.layout.blocks(file):
                if number in queue:
                    return number
        return next(iter(queue))

    def _done(self, number: int, *, peers: bool) -> None:
        with self._more:
            self._busy[peers] -= 1
            self._under_way.discard(number)
            self._more.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._more:
            self.error = self.error or error
            self._over = True
            self._more.notify_all()


def fetch_manifest(peers: Sequence[Peer], name: str, own: str) -> Manifest:
    """From the first neighbor that gives the manifest of this name. Raises BadManifest with what
    each of them did."""
    problems = []
    for peer in peers:
        try:
            line = Line(peer, own)
        except NotGiven as problem:
            problems.append(str(problem))
            continue
        try:
            return line.manifest(name)
        except (NotGiven, BadManifest) as problem:
            problems.append(f"{peer.node}: {problem}")
        finally:
            line.close()
    raise BadManifest("; ".join(problems) or "no neighbor has it")


def gather(
    holding: Holding,
    manifest: Manifest,
    peers: Sequence[Peer],
    own: str,
    origin: Origin | None = None,
) -> list[str]:
    """All blocks of this manifest that are missing, from these neighbors, each of which has all of
    them. What no neighbor gives is read from the origin, and compared, too. Returns why blocks are
    still missing; empty: it is whole."""
    names = manifest.hashes()

    def verified(number: int) -> bytes:
        assert origin is not None
        data = origin(number)
        if hashlib.sha256(data).digest() != names[number]:
            raise NotGiven("the origin", f"has another block {number}", lie=True)
        return data

    failed: list[int] = []

    def give_up(number: int, _: object) -> None:
        if origin is None:
            failed.append(number)
        else:
            gathering.claim([number])

    gathering = Gathering(holding, own, verified if origin else None, on_failed=give_up)
    gathering.start()
    nodes = [peer.node for peer in peers]
    gathering.offer(peers, [(number, names[number], nodes) for number in holding.missing()])
    while not gathering.rest() and gathering.error is None:
        gathering.wait(1.0)
    gathering.close()
    if gathering.error is not None:
        return [str(gathering.error)]
    return list(gathering.problems) if failed else []
