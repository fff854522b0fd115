"""Nodes that end, decided by a seed: notices that come early or late, that move, and that come
true or not; and drains that an operator plans."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.report import SetEnd, SetIntent
from storm.endtruth import EndTruth
from storm.node import StormNode
from storm.world import World

ENDS_PART = 0.35  # of the histories have nodes that end
NOTICES_MS = (0, 500, 4_000, 10_000, 20_000)
SETTLED_MS = 200


class Ends:
    def __init__(
        self,
        world: World,
        truth: EndTruth,
        nodes: Sequence[NodeSpec],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._truth = truth
        self._nodes = nodes
        self._rng = rng
        self._counts = counts
        self._stopped = False

    def plan(self, until_ms: int) -> None:
        """Drawn from a stream of its own, so that the rest of the history stays the same."""
        rng = self._rng
        if rng.random() > ENDS_PART:
            return
        for _ in range(rng.randrange(1, 6)):
            deed = rng.choice((self._notice, self._notice, self._plan_drain))
            self._later(rng.randrange(until_ms), deed)

    def stop(self) -> None:
        """All nodes live on, and nobody plans anything any more."""
        self._stopped = True
        for machine in self._world.machines.values():
            machine.end = None
        self._world.timeline.after(SETTLED_MS, self._take_back)

    def _take_back(self) -> None:
        if not self._world.controller.readable:
            self._world.timeline.after(SETTLED_MS, self._take_back)
            return
        for node in self._world.controller.state.nodes.values():
            if node.set_end is not None:
                self._world.ask(SetEnd(node.id, None), lambda _: None)

    def _later(self, in_ms: int, deed: Callable[[], None]) -> None:
        def do() -> None:
            if not self._stopped:
                deed()

        self._world.timeline.after(in_ms, do)

    def _notice(self) -> None:
        """A machine learns when it ends, perhaps a moment before."""
        own = {spec.id for spec in self._nodes}  # what a supplier brings is its own to end
        machines = self._world.machines.values()
        up = [machine for machine in machines if machine.up and machine.spec.id in own]
        if not up:
            return
        machine = self._rng.choice(up)
        self._counts["node says when it ends"] += 1
        self._say(machine, self._rng.choice(NOTICES_MS))
        if self._rng.random() < 0.4:
            self._later(self._rng.randrange(5_000), partial(self._move, machine))

    def _say(self, machine: StormNode, in_ms: int) -> None:
        end_ms = self._world.timeline.now_ms + in_ms
        machine.end = (end_ms, "spot notice")
        machine.report()
        self._later(in_ms, partial(self._come_true, machine, machine.incarnation, end_ms))

    def _move(self, machine: StormNode) -> None:
        if machine.up and machine.end is not None:
            self._counts["end moved"] += 1
            if self._rng.random() < 0.5:
                machine.end = None
                machine.report()
            else:
                self._say(machine, self._rng.choice(NOTICES_MS))

    def _come_true(self, machine: StormNode, incarnation: int, end_ms: int) -> None:
        said = machine.end is not None and machine.end[0] == end_ms
        if not machine.up or machine.incarnation != incarnation or not said:
            return
        if self._rng.random() < 0.2:
            self._counts["end did not come true"] += 1
            self._later(self._rng.randrange(10_000), partial(setattr, machine, "end", None))
            return
        self._counts["end came true"] += 1
        node = machine.spec.id
        if self._world.controller.readable:
            self._truth.came_true(node, end_ms)
        self._world.power_off(node, known=self._rng.random() < 0.5)
        self._later(self._rng.randrange(50, 15_000), partial(self._boot, machine))

    def _boot(self, machine: StormNode) -> None:
        if not machine.up:
            self._world.boot(machine.spec.id)

    def _plan_drain(self) -> None:
        rng, node = self._rng, self._rng.choice(self._nodes).id
        self._counts["drain planned"] += 1
        at_ms = self._world.timeline.now_ms + rng.choice(NOTICES_MS)
        self._world.ask(SetEnd(node, at_ms), lambda _: None)
        back = rng.choice((SetEnd(node, None), SetIntent(node, NodeIntent.OPEN), None))
        if back is not None:
            ask = partial(self._world.ask, back, lambda _: None)
            self._later(rng.randrange(25_000), ask)
