"""Upkeep for jobs that are placed: what they are charged for, their sleep, their requests."""

from __future__ import annotations

from shoal.core.state.apply_queue import judge_caps
from shoal.core.state.apply_room import release
from shoal.core.state.state import State
from shoal.model.job import Job, Outcome, StopCause

# A replica that failed is replaced after this, then twice that, up to a minute.
REPLICA_RETRY_MS = 1_000
REPLICA_RETRY_MS_MAX = 60_000


def member_over(state: State, job: Job, number: int, at_ms: int) -> None:
    """A member no longer holds anything; `heal` decides what that means for its job."""
    release(state, job, number)
    if not job.members[number].lent:
        account(state, job, -1, at_ms)
    state.agenda.attention[job.id] = None


def account(state: State, job: Job, members: int, at_ms: int, penalty: int = 0) -> None:
    """So many members more hold their slices."""
    first = job.members[0].slice  # all are charged alike
    gpus = len(first.gpus) * first.gpu_milli
    share = job.share * members
    state.accounts.change(job.spec.tenant, share, gpus * members, at_ms, penalty)
    if state.accounts.caps:
        judge_caps(state, job.spec.tenant)


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


def not_served(state: State, job: Job) -> None:
    """The replica gets no more requests."""
    service = state.services.get(job.spec.service)
    if service is not None:
        service.ready.pop(job.id, None)
    state.heard.down_ms.pop(job.id, None)
    state.heard.starts.pop(job.id, None)
    state.heard.quiet.pop(job.id, None)


def replica_over(state: State, job: Job, outcome: Outcome, why: str, at_ms: int) -> None:
    """A server that ends by itself has failed, whatever its exit code. The next one starts a little
    later each time."""
    service = state.services.get(job.spec.service)
    if service is None:
        return
    drained = service.draining.pop(job.id, None) is not None
    if drained or outcome is Outcome.CANCELLED or job.spec.version != service.version:
        return
    service.failures += 1
    # The reason for stopping it says more than its exit code.
    why = job.why if job.stop_cause is StopCause.FAILURE else why
    service.why = f"{job.id}: {why}"
    wait_ms = min(REPLICA_RETRY_MS << min(service.failures - 1, 6), REPLICA_RETRY_MS_MAX)
    service.retry_ms = at_ms + wait_ms
