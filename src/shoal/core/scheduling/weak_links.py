"""Gangs keep off weak links and off nodes that are suspect, where there is another choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from shoal.core.scheduling.fit import GangFit, fit, members_here
from shoal.core.state.queue import Gang
from shoal.core.state.state import State
from shoal.model.health import Standing
from shoal.model.resources import Slice

TRIES_MAX = 4


def off_weak(
    state: State, gang: Gang, avoid: Collection[int], plan: GangFit, kept: Iterable[Slice] = ()
) -> tuple[Collection[int], GangFit]:
    """A plan without suspect nodes in which no two nodes share a weak link, and what it avoids; if
    there is none, the same as before. `kept`: what other members of the gang hold, and keep."""
    if not state.troubled and not state.fabric.weak:
        return avoid, plan
    stay = {state.nodes[slice_.node].index for slice_ in kept}
    if gang.members + len(stay) < 2:
        return avoid, plan
    avoid, plan = _off_suspects(state, gang, avoid, plan, kept)
    more, better = set(avoid), plan
    for _ in range(TRIES_MAX):
        pair = _weak_pair(state, better, stay)
        if pair is None:
            return more, better
        names = " and ".join(state.order[index].id for index in pair)
        off = f", off the weak link between {names}"
        # Neither node is to blame, so either may be left out.
        for left_out in (index for index in reversed(pair) if index not in stay):
            other = fit(state, gang, more | {left_out}, kept)
            if other is not None:
                more.add(left_out)
                better = other._replace(off=off)
                break
        else:
            break
    return avoid, plan


def _off_suspects(
    state: State, gang: Gang, avoid: Collection[int], plan: GangFit, kept: Iterable[Slice]
) -> tuple[Collection[int], GangFit]:
    suspects = _suspects(state)
    used = [index for index, _ in plan.nodes if index in suspects]
    better = fit(state, gang, {*avoid, *suspects}, kept) if used else None
    if better is None:
        return avoid, plan
    names = ", ".join(state.order[index].id for index in used[:TRIES_MAX])
    return {*avoid, *suspects}, better._replace(off=f", off {names}, which is being checked")


def doubtful(state: State, gang: Gang, kept: Iterable[Slice] = ()) -> tuple[set[int], int]:
    """Nodes without which a gang of any size has neither a suspect node nor a weak link beside what
    it keeps, and how many members of it they would hold."""
    if not state.troubled and not state.fabric.weak:
        return set(), 0
    stay = {state.nodes[slice_.node].index for slice_ in kept}
    out = _suspects(state) - stay
    for pair in _pairs(state):
        if not out & set(pair):
            out |= set(sorted(set(pair) - stay)[-1:])
    rooms = [state.rooms[index] for index in out if state.order[index].schedulable]
    suitable = [room for room in rooms if gang.demand.suits(room.kind)]
    return out, sum(members_here(gang, room.kind, room.level) for room in suitable)


def _suspects(state: State) -> set[int]:
    nodes = (state.nodes[name] for name in state.troubled)
    return {node.index for node in nodes if node.record.standing is Standing.SUSPECT}


def _weak_pair(state: State, plan: GangFit, stay: set[int]) -> tuple[int, int] | None:
    used = {index for index, _ in plan.nodes} | stay
    pairs = (pair for pair in _pairs(state) if used.issuperset(pair))
    return next((pair for pair in pairs if not stay.issuperset(pair)), None)


def _pairs(state: State) -> Iterator[tuple[int, int]]:
    for weak in state.fabric.weak:
        one, two = state.nodes.get(weak.node), state.nodes.get(weak.peer)
        if one is not None and two is not None:
            yield one.index, two.index
