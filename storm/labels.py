"""Labels and taints, decided by a seed: jobs that ask about them, and people who change them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.model.job import JobSpec
from shoal.model.node import LabelChange, NodeSpec
from shoal.model.report import SetLabels
from storm.world import World

LABELS_PART = 0.35  # of the histories have jobs that ask about labels
ASKING_PART = 0.4  # of the jobs there
SETTLED_MS = 200
WHERE = ("zone=z0", "zone!=z0", "zone=z0|z1", "zone", "!zone", "node!=n1", "pool")


class Labels:
    def __init__(
        self, world: World, nodes: Sequence[NodeSpec], rng: random.Random, counts: Counter[str]
    ) -> None:
        self._world = world
        self._nodes = nodes
        self._rng = rng
        self._counts = counts
        self._used = rng.random() < LABELS_PART
        self._stopped = False

    def plan(self, until_ms: int) -> None:
        """Drawn from a stream of its own, so that the rest of the history stays the same."""
        for _ in range(self._rng.randrange(1, 8) if self._used else 0):
            self._world.timeline.at(self._rng.randrange(until_ms), self._change)

    def wish(self, spec: JobSpec) -> JobSpec:
        """The same job, perhaps with conditions."""
        rng = self._rng
        if not self._used or rng.random() > ASKING_PART:
            return spec
        wishes: dict[str, Any] = {}
        if rng.random() < 0.6:
            wishes["where"] = (rng.choice(WHERE),)
        if rng.random() < 0.5:
            wishes["tolerates"] = rng.choice((("*",), ("old",), ("owner=red", "old")))
        if rng.random() < 0.4:
            wishes[rng.choice(("spread", "together"))] = "zone"
        self._counts["job that asks about labels"] += 1
        return msgspec.structs.replace(spec, **wishes)

    def stop(self) -> None:
        """Nobody changes anything any more, and all nodes have the labels that they report."""
        self._stopped = True
        self._world.timeline.after(SETTLED_MS, self._take_back)

    def _take_back(self) -> None:
        if not self._world.controller.readable:
            self._world.timeline.after(SETTLED_MS, self._take_back)
            return
        left = [
            node
            for node in self._world.controller.state.nodes.values()
            if node.labels_set or node.taints_set
        ]
        for node in left:
            change = LabelChange(
                labels={key: node.spec.labels.get(key) for key in node.labels_set},
                taints=dict.fromkeys(node.taints_set),
            )
            self._world.ask(SetLabels(node.id, change), lambda _: None)
        if left:
            self._world.timeline.after(SETTLED_MS, self._take_back)

    def _change(self) -> None:
        rng = self._rng
        if self._stopped:
            return
        node = rng.choice(self._nodes).id
        change = rng.choice(
            (
                LabelChange(labels={"zone": rng.choice(("z0", "z1", "z2", None))}),
                LabelChange(labels={"pool": rng.choice(("a", None))}),
                LabelChange(taints={"old": rng.choice(("", None))}),
                LabelChange(taints={"owner": rng.choice(("red", "blue", None))}),
            )
        )
        self._counts["labels changed"] += 1
        self._world.ask(SetLabels(node, change), lambda _: None)


def area_of(node: NodeSpec, spec: JobSpec) -> str | None:
    """What its members have in common on that node, as it is labeled in the calm; None: it may
    not run there."""
    labels = {**node.labels, "node": node.id}
    for condition in spec.where:
        if "=" in condition:
            key, _, values = condition.replace("!", "").partition("=")
            if (labels.get(key) in values.split("|")) is ("!" in condition):
                return None
        elif (condition.replace("!", "") in labels) is ("!" in condition):
            return None
    return labels.get(spec.together) if spec.together else ""
