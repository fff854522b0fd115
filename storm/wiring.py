"""The network between simulated nodes, decided by a seed: two groups, and a link that is ill."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

from shoal.model.fabric import Pair, Tour
from shoal.model.health import Standing
from shoal.model.node import NodeHealth, NodeSpec
from shoal.model.report import Accepted, Answer, CheckNetwork
from shoal.model.storage import CheckStorage
from storm.fabrictruth import FabricTruth
from storm.lives import Untruth
from storm.world import World

TOURS_PART, TOURS_PART_LARGE = 0.2, 0.6  # of the histories with less and with more than 3 nodes
STORAGE_PART = 0.2  # of the histories have storage checks
NEAR_MBS, FAR_MBS, ILL_MBS = 10_000, 2_000, 100
FIRST_MS, AGAIN_MS = 3_000, 2_000
TRIES_MAX = 6  # nodes come and go even then
PHASE_MS = 300


class Wiring:
    """Knows how the nodes are really connected. In the calm the network is measured once as it is,
    and once while the links of a node are ill."""

    def __init__(
        self,
        world: World,
        truth: FabricTruth,
        nodes: Sequence[NodeSpec],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._truth = truth
        self._rng = rng
        self._counts = truth.counts = counts
        # Two or more in each: a node that is the only one of its group looks like an ill one.
        self._other = {spec.id for spec in nodes[2:]} if len(nodes) > 3 else set()
        self.ill: dict[str, None] = {}  # nodes whose links are bad now
        part = TOURS_PART_LARGE if len(nodes) > 3 else TOURS_PART
        self._used = rng.random() < part
        self._stores = rng.random() < STORAGE_PART
        self._calm = False
        self._left: list[bool] = []  # tours of the calm that are to come: is a node ill?
        self._tries = 0
        self._asked = ""  # the tour of the calm that is under way
        world.pairs = self.pairs
        truth.group = self.group

    def group(self, node: str) -> int:
        return int(node in self._other)

    def place(self, node: NodeSpec) -> str:
        """As a tour of all nodes finds it."""
        return f"m{self.group(node.id)}/r1" if self._used else node.place

    def plan(self, until_ms: int) -> None:
        """Drawn from a stream of its own, so that the rest of the history stays the same."""
        rng, after = self._rng, self._world.timeline.after
        if self._stores:
            for _ in range(rng.randrange(1, 5)):
                after(rng.randrange(until_ms), self._ask_storage)
        if not self._used:
            return
        after(rng.randrange(FIRST_MS), self._ask)  # so that most jobs come after a tour
        for _ in range(rng.randrange(4)):
            after(rng.randrange(until_ms), self._ask)
        for _ in range(rng.randrange(3)):
            after(rng.randrange(until_ms), self._fall_ill)

    def calm_down(self) -> None:
        self.ill.clear()
        self._calm = True
        if self._used:
            self._left = [False, True]
            self._go_on()

    def pairs(self, own: str, id_: str, tour: Tour) -> tuple[Pair, ...]:
        """What a node measures with those before it in the list."""
        found = []
        off = False
        for host in tour.hosts[: tour.own]:
            machine = self._world.machines.get(host.node)
            if machine is None or not machine.up:
                found.append(Pair(host.node, fault="no route"))
                off = True
                continue
            near = self.group(own) == self.group(host.node)
            mbs = NEAR_MBS if near else FAR_MBS
            if own in self.ill or host.node in self.ill:
                mbs = ILL_MBS
            found.append(Pair(host.node, 20, mbs, mbs))
        self._truth.measures(id_, own, None if off else frozenset(self.ill))
        return tuple(found)

    def _ask(self) -> None:
        if not self._calm:
            self._counts["tour asked for"] += 1
            self._world.ask(CheckNetwork(), lambda _: None)

    def _ask_storage(self) -> None:
        self._counts["storage check asked for"] += 1
        self._world.ask(CheckStorage("/data", phase_ms=PHASE_MS), lambda _: None)

    def _fall_ill(self) -> None:
        """Soon after, somebody asks for a tour."""
        if not self._calm and self._world.machines:
            node = self._rng.choice(list(self._world.machines))
            self._counts["links of a node fall ill"] += 1
            self.ill[node] = None
            back = partial(self.ill.pop, node, None)
            self._world.timeline.after(self._rng.randrange(1_000, 60_000), back)
            self._world.timeline.after(self._rng.randrange(3_000), self._ask)

    # -- the calm --------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin the next tour as soon as all nodes are well, and wait for its end."""
        if self._asked in self._truth.concluded:
            if self.ill or not self._left[0]:
                self._left = self._left[1:]
            self._asked = ""
            self._tries += 1
            self.ill.clear()
        if not self._left:
            return
        self._world.timeline.after(AGAIN_MS, self._go_on)
        on = [name for name, machine in self._world.machines.items() if machine.up]
        if len(on) < 2 or self._tries == TRIES_MAX:
            self._left = []
        elif self._world.controller.readable and self._all_well(on):
            # Only beside what is usual for all of them can a node be found ill.
            if self._left[0] and not self.ill and self._truth.usual >= set(on):
                self.ill[self._rng.choice(on)] = None
            self._world.ask(CheckNetwork(), self._answered)

    def _all_well(self, names: list[str]) -> bool:
        """A tour of all also shows that nodes are well which were blamed in the storm."""
        usual = self._left[0] and self._truth.usual >= set(names)
        state = self._world.controller.state
        if any(tour.ended_ms is None for tour in state.heard.tours.values()):
            return False
        return all(
            name in state.nodes
            and state.nodes[name].health is NodeHealth.READY
            and (not usual or state.nodes[name].record.standing is Standing.OK)
            for name in names
        )

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Accepted):
            self._asked = answer.id

    def unsettled(self) -> str:
        """Tours and storage checks end, and the tours of the calm have been."""
        heard = self._world.controller.state.heard
        for tour in heard.tours.values():
            if tour.ended_ms is None:
                return f"the tour {tour.id} runs"
        if len(heard.tours) > 3:
            raise Untruth(f"{len(heard.tours)} tours are remembered")
        if heard.storing is not None and heard.storing.ended_ms is None:
            return f"the storage check {heard.storing.id} runs"
        return "the network is to be measured" if self._left else ""
