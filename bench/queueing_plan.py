"""Who gets which GPUs in Shoal's own world: one pass in order of rank over nodes with real room."""

from __future__ import annotations

from collections.abc import Sequence

from bench.queueing_policies import Live

NODES = 8
GPUS_PER_NODE = 8

Nodes = tuple[tuple[int, int], ...]  # (node, GPUs there)


class Plan:
    """Claims on the cluster's GPUs. Jobs must come in order of rank, the best first.

    A running job keeps its GPUs unless somebody who came before it has claimed them; a job that
    needs a place takes free GPUs, and only where there are none those of the worst-ranked jobs.
    """

    def __init__(self, running: Sequence[Live], hopeless: set[int]) -> None:
        """`running` in order of rank; `hopeless` gathers the numbers of GPUs that found no room."""
        self.unclaimed = [GPUS_PER_NODE] * NODES
        self._order = {live.job.number: position for position, live in enumerate(running)}
        # Running jobs whose turn has not come: they lose their place only to somebody better.
        self._undecided: list[list[tuple[Live, int]]] = [[] for _ in range(NODES)]
        for live in running:
            for node, gpus in live.nodes:
                self._undecided[node].append((live, gpus))
        self._hopeless = hopeless

    @property
    def full(self) -> bool:
        return not any(self.unclaimed)

    def keep(self, live: Live) -> bool:
        """Its turn has come: does the running job stay where it is?"""
        for node, _ in live.nodes:
            self._undecided[node] = [entry for entry in self._undecided[node] if entry[0] != live]
        stays = all(self.unclaimed[node] >= gpus for node, gpus in live.nodes)
        if stays:
            self._claim(live.nodes)
        return stays

    def place(self, gpus: int) -> Nodes | None:
        """Claims that disturb the fewest and worst-ranked jobs, or None if there is no room."""
        if gpus in self._hopeless:
            return None
        full, rest = divmod(gpus, GPUS_PER_NODE)
        nodes = [(node, GPUS_PER_NODE) for node in self._best(GPUS_PER_NODE)[:full]]
        if rest:
            taken = [node for node, _ in nodes]
            nodes += [(node, rest) for node in self._best(rest) if node not in taken][:1]
        if sum(count for _, count in nodes) < gpus:
            self._hopeless.add(gpus)
            return None
        self._claim(tuple(nodes))
        return tuple(nodes)

    def _best(self, gpus: int) -> list[int]:
        nodes = [node for node in range(NODES) if self.unclaimed[node] >= gpus]
        return sorted(nodes, key=lambda node: self._cost(node, gpus))

    def _cost(self, node: int, gpus: int) -> tuple[int, int]:
        """(how good a job would be disturbed, GPUs left free): the smallest is best."""
        left = self.unclaimed[node] - gpus
        disturbed = 0
        for live, count in self._undecided[node]:
            if count <= left:
                left -= count
            elif not disturbed:
                disturbed = len(self._order) - self._order[live.job.number]
        return disturbed, left

    def _claim(self, nodes: Nodes) -> None:
        for node, gpus in nodes:
            self.unclaimed[node] -= gpus
