"""Nodes that lie: their reports name members of other nodes, and members that no gang has."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import Beat, Progress, Spent
from shoal.model.report import (
    Getting,
    Idle,
    MemberExit,
    NodeReport,
    Refusal,
    Slept,
    Touched,
    Uses,
    Woke,
)
from storm import datasets
from storm.lives import Lives
from storm.world import World

SHORTEST_MS = 500
STRANGE = 1_000  # a member number that no gang has
HUGE = 1 << 40
LIES: dict[str, Callable[[MemberRef, random.Random], object]] = {
    "alive": lambda ref, _: ref,
    "stopping": lambda ref, _: ref,
    "ended": lambda ref, _: ref,
    "dozing": lambda ref, _: ref,
    "waking": lambda ref, _: ref,
    "exits": lambda ref, rng: MemberExit(
        ref,
        rng.choice((0, 1, 137)),
        "a lie",
        rng.random() < 0.5,
        fault=rng.choice(list(Fault)),
        spent=Spent(steps=HUGE),
    ),
    "progress": lambda ref, rng: Progress(
        ref, Beat(ref=str(ref), step=HUGE, steps=HUGE, saved_step=HUGE), rng.randrange(HUGE)
    ),
    "idle": lambda ref, _: Idle(ref, HUGE),
    "getting": lambda ref, _: Getting(ref, "a lie"),
    "asleep": lambda ref, rng: Slept(ref, rng.choice((-HUGE, 0, HUGE)), -1),
    "woke": lambda ref, _: Woke(ref, -1),
    "refused": lambda ref, _: Refusal(ref, "a lie"),
    "touched": lambda ref, rng: Touched(ref, rng.randrange(9)),
    "uses": lambda ref, _: Uses(ref, HUGE),
}


class Liars:
    """Twists reports on their way to the controller. The witnesses see them as they were: whatever
    the liar says, nothing that is not its own may change, and no step may fail."""

    def __init__(
        self,
        world: World,
        lives: Lives,
        nodes: Sequence[NodeSpec],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._lives = lives
        self._nodes = [spec.id for spec in nodes]
        self._rng = rng
        self._counts = counts
        self._lying: dict[str, None] = {}

    def plan(self, until_ms: int) -> None:
        rng, at = self._rng, self._world.timeline.at
        self._world.controller.twist = self.twist
        for _ in range(rng.randrange(1, 4)):
            node, from_ms = rng.choice(self._nodes), rng.randrange(until_ms)
            long_ms = rng.randrange(SHORTEST_MS, until_ms)
            at(from_ms, partial(self._lying.__setitem__, node, None))
            at(min(until_ms, from_ms + long_ms), partial(self._lying.pop, node, None))

    def twist(self, report: NodeReport) -> NodeReport:
        node, rng = report.spec.id, self._rng
        if node not in self._lying or rng.random() < 0.5:
            return report
        refs = self._foreign(node)
        if not refs:
            return report
        self._counts["report with lies"] += 1
        names = rng.sample(list(LIES), rng.randrange(1, len(LIES)))
        lies = {
            name: (*getattr(report, name), *(LIES[name](ref, rng) for ref in refs))
            for name in names
        }
        return msgspec.structs.replace(report, **lies, holdings=datasets.LIES)

    def _foreign(self, node: str) -> list[MemberRef]:
        """Of members that live elsewhere, and of those that live here with another number."""
        found = [MemberRef("j1", 1, STRANGE)]
        for life in self._lives.living:
            strange = life.ref._replace(member=life.ref.member + STRANGE)
            found += [strange] if life.node == node else [strange, life.ref]
        return self._rng.sample(found, min(len(found), 4))
