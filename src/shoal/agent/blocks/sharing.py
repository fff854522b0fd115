"""Fills a holding from its origin and from neighbors, as the head's tracker says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.agent.blocks.fetch import Gathering, Origin
from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.store import Holding
from shoal.model.blocks import Sought

TELL_S = 0.1
AGAIN_S = 3.0  # what was not answered is asked for again
ALONE_S = 10.0  # the head says nothing: each node reads the origin itself
# So does one that is answered and gets nothing. Another node has less time than that for a block.
IDLE_S = 150.0
GOT_MAX = 5_000  # blocks in one line
WISHES_MAX = 64  # blocks in one line


class Wanted(Protocol):
    """Who says which files are to be fetched. `arrived` is called when another block is here."""

    all: bool

    def files(self) -> Sequence[int]: ...
    def arrived(self) -> None: ...


class Room(NamedTuple):
    """How many blocks it would take now, from the origin and from neighbors, and these first."""

    origin: int
    peers: int
    wishes: tuple[int, ...] = ()

    @property
    def any(self) -> bool:
        return self.origin > 0 or self.peers > 0


class Sharing:
    """`say` gets what the head is to hear, as in `Seek`. With `wanted`, only those files are
    fetched, in this order; else all of them."""

    def __init__(
        self,
        holding: Holding,
        node: str,
        read: Origin,
        say: Callable[[dict[str, Any]], None],
        *,
        alone: bool = False,
        wanted: Wanted | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._holding, self._tell, self._wanted = holding, say, wanted
        self._alone = alone
        self._lock = threading.Lock()
        self._got = dict(holding.have)  # and not yet said
        self._bytes = holding.held_bytes
        self._refused: list[tuple[int, str, bool]] = []
        self._waits_since: float | None = None  # for the head's answer
        self._helped_at = time.monotonic()  # when there was something to do
        self._claimed_all = self._stopped = False
        self._gathering = Gathering(
            holding, node, read, on_got=self._has, on_failed=self._lacks, pace=pace
        )

    def run(self, heard: queue.SimpleQueue[Sought]) -> None:
        """Until all of it is here. Raises what the origin, or this disk, has raised."""
        gathering, holding = self._gathering, self._holding
        gathering.start()
        said_at, before = -AGAIN_S, Room(-1, -1)
        while len(holding.have) < holding.layout.count and gathering.error is None:
            if self._stopped:
                break
            now, room = time.monotonic(), self._room()
            news = self._got or self._refused or (room != before and room.any)
            busy = room.any or not gathering.rest()
            if news or (busy and now - said_at > AGAIN_S):
                said_at, before = now, room
                self._say(room)
                if room.any and self._waits_since is None:
                    self._waits_since = now
            while not heard.empty():
                self._take(heard.get())
            self._go_on_alone(now, wants=room.any)
            gathering.pause(TELL_S)
        gathering.close()
        self._say(Room(0, 0))
        if gathering.error is not None:
            raise gathering.error

    def stop(self) -> None:
        self._stopped = True

    @property
    def _only(self) -> bool:
        return self._wanted is not None and not self._wanted.all

    def _room(self) -> Room:
        origin, peers = self._gathering.waiting()
        if not self._only:
            return Room(origin, peers)
        assert self._wanted is not None
        self._gathering.want(self._wanted.files())
        wishes = tuple(self._gathering.wishes()[:WISHES_MAX])
        return Room(min(origin, len(wishes)), min(peers, len(wishes)), wishes)

    def _go_on_alone(self, now: float, *, wants: bool) -> None:
        if not (wants and self._gathering.rest()):
            self._helped_at = now
        elif now - self._helped_at > IDLE_S or (
            self._waits_since is not None and now - self._waits_since > ALONE_S
        ):
            self._alone = True
        if self._alone and self._only:
            self._gathering.claim(self._gathering.wishes())
        elif self._alone and not self._claimed_all:
            self._claimed_all = True
            self._gathering.claim(self._holding.missing())

    def _has(self, number: int, name: bytes) -> None:
        with self._lock:
            self._got[number] = name
            self._bytes += self._holding.layout.span(number).size
        if self._wanted is not None:
            self._wanted.arrived()

    def _lacks(self, number: int, failed: tuple[tuple[str, bool], ...]) -> None:
        with self._lock:
            self._refused += [(number, node, lie) for node, lie in failed]
        if self._alone or not failed:
            self._gathering.claim([number])

    def _say(self, room: Room) -> None:
        with self._lock:
            got = list(self._got.items())[:GOT_MAX]
            for number, _ in got:
                del self._got[number]
            refused, self._refused = self._refused, []
        problems = self._gathering.problems
        self._tell(
            {
                "got": self._bytes,
                "blocks": got,
                "refused": refused,
                "origin": room.origin,
                "peers": room.peers,
                "wish": room.wishes,
                "only": self._only,
                "seeks": not self._alone,
                "complaints": [problems.popleft() for _ in range(len(problems))],
            }
        )

    def _take(self, sought: Sought) -> None:
        """What the head says."""
        self._waits_since = None
        for number in sought.again:
            self._holding.forget(number)
        if sought.anew:
            with self._lock:
                self._got = dict(self._holding.have)
        self._gathering.offer(sought.peers, sought.blocks)
        self._gathering.claim((*sought.origin, *sought.again))
        self._alone = self._alone or sought.alone
