"""How many nodes would make waiting gangs start: bins of what is free or on its way, and what is
missing beyond them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shoal.core.scheduling.fit import members_here
from shoal.core.state.queue import Gang
from shoal.core.state.room import Level
from shoal.core.state.state import State
from shoal.core.state.supplied import kind_of, nodes_brought, orders_of
from shoal.model.job import Within
from shoal.model.node import NodeIntent
from shoal.model.resources import Kind


class Bin(NamedTuple):
    """Nodes that are alike. `group`: those that were ordered and that nobody uses yet.
    `ends_ms`: when they end; 0: not known to end."""

    kind: Kind
    level: Level
    group: str = ""
    ends_ms: int = 0

    def lives(self, until_ms: int | None) -> bool:
        """`until_ms`: None is forever."""
        return not self.ends_ms or (until_ms is not None and until_ms <= self.ends_ms)


def empty_level(kind: Kind) -> Level:
    return Level(kind.gpus, kind.cpu_milli, kind.memory_mb)


def fits_empty(gang: Gang, kind: Kind) -> int:
    """How many members of such gangs an empty node of this kind takes."""
    return _each(gang, kind, empty_level(kind)) if gang.demand.suits(kind) else 0


def on_one_node(gang: Gang) -> bool:
    return gang.required and gang.within is not Within.ANYWHERE


def _each(gang: Gang, kind: Kind, level: Level) -> int:
    """Where nodes that have not come will stand is unknown, so a gang that must stay in one rack is
    promised room only on one node."""
    each = members_here(gang, kind, level)
    if on_one_node(gang):
        return each // gang.members * gang.members
    return each


def could_bring(state: State, gang: Gang) -> bool:
    """Could the supplies of the policy bring enough nodes, beside those that are there? With one
    supply at a time, as they are ordered."""
    for one in state.policy.supply:
        each = fits_empty(gang, kind_of(state, one))
        if each and one.most * each >= gang.members:
            return True
        if each and not on_one_node(gang):
            own = Counter({kind: count for kind, count in state.capacity.items() if count})
            for order in orders_of(state, one.name):
                own.subtract(
                    state.rooms[node.index].kind
                    for node in nodes_brought(state, order.id)
                    if node.intent is not NodeIntent.REMOVED
                )
            there = sum(count * fits_empty(gang, kind) for kind, count in own.items())
            if there + one.most * each >= gang.members:
                return True
    return False


class Bins:
    """Counts of nodes by kind and level. The first ones are filled first."""

    def __init__(self, counts: Iterable[tuple[Bin, int]]) -> None:
        self._counts: dict[Bin, int] = {}
        self.used: Counter[str] = Counter()  # nodes of each group that some gang needs
        self.looked = 0  # how much work that was
        for bin_, count in counts:
            self.add(bin_, count)

    def add(self, bin_: Bin, count: int) -> None:
        self._counts[bin_] = self._counts.get(bin_, 0) + count

    def drop(self, bin_: Bin) -> None:
        """One such node is not for gangs that come later."""
        if self._counts.get(bin_, 0) > 0:
            self._counts[bin_] -= 1

    def holds(self, gang: Gang, limit: int, until_ms: int | None) -> int:
        """How many members of such gangs have room until then, counted up to `limit`."""
        total = 0
        self.looked += len(self._counts)
        for bin_, count in self._counts.items():
            if count and bin_.lives(until_ms) and gang.demand.suits(bin_.kind):
                total += count * _each(gang, bin_.kind, bin_.level)
                if total >= limit:
                    return limit
        return total

    def take(self, gang: Gang, members: int, until_ms: int | None) -> None:
        """Put members of such gangs, for which there is room, into the bins."""
        self.looked += len(self._counts)
        for bin_, count in list(self._counts.items()):
            if members <= 0:
                return
            if not count or not bin_.lives(until_ms) or not gang.demand.suits(bin_.kind):
                continue
            each = _each(gang, bin_.kind, bin_.level)
            if not each:
                continue
            whole = min(count, members // each)
            self._fill(bin_, gang, whole, each)
            members -= whole * each
            if members > 0 and whole < count:
                self._fill(bin_, gang, 1, members)
                members = 0

    def _fill(self, bin_: Bin, gang: Gang, nodes: int, members: int) -> None:
        """This many nodes of the bin take this many members each."""
        if not nodes:
            return
        self._counts[bin_] -= nodes
        if not self._counts[bin_]:
            del self._counts[bin_]
        if bin_.group:
            self.used[bin_.group] += nodes
        if not gang.whole_nodes:
            share = gang.demand.share_milli(bin_.kind)
            level = bin_.level.minus(gang.demand, share, members)
            self.add(bin_._replace(level=level, group=""), nodes)
