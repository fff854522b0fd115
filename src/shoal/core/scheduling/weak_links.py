"""Gangs keep off links that were measured to be weak, where there is another choice."""

from __future__ import annotations

from shoal.core.scheduling.fit import GangFit, fit
from shoal.core.state.queue import Gang
from shoal.core.state.state import State

TRIES_MAX = 4


def without_weak_links(
    state: State, gang: Gang, avoid: set[int], plan: GangFit
) -> tuple[set[int], GangFit]:
    """A plan in which no two nodes share a weak link, and what it avoids; if there is none, the
    same as before. Neither node is to blame, so either may be left out."""
    if len(plan.nodes) < 2 or not state.fabric.weak:
        return avoid, plan
    more, found, said = avoid, plan, ""
    for _ in range(TRIES_MAX):
        pair = _weak_pair(state, found)
        if pair is None:
            return more, found._replace(rule=found.rule + said)
        names = [state.order[index].id for index in pair]
        said = f", off the weak link between {names[0]} and {names[1]}"
        for left_out in reversed(pair):
            other = fit(state, gang, more | {left_out})
            if other is not None:
                more, found = more | {left_out}, other
                break
        else:
            return avoid, plan
    return avoid, plan


def _weak_pair(state: State, plan: GangFit) -> tuple[int, int] | None:
    used = {index for index, _ in plan.nodes}
    for weak in state.fabric.weak:
        one, two = state.nodes.get(weak.node), state.nodes.get(weak.peer)
        if one is not None and two is not None and {one.index, two.index} <= used:
            return one.index, two.index
    return None
