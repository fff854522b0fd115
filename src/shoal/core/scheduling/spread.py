"""Replicas of one service go to different nodes, so that a lost node takes few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from shoal.core.scheduling.fit import GangFit, fit
from shoal.core.state.queue import Gang
from shoal.core.state.state import State
from shoal.model.job import Job

TRIES_MAX = 8  # beyond this many on every node it hardly matters which


def spread(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    """A node with as few replicas of the same service as possible, and among those the one that the
    policy prefers; None if the job is not a replica, or is the first."""
    here = Counter(
        state.nodes[member.slice.node].index
        for other in state.replicas.get(job.spec.service, ())
        if state.jobs[other].active
        for member in state.jobs[other].members
    )
    for most in sorted(set(here.values()))[:TRIES_MAX]:
        crowded = {index for index, replicas in here.items() if replicas >= most}
        plan = fit(state, gang, crowded.union(avoid))
        if plan is not None:
            return plan._replace(rule=f"{plan.rule} among the nodes with the fewest replicas")
    return None
