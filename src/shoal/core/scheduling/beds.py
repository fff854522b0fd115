"""What keeps a sleeper from waking where there is room: jobs that come before it in line."""

from __future__ import annotations

from shoal.core.scheduling.backfill import SAFE
from shoal.core.scheduling.holding import holds_queue
from shoal.core.scheduling.keep import keeper_of, line_key
from shoal.core.scheduling.order import takes_turns
from shoal.core.scheduling.sleeping import bed_problem
from shoal.core.state.expect import ran_ms, run_ms
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job
from shoal.model.policy import Policy, Preempt


def behind(state: State, sleeper: Job, policy: Policy, now_ms: int) -> str:
    """The job for which it has to stay asleep, in one clause; empty if there is none. Beyond the
    policy's patience nobody keeps it asleep: a job ahead may wait, through others, for what the
    sleeper holds."""
    if sleeper.wanted_ms is not None and now_ms - sleeper.wanted_ms >= policy.patience_ms:
        return ""
    nodes = {state.nodes[m.slice.node].index for m in sleeper.members if not m.over}
    mine = line_key(state, sleeper, now_ms)
    holds_memory = any(member.held.memory_mb for member in sleeper.members if not member.over)
    for job_id, held in state.reservations.items():
        job = state.jobs[job_id]
        if holds_memory and job.spec.memory_mb:
            continue  # that may need the sleeper's memory, and would wait forever
        if job.number not in state.queue.lane or line_key(state, job, now_ms) > mine:
            continue
        if holds_queue(state, job, policy, now_ms):
            return f"the queue is held for {job.label}, which is ahead of it"
        if held.start_ms is not None and nodes.intersection(held.nodes):
            end_ms = _end_ms(state, sleeper, now_ms)
            if end_ms is None or end_ms > held.start_ms:
                return f"its node is set aside for {job.label}, which is ahead of it"
    for index, other in keeper_of(state, sleeper, now_ms).items():
        if index in nodes:
            name = state.order[index].id
            return f"{name} is kept for {other.label}, which sleeps there, too, and is ahead of it"
    return ""


def _end_ms(state: State, sleeper: Job, now_ms: int) -> int | None:
    """When it would be out of the way of others: at once if it can be put to sleep again."""
    policy = state.policy
    if policy.turn_cost_percent or (policy.preempt is Preempt.RANK and takes_turns(sleeper)):
        return now_ms
    ran = ran_ms(sleeper, now_ms)
    expected = run_ms(state, sleeper, SAFE, ran)
    return None if expected is None else now_ms + max(1, expected - ran)


def asleep_reason(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """Why a sleeper that is to wake still sleeps; empty if nothing keeps it from waking."""
    if job.id in state.claims:
        return f"room is being made for it{_made_by(state, job)}"
    if job.full_ms > now_ms:
        return f"it is tried again in {duration_text(job.full_ms - now_ms)}"
    return bed_problem(state, job, now_ms) or behind(state, job, policy, now_ms)


def _made_by(state: State, job: Job) -> str:
    nodes = dict.fromkeys(slice_.node for slice_ in state.claims[job.id])
    going = dict.fromkeys(
        f"{other.label} ({other.phase.value})"
        for node in nodes
        for other in state.placed[node].values()
        if other.id != job.id and (other.phase.value in ("stopping", "dozing") or other.refused)
    )
    return f": {', '.join(list(going)[:3])}" if going else ""
