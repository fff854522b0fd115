"""Where sleepers stand in line, and nodes that are kept for those that have waited to wake."""

from __future__ import annotations

from shoal.core.scheduling.order import place_in_line
from shoal.core.scheduling.sleepers import cap_of
from shoal.core.state.state import Rank, State
from shoal.model.job import Job, Member, Phase
from shoal.model.node import NodeHealth

KEEPERS_MAX = 8  # sleepers that have their nodes kept at a time


def line_key(state: State, job: Job, now_ms: int) -> Rank:
    """Its place among jobs that wait and sleepers that are to wake. Where jobs take turns, those of
    one tenant go in the order in which they last ran, or began to wait."""
    if not state.policy.turn_cost_percent:
        return place_in_line(state, job, now_ms)
    standing = state.ordering.tenant(state, job.spec.tenant, now_ms)
    since_ms = job.dozed_ms if job.dozed_ms is not None else max(job.since_ms, job.requeued_ms)
    return (-job.spec.priority, not job.elder, *standing, since_ms, job.number)


def late_sleepers(state: State, now_ms: int) -> list[Job]:
    """Sleepers that have wanted to wake for longer than the policy's patience."""
    found: list[Job] = []
    for job_id in state.wakeful:  # the first to want it first
        job = state.jobs[job_id]
        if job.wanted_ms is None or now_ms - job.wanted_ms < state.policy.patience_ms:
            break
        held = state.accounts.held_by(job.spec.tenant) or cap_of(state, job)
        if job_id not in state.claims and not held:
            found.append(job)
        if len(found) == KEEPERS_MAX:
            break
    return found


def kept_for(state: State, sleeper: Job) -> set[int]:
    """Its nodes where a part of what it needs is free, and another part is not."""
    found: set[int] = set()
    for member in sleeper.members:
        node = state.nodes[member.slice.node]
        if not member.over and node.health is NodeHealth.READY and _has_part(state, member):
            found.add(node.index)
    return found


def _has_part(state: State, member: Member) -> bool:
    slice_, node = member.slice, state.nodes[member.slice.node]
    free = state.rooms[node.index].gpu_milli
    if not slice_.gpus or node.spec.remaps:
        return not slice_.gpus or any(milli >= slice_.gpu_milli for milli in free)
    return any(free[gpu] >= slice_.gpu_milli for gpu in slice_.gpus)


def keeper_of(state: State, job: Job, now_ms: int) -> dict[int, Job]:
    """Nodes that are kept from this job, each with the sleeper it is kept for: one that comes
    before it in line."""
    if not state.wakeful:
        return {}
    found: dict[int, Job] = {}
    mine: Rank | None = None
    for sleeper in late_sleepers(state, now_ms):
        if sleeper.id == job.id or sleeper.phase is not Phase.ASLEEP:
            continue
        if mine is None:
            mine = line_key(state, job, now_ms)
        if line_key(state, sleeper, now_ms) < mine:
            for index in kept_for(state, sleeper):
                found.setdefault(index, sleeper)
    return found
