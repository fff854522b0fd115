"""Replicas of one service go to different nodes, so that a lost node takes few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from shoal.core.scheduling.fit import GangFit, fit, narrowed, values_of
from shoal.core.state.queue import Gang
from shoal.core.state.state import State
from shoal.model.job import Job

TRIES_MAX = 8  # beyond this many on every node it hardly matters which


def spread(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    """A node with as few replicas of the same service as possible, and among those the one that the
    policy prefers; first of all in the value of its `spread` label with the fewest. None if the job
    is not a replica, or is the first."""
    here = Counter(
        state.nodes[member.slice.node].index
        for other in state.replicas.get(job.spec.service, ())
        if state.jobs[other].active
        for member in state.jobs[other].members
    )
    if not here:
        return None
    for gang_, where in (*_by_value(state, gang, here), (gang, "")):
        plan = _least_crowded(state, gang_, here, avoid) or (
            fit(state, gang_, avoid) if where else None
        )
        if plan is not None:
            return plan._replace(
                rule=f"{plan.rule} among the {where}nodes with the fewest replicas"
            )
    return None


def _by_value(state: State, gang: Gang, here: Counter[int]) -> Iterator[tuple[Gang, str]]:
    """The gang on the nodes of each value of its label, the one with the fewest replicas first."""
    key = gang.spread
    if not key:
        return
    counts = dict.fromkeys(values_of(state, key), 0)
    for index, replicas in here.items():
        value = state.order[index].labels.get(key)
        if value in counts:
            counts[value] += replicas
    for value in sorted(counts, key=lambda value: (counts[value], value)):
        yield narrowed(gang, key, value), f"{key}={value} "


def _least_crowded(
    state: State, gang: Gang, here: Counter[int], avoid: Collection[int]
) -> GangFit | None:
    for most in sorted(set(here.values()))[:TRIES_MAX]:
        crowded = {index for index, replicas in here.items() if replicas >= most}
        plan = fit(state, gang, crowded.union(avoid))
        if plan is not None:
            return plan
    return None
