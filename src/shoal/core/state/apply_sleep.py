"""What events do to jobs that sleep; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.state.apply_queue import heed, runs_no_more, runs_on, unclaim
from shoal.core.state.apply_room import change
from shoal.core.state.apply_service import not_served
from shoal.core.state.state import State
from shoal.model.events import (
    EventBase,
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    MembersAsleep,
    MembersAwake,
    SleepRefused,
    WakeRefused,
)
from shoal.model.job import Job, Member, Phase


def _job_dozing(state: State, event: JobDozing) -> None:
    job = state.jobs[event.job]
    not_served(state, job)
    job.phase = Phase.DOZING
    job.sleep_cause, job.wants = event.cause, event.cause.wants
    job.dozed_ms, job.why = event.at_ms, event.why
    job.wanted_ms = event.at_ms if job.wants else None
    job.idle_since_ms = None
    job.naps += 1
    state.napping[job.id] = None
    state.heard.watches.pop(job.id, None)
    state.agenda.stoppable.drop(job.id)
    state.awake.pop(job.id, None)
    runs_no_more(state)
    for member, host_mb in zip(job.members, event.host_mb, strict=True):
        _rehold(state, job, member, host_mb=host_mb)


def _members_asleep(state: State, event: MembersAsleep) -> None:
    job = state.jobs[event.job]
    for number, host_mb in zip(event.members, event.host_mb, strict=True):
        _rehold(state, job, job.members[number], host_mb=host_mb, asleep=True)


def _job_asleep(state: State, event: JobAsleep) -> None:
    """It holds nothing but memory."""
    job = state.jobs[event.job]
    job.phase = Phase.ASLEEP
    job.sleep_mb, job.why = event.memory_mb, event.why
    if job.dozed_ms is not None:  # its GPUs were of no use for as long as this
        job.sleep_cost_ms = max(event.took_ms, event.at_ms - job.dozed_ms)
    account(state, job, -_living(job), event.at_ms)
    for member in job.members:
        _rehold(state, job, member, lent=True)
    heed(state, job)
    for member in job.members:
        node = state.nodes[member.slice.node]
        node.sleep_mb_s = _rate(event.memory_mb, event.took_ms) or node.sleep_mb_s


def _sleep_refused(state: State, event: SleepRefused) -> None:
    job = state.jobs[event.job]
    job.phase = Phase.WAKING
    job.refused, job.why = event.why, event.why
    job.awake_ms = event.at_ms
    for member in job.members:
        member.asleep = not member.over


def _job_touched(state: State, event: JobTouched) -> None:
    job = state.jobs[event.job]
    job.wants, job.why = event.wants, event.why
    job.wanted_ms = event.at_ms if event.wants else None
    heed(state, job)
    if not event.wants and job.id in state.claims:
        unclaim(state, job)


def _job_waking(state: State, event: JobWaking) -> None:
    job = state.jobs[event.job]
    if job.id in state.claims:
        for slice_ in state.claims.pop(job.id):
            change(state, slice_, +1, exclusive=job.spec.whole_nodes)
    job.phase = Phase.WAKING
    job.wants, job.why = False, event.why
    job.awake_ms = event.at_ms
    heed(state, job)
    state.agenda.other_gaps()  # its nodes may have been kept for it
    for member, gpus in zip(job.members, event.gpus, strict=True):
        slice_ = msgspec.structs.replace(member.slice, gpus=gpus)
        _rehold(state, job, member, slice=slice_, lent=False)
    account(state, job, _living(job), event.at_ms)
    job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)


def _wake_refused(state: State, event: WakeRefused) -> None:
    """It has lent its GPUs again, and is still to wake."""
    job = state.jobs[event.job]
    job.phase = Phase.ASLEEP
    job.wants, job.why, job.full_ms = True, event.why, event.again_ms
    job.wanted_ms = event.at_ms if job.wanted_ms is None else job.wanted_ms
    account(state, job, -_living(job), event.at_ms)
    for member in job.members:
        _rehold(state, job, member, lent=True)
    heed(state, job)


def _members_awake(state: State, event: MembersAwake) -> None:
    for number in event.members:
        state.jobs[event.job].members[number].asleep = False


def _job_awake(state: State, event: JobAwake) -> None:
    job = state.jobs[event.job]
    job.phase = Phase.RUNNING
    if job.awake_ms is not None and not job.refused:
        job.wake_cost_ms = max(event.took_ms, event.at_ms - job.awake_ms)
    job.awake_ms, job.why = event.at_ms, event.why
    for member in job.members:
        node = state.nodes[member.slice.node]
        node.wake_mb_s = _rate(job.sleep_mb, event.took_ms) or node.wake_mb_s
        _rehold(state, job, member, host_mb=0, asleep=False)
    end_nap(state, job, event.at_ms)
    runs_on(state, job)
    state.agenda.attention[job.id] = None  # its node may be draining by now
    state.agenda.look_ms = 0  # it may be stopped for those in front again


def end_nap(state: State, job: Job, at_ms: int) -> None:
    """It no longer sleeps. The time is not a part of its run time."""
    state.napping.pop(job.id, None)
    if state.wakeful.pop(job.id, 0) is None:
        state.agenda.beds.pop(job.id, None)
        state.agenda.other_gaps()
    if job.dozed_ms is None:
        return
    slept_ms = max(0, at_ms - job.dozed_ms)
    job.slept_ms += slept_ms
    if job.running_ms is not None:
        job.running_ms += slept_ms
    if job.saved_ms is not None:
        job.saved_ms += slept_ms
    job.dozed_ms, job.sleep_cause, job.wants, job.wanted_ms = None, None, False, None
    job.full_ms = 0


def account(state: State, job: Job, members: int, at_ms: int, penalty: int = 0) -> None:
    """So many members more hold their slices."""
    gpus = sum(len(member.slice.gpus) * member.slice.gpu_milli for member in job.members[:1])
    share = job.share * members
    state.accounts.change(job.spec.tenant, share, gpus * members, at_ms, penalty)


def recount(state: State) -> None:
    """What tenants hold, by what their jobs hold: events that are lost have not been counted."""
    for account_ in state.accounts.own.values():
        account_.share = account_.gpu_milli = 0
    for job in state.jobs.values():
        holding = sum(not member.over and not member.lent for member in job.members)
        if holding:
            own = state.accounts.own[job.spec.tenant]
            first = job.members[0].slice  # all are charged alike
            own.share += job.share * holding
            own.gpu_milli += len(first.gpus) * first.gpu_milli * holding


def _living(job: Job) -> int:
    return sum(not member.over for member in job.members)


def _rate(memory_mb: int, took_ms: int) -> int:
    return memory_mb * 1000 // took_ms if memory_mb >= 1000 and took_ms else 0


def _rehold(state: State, job: Job, member: Member, **fields: Any) -> None:
    """Set these fields of the member; what it holds of its node changes with them."""
    if member.over:
        return
    before, lent, whole = member.held, member.lent, job.spec.whole_nodes
    for name, value in fields.items():
        setattr(member, name, value)
    if (member.held, member.lent) == (before, lent):
        return
    change(state, before, +1, exclusive=whole and not lent, asleep=lent)
    change(state, member.held, -1, exclusive=whole and not member.lent, asleep=member.lent)


APPLY_SLEEP: dict[type[EventBase], Callable[[State, Any], None]] = {
    JobDozing: _job_dozing,
    MembersAsleep: _members_asleep,
    JobAsleep: _job_asleep,
    SleepRefused: _sleep_refused,
    JobTouched: _job_touched,
    JobWaking: _job_waking,
    WakeRefused: _wake_refused,
    MembersAwake: _members_awake,
    JobAwake: _job_awake,
}
