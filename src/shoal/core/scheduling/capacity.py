"""How many members of a gang the nodes would hold if they were empty."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.core.scheduling.fit import area_of
from shoal.core.state.queue import Gang
from shoal.core.state.room import UNLIMITED, Level
from shoal.core.state.state import Node, State
from shoal.model.node import NodeIntent
from shoal.model.resources import Kind


def held_by_nodes(kinds: Mapping[Kind, int], gang: Gang) -> int:
    """How many members of the gang fit on empty nodes of these kinds."""
    total = 0
    demand = gang.demand
    for kind, count in kinds.items():
        if count and demand.suits(kind):
            empty = Level(kind.gpus, kind.cpu_milli, kind.memory_mb)
            each = empty.holds(demand, demand.share_milli(kind))
            if gang.per_node:
                each = gang.per_node if each >= gang.per_node else 0
            total += count * each
    return min(total, UNLIMITED)


def held_when_empty(
    state: State,
    gang: Gang,
    *,
    open_only: bool,
    avoid: Collection[int] = (),
    as_if: Mapping[int, Kind] | None = None,
) -> int:
    """How many members of the gang fit on the known nodes, or only the open ones, when empty; in
    the best area if it has to stay within one. `as_if`: kinds that these nodes are taken to be."""
    if not gang.bound:
        kinds = dict(state.open_capacity if open_only else state.capacity)
        for index in avoid:
            kinds[state.rooms[index].kind] -= 1
        for index, kind in (as_if or {}).items():
            if _counts(state.order[index], open_only) and index not in avoid:
                kinds[state.rooms[index].kind] -= 1
                kinds[kind] = kinds.get(kind, 0) + 1
        return held_by_nodes(kinds, gang)
    alone: dict[Kind, int] = {}
    near: dict[str, int] = {}
    for node in state.order:
        if _counts(node, open_only) and node.index not in avoid:
            kind = (as_if or {}).get(node.index) or state.rooms[node.index].kind
            if kind not in alone:
                alone[kind] = held_by_nodes({kind: 1}, gang)
            if alone[kind]:
                area = area_of(state, node, gang)
                near[area] = near.get(area, 0) + alone[kind]
    return min(max(near.values(), default=0), UNLIMITED)


def _counts(node: Node, open_only: bool) -> bool:
    return node.schedulable if open_only else node.intent is not NodeIntent.REMOVED
