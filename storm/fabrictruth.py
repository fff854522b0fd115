"""How the nodes are really connected, against what the log says about it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from shoal.core.state.events.base import EventBase
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.nodes import FabricMeasured
from shoal.core.state.events.runs import JobPlaced
from shoal.model.node import NodeSpec
from shoal.model.policy import Places, Policy
from storm.lives import Untruth

MEASURED_PART = 0.5  # of the policies go by measured places
# Of fewer, a node with slow links may as well be a group of its own.
NODES_TO_COMPARE = 4
# What a placement says that it keeps off.
OFF = re.compile(
    r", off (?:the weak link between (?P<link>\S+ and [^\s;,]+)|(?P<suspects>.+), which)"
)


def with_places(rng: random.Random, policy: Policy) -> Policy:
    """Drawn from a stream of its own, so that the rest of the history stays the same."""
    place = Places.MEASURED if rng.random() < MEASURED_PART else Places.TYPED
    return msgspec.structs.replace(policy, place=place)


class FabricTruth:
    """Remembers what nodes really measured. A tour that measured all links finds the node that is
    ill, blames nobody else, and finds the groups as they are wired."""

    def __init__(self, policy: Policy) -> None:
        self.group: Callable[[str], int] = lambda _: 0
        self.concluded: dict[str, None] = {}  # tours whose result is in the log
        self.counts: Counter[str] = Counter()
        self._measured = policy.place is Places.MEASURED
        self._places: Mapping[str, str] = {}  # as the last tour found them
        self.usual: frozenset[str] = frozenset()  # all well on the last tour that a user asked for
        # By tour: which nodes were ill each time that a node measured; None: a peer was off.
        self._tours: dict[str, dict[str, list[frozenset[str] | None]]] = {}

    def measures(self, tour: str, node: str, ill: frozenset[str] | None) -> None:
        self._tours.setdefault(tour, {}).setdefault(node, []).append(ill)

    def as_placed(self, nodes: Mapping[str, NodeSpec]) -> Mapping[str, NodeSpec]:
        """The nodes with the places that count for gangs."""
        if not self._measured:
            return nodes
        return {
            name: msgspec.structs.replace(spec, place=self._places.get(name) or spec.place)
            for name, spec in nodes.items()
        }

    def see(self, event: EventBase) -> None:
        if isinstance(event, PolicyChanged):
            self._measured = event.policy.place is Places.MEASURED
        elif isinstance(event, FabricMeasured):
            before, self._places = self._places, event.fabric.places
            self.concluded[event.id] = None
            ill = self._ill(event)
            if ill is not None:
                self._judge(event, ill, before)
            if event.id.startswith("t"):
                self.usual = frozenset(() if ill is None or ill else event.nodes)
        elif isinstance(event, JobPlaced) and (said := OFF.search(event.why)):
            self.counts["a gang kept off what is in doubt"] += 1
            used = {slice_.node for slice_ in event.slices}
            suspects, link = said["suspects"], said["link"]
            if used & set((suspects or "").split(", ")) or used >= set(
                (link or "-").split(" and ")
            ):
                raise Untruth(f"{event.job} is on {sorted(used)} although {event.why}")

    def _ill(self, event: FabricMeasured) -> frozenset[str] | None:
        """Those that were ill during the whole tour; None: not the same ones, or not all links were
        measured."""
        tour, count = self._tours.get(event.id, {}), len(event.nodes)
        seen = [one for node in event.nodes for one in tour.get(node, [None])]
        whole = event.why.startswith(f"{count * (count - 1) // 2} link")
        return seen[0] if whole and len(set(seen)) == 1 else None

    def _judge(self, event: FabricMeasured, ill: frozenset[str], before: Mapping[str, str]) -> None:
        ill &= set(event.nodes)
        weak = {one.node for one in event.fabric.weak if not one.peer} & set(event.nodes)
        knew = not self._wrong(before, event.nodes, alone=True)
        # All links of a node that is the only one of its group are of one kind, and its own:
        # there is nothing to compare them with.
        groups = Counter(map(self.group, event.nodes))
        compared = all(groups[self.group(one)] > 1 for one in ill)
        known = knew and compared and len(event.nodes) >= NODES_TO_COMPARE
        known = known and self.usual >= set(event.nodes)
        if len(ill) == 1 and known:
            self.counts["an ill node is on a tour"] += 1
            if ill - weak:
                raise Untruth(f"the links of {min(ill)} are ill, and {event.id} has not found it")
        right = not self._wrong(event.fabric.places, event.nodes, alone=True)
        if right and (not ill or known) and len(ill) < 2 and weak - ill:
            raise Untruth(f"{event.id} blames {sorted(weak - ill)}, whose links are well")
        whole = 2 * len(set(before) & set(event.nodes)) >= len(before)
        if not ill and whole and event.id.startswith("t"):
            self.counts["groups compared with the wiring"] += 1
            if wrong := self._wrong(event.fabric.places, event.nodes):
                raise Untruth(f"{wrong} are wrongly grouped: {event.fabric.places}")

    def _wrong(
        self, places: Mapping[str, str], names: tuple[str, ...], *, alone: bool = False
    ) -> str:
        """Two nodes that these places have together or apart, and the wiring has not. A node that
        is the only one of its group shows no wiring, so it may be wrong."""
        sizes = Counter(map(self.group, names))
        several = [name for name in names if alone or sizes[self.group(name)] > 1]
        for one in several:
            for two in several:
                same = places.get(one, one) == places.get(two, two)
                if same != (self.group(one) == self.group(two)):
                    return f"{one} and {two}"
        return ""
