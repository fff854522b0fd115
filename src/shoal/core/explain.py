"""Why a job waits: the truth of this moment, computed when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.state import UNLIMITED, State
from shoal.model.job import Job, Phase
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import Policy
from shoal.model.resources import Demand, plural


def explain(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """A sentence for people. For a waiting job it is never empty, or the scheduler is wrong."""
    if job.phase is not Phase.WAITING:
        return job.why
    return waiting_reason(state, job, policy, now_ms) or "it is next: the scheduler is at work"


def waiting_reason(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """Empty if nothing keeps the job from starting: after a step that may not happen."""
    if job.not_before_ms > now_ms:
        return f"waits {(job.not_before_ms - now_ms) / 1000:.1f} s more before a retry: {job.why}"
    if not state.nodes:
        return "no node has joined the cluster yet"
    blocked = _no_room(state, job)
    return blocked or _queue_held(state, job, policy, now_ms)


def held_by_nodes(kinds: Mapping[Demand, int], demand: Demand) -> int:
    """How many members with this demand the nodes of these kinds hold when empty."""
    total = 0
    for kind, count in kinds.items():
        if count:
            fits = UNLIMITED
            for have, need in zip(kind, demand, strict=True):
                if need:
                    fits = min(fits, have // need)
            total += count * fits
    return min(total, UNLIMITED)


def holds_queue(state: State, job: Job, policy: Policy, now_ms: int) -> bool:
    """Has this blocked job waited so long that nobody may overtake it any more? Only if the
    nodes that are open could hold it: a job that waits for a node to return holds up nobody."""
    if now_ms - job.submitted_ms < policy.patience_ms:
        return False
    return held_by_nodes(state.open_capacity, job.spec.demand) >= job.spec.members


def _no_room(state: State, job: Job) -> str:
    members, demand = job.spec.members, job.spec.demand
    room, best = 0, Demand(0, 0, 0)
    for node in state.order:
        if node.schedulable:
            free = state.rooms[node.index]
            room += free.holds(demand)
            best = max(best, Demand(free.gpus, free.cpu_milli, free.memory_mb))
    if room >= members:
        return ""
    need = f"needs {plural(members, 'member')} with {demand}" + (" each" if members > 1 else "")
    open_ = held_by_nodes(state.open_capacity, demand)
    if open_ < members:
        away = _closed_nodes(state)
        return f"{need}; the nodes that are open hold {open_} even when empty{away}"
    if room:
        return f"{need}; there is room for {room} now"
    return f"{need}; there is room for none now (the emptiest node has {best} free)"


def _closed_nodes(state: State) -> str:
    closed = [
        node
        for node in state.order
        if not node.schedulable and node.intent is not NodeIntent.REMOVED
    ]
    names = ", ".join(
        f"{node.id} is "
        + (node.health if node.health is not NodeHealth.READY else node.intent).value
        for node in closed[:5]
    )
    more = f" and {len(closed) - 5} more are closed" if len(closed) > 5 else ""
    return f"; {names}{more}" if names else ""


def _queue_held(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """The job fits, so something ahead of it must hold the queue."""
    mine = (-job.spec.priority, job.number)
    for shape, numbers in state.queue.shapes.items():
        if (-shape.priority, numbers[0]) < mine:
            ahead = state.job_numbered(numbers[0])
            if _no_room(state, ahead) and holds_queue(state, ahead, policy, now_ms):
                waited_s = (now_ms - ahead.submitted_ms) / 1000
                return (
                    f"the queue is held for {ahead.label}, which is ahead of it "
                    f"and has waited {waited_s:.0f} s"
                )
    return ""
