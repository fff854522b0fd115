"""The tracker: which nodes hold which blocks, and who reads which block from its origin.

In memory only: a head that starts anew asks the nodes that want something. What a node says counts
for the volumes and packages of jobs that it has members of, and its answers name only nodes for
which that was so, too: what one tenant has fetched is for nodes that run that tenant's jobs.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable

from shoal.core.state.state import State
from shoal.model.blocks import (
    BLOCKS_MAX,
    HASH_BYTES,
    Door,
    Peer,
    Seek,
    Sought,
    digest,
    package_source,
    peer_of,
)
from shoal.model.job import Job
from shoal.model.volume import parse

log = logging.getLogger("shoal.control")

SETS_MAX = 256  # that are kept track of; the least recently wanted are forgotten
BLOCKS_TRACKED_MAX = 4 * BLOCKS_MAX
SOURCES_MAX = 3  # of one block, in an answer
GIVEN_MAX = 256  # blocks in an answer
CLAIM_S = 10.0  # a node that says nothing for so long is not reading the origin any more
CLAIM_S_MAX = 120.0  # nor is one that has not read a block in this time

Answer = Callable[[Sought], None]


class Seeker:
    """A node that fetches, or has fetched: which blocks it has, and what it could still take."""

    def __init__(self, count: int) -> None:
        self.have = bytearray(count)
        self.near: list[int] = []  # it may lack these, and neighbors have them
        self.origin = 0
        self.peers = 0
        self.wish: dict[int, None] = {}  # these first, in this order
        self.only = False  # and no others
        self.heard_at = 0.0
        self.answer: Answer | None = None  # None: it seeks nothing now
        self.seek: Seek | None = None


class Tracked:
    """One set of files. `alone`: blocks that each node reads from the origin itself."""

    def __init__(self, key: str, count: int) -> None:
        self.key = key
        self.count = count
        self.names: dict[int, bytes] = {}
        self.claims: dict[int, tuple[str, float]] = {}
        self.free = list(range(count - 1, -1, -1))  # nobody has read them; the next is the last
        self.alone: set[int] = set()
        self.seekers: dict[str, Seeker] = {}


class Tracker:
    """`doors` are those of all nodes that offer anything; `peer` lets others use them, too."""

    def __init__(
        self, state: Callable[[], State], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.doors: dict[str, Door] = {}
        self._state = state
        self._now_s = now_s
        self._sets: dict[str, Tracked] = {}  # the most recently wanted last

    def opens(self, node: str, door: Door) -> None:
        if len(door.fingerprint) == HASH_BYTES and door.secret and 0 < door.port < 65_536:
            self.doors[node] = door
            for tracked in self._sets.values():
                if node in tracked.seekers:
                    self._tell_others(tracked, node)

    def peer(self, node: str, key: str, fetcher: str) -> Peer | None:
        """How `fetcher` gets into the door of this node, for the set `key`. None: it has none. The
        caller knows that it may."""
        door, record = self.doors.get(node), self._state().nodes.get(node)
        if door is None or record is None:
            return None
        return peer_of(node, record.spec.address, door, key, fetcher, int(time.time()))

    def seek(self, seek: Seek, node: str, answer: Answer) -> None:
        key = self._key(seek, node)
        if key is None:
            return
        tracked, anew = self._track(key, seek)
        if tracked is None:
            answer(_reply(seek, alone=True))
            return
        seeker = tracked.seekers.get(node)
        if seeker is not None and seek.begins:
            self._forget(tracked, node, seeker)
        if seeker is None or seek.begins:
            anew = True
            seeker = tracked.seekers[node] = Seeker(tracked.count)
            seeker.near = list(tracked.names)
        seeker.seek, seeker.heard_at = seek, self._now_s()
        seeker.origin, seeker.peers, seeker.answer = seek.origin, seek.peers, answer
        seeker.wish, seeker.only = dict.fromkeys(seek.wish[:GIVEN_MAX]), seek.only
        again = self._take(tracked, node, seeker, seek)
        if seek.changed:
            self._sets.pop(key, None)
            return
        if seek.over:
            seeker.answer = None
            self._free(tracked, lambda _, claim: claim[0] == node)
        self._expire(tracked)
        if not seek.over:
            self._give(tracked, node, seeker, again=again, anew=anew and not seek.got)
        if seek.got or seek.over:
            self._tell_others(tracked, node)

    def _tell_others(self, tracked: Tracked, node: str) -> None:
        for other, one in list(tracked.seekers.items()):
            if other != node and one.answer is not None:
                self._give(tracked, other, one, news=True)

    # -- whom to believe -------------------------------------------------------------------

    def _key(self, seek: Seek, node: str) -> str | None:
        job = self._state().placed.get(node, {}).get(seek.ref)
        if job is None or not 0 < seek.count <= BLOCKS_MAX:
            return None
        if seek.source == package_source(job.spec.package) and job.spec.package:
            return digest(seek.source, job.spec.package)  # its name is its hash, for every tenant
        if seek.source in _urls(job) and seek.fingerprint and len(seek.fingerprint) <= 200:
            return digest(job.spec.tenant, seek.source, seek.fingerprint)
        return None

    def _track(self, key: str, seek: Seek) -> tuple[Tracked | None, bool]:
        """None: it does not fit. And whether it is new."""
        tracked = self._sets.pop(key, None)
        if tracked is not None and tracked.count != seek.count:
            log.warning("a set of %d blocks is said to have %d", tracked.count, seek.count)
            self._sets[key] = tracked
            return None, False
        anew = tracked is None
        if tracked is None:
            while self._sets and (
                len(self._sets) >= SETS_MAX
                or sum(one.count for one in self._sets.values()) + seek.count > BLOCKS_TRACKED_MAX
            ):
                del self._sets[next(iter(self._sets))]
            tracked = Tracked(key, seek.count)
        self._sets[key] = tracked
        return tracked, anew

    def _take(self, tracked: Tracked, node: str, seeker: Seeker, seek: Seek) -> list[int]:
        """What the node says. Returns the blocks that it has and that others do not agree about."""
        again = []
        for number in seek.alone:
            if 0 <= number < tracked.count:
                self._set_apart(tracked, number)
        for number, name in seek.got:
            if not 0 <= number < tracked.count or len(name) != HASH_BYTES:
                continue
            tracked.claims.pop(number, None)
            if number in tracked.alone:
                continue
            known = tracked.names.get(number)
            if known is not None and known != name:
                holders = self._holders(tracked, number, node)
                log.warning(
                    "block %d of %s is not the same on %s and on %s: each reads it from its origin",
                    *(number, seek.source, node, ", ".join(holders) or "a node that was"),
                )
                self._set_apart(tracked, number)
                seeker.have[number] = 1
                again.append(number)
                continue
            seeker.have[number] = 1
            if known is None:
                tracked.names[number] = name
                for other, one in tracked.seekers.items():
                    if other != node:
                        one.near.append(number)
        for number, other, lie in seek.refused:
            self._refuse(tracked, node, seek, number, other, lie=lie)
        return again

    def _refuse(
        self, tracked: Tracked, node: str, seek: Seek, number: int, other: str, *, lie: bool
    ) -> None:
        """`other` did not give a block. If nobody else has it, somebody reads it again."""
        giver = tracked.seekers.get(other)
        if not 0 <= number < tracked.count or giver is None or number in tracked.alone:
            return
        if lie:
            log.warning(
                "%s has a corrupt block %d of %s, says %s", other, number, seek.source, node
            )
        giver.have[number] = 0
        if number in tracked.names and not self._holders(tracked, number, ""):
            del tracked.names[number]
            tracked.free.append(number)
        else:
            tracked.seekers[node].near.append(number)

    def _forget(self, tracked: Tracked, node: str, seeker: Seeker) -> None:
        """It begins again, perhaps without what it had. What nobody else has is read again."""
        del tracked.seekers[node]
        self._free(tracked, lambda _, claim: claim[0] == node)
        for number in [one for one in tracked.names if seeker.have[one]]:
            if not self._holders(tracked, number, node):
                del tracked.names[number]
                tracked.free.append(number)

    def _set_apart(self, tracked: Tracked, number: int) -> None:
        """From now on, each node reads it from the origin, also those that have it."""
        tracked.alone.add(number)
        tracked.names.pop(number, None)
        tracked.claims.pop(number, None)
        for seeker in tracked.seekers.values():
            if seeker.have[number] and seeker.answer is not None and seeker.seek is not None:
                seeker.answer(_reply(seeker.seek, again=(number,)))

    # -- what to give ----------------------------------------------------------------------

    def _give(
        self,
        tracked: Tracked,
        node: str,
        seeker: Seeker,
        *,
        again: Iterable[int] = (),
        anew: bool = False,
        news: bool = False,
    ) -> None:
        """`news`: it has not asked, and is told only what helps it."""
        assert seeker.seek is not None
        assert seeker.answer is not None
        blocks, peers = self._near(tracked, node, seeker)
        origin = self._claim(tracked, node, seeker)
        seeker.peers -= len(blocks)
        seeker.origin -= len(origin)
        reply = _reply(
            seeker.seek,
            peers=tuple(peers.values()),
            blocks=tuple(blocks),
            origin=tuple(origin),
            again=tuple(again),
            anew=anew,
        )
        if blocks or origin or not news:
            seeker.answer(reply)

    def _near(
        self, tracked: Tracked, node: str, seeker: Seeker
    ) -> tuple[list[tuple[int, bytes, tuple[str, ...]]], dict[str, Peer]]:
        """Any of them, so that neighbors soon have different ones to give to each other."""
        blocks: list[tuple[int, bytes, tuple[str, ...]]] = []
        peers: dict[str, Peer] = {}
        wishes = [one for one in seeker.wish if one in tracked.names]
        later = []  # nobody who has them has a door yet
        while (wishes or (seeker.near and not seeker.only)) and len(blocks) < min(
            seeker.peers, GIVEN_MAX
        ):
            if wishes:
                number = wishes.pop(0)
            else:
                at = random.randrange(len(seeker.near))
                seeker.near[at], seeker.near[-1] = seeker.near[-1], seeker.near[at]
                number = seeker.near.pop()
            name = tracked.names.get(number)
            if name is None or seeker.have[number]:
                continue
            nodes: list[str] = []
            for other in self._holders(tracked, number, node):
                peer = peers.get(other) or self.peer(other, tracked.key, node)
                if peer is not None and len(nodes) < SOURCES_MAX:
                    peers[other] = peer
                    nodes.append(other)
            if nodes:
                blocks.append((number, name, tuple(nodes)))
                seeker.wish.pop(number, None)
            else:
                later.append(number)
        seeker.near += later
        return blocks, peers

    def _holders(self, tracked: Tracked, number: int, but: str) -> list[str]:
        found = [
            other
            for other, seeker in tracked.seekers.items()
            if other != but and seeker.have[number]
        ]
        random.shuffle(found)
        return found

    def _claim(self, tracked: Tracked, node: str, seeker: Seeker) -> list[int]:
        wishes = list(seeker.wish)
        origin: list[int] = []
        while (wishes or (tracked.free and not seeker.only)) and len(origin) < min(
            seeker.origin, GIVEN_MAX
        ):
            number = wishes.pop(0) if wishes else tracked.free.pop()
            known = number in tracked.names or number in tracked.claims or number in tracked.alone
            if not 0 <= number < tracked.count or known or seeker.have[number]:
                continue
            tracked.claims[number] = node, self._now_s()
            seeker.wish.pop(number, None)
            origin.append(number)
        if seeker.origin and not origin and tracked.alone:
            wanted = seeker.wish if seeker.only else sorted(tracked.alone)
            alone = [one for one in wanted if one in tracked.alone and not seeker.have[one]]
            origin = alone[: min(seeker.origin, GIVEN_MAX)]
            for number in origin:
                seeker.have[number] = 1
        return origin

    def _expire(self, tracked: Tracked) -> None:
        now = self._now_s()

        def is_late(_: int, claim: tuple[str, float]) -> bool:
            heard_at = tracked.seekers[claim[0]].heard_at
            return now - heard_at > CLAIM_S or now - claim[1] > CLAIM_S_MAX

        self._free(tracked, is_late)

    def _free(self, tracked: Tracked, which: Callable[[int, tuple[str, float]], bool]) -> None:
        for number in [one for one, claim in tracked.claims.items() if which(one, claim)]:
            del tracked.claims[number]
            tracked.free.append(number)


def _urls(job: Job) -> set[str]:
    return {volume.source for volume in map(parse, job.spec.volumes) if volume.url}


def _reply(seek: Seek, **words: object) -> Sought:
    return Sought(ref=seek.ref, source=seek.source, fingerprint=seek.fingerprint, **words)  # type: ignore[arg-type]
