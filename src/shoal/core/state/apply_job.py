"""What events do to jobs and their members; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.books.failures import Failure, failed, forget, ran_well
from shoal.core.books.vacancy import task_of
from shoal.core.state.accounts import share_of
from shoal.core.state.apply_array import element_ended, element_runs, new_job, release_array
from shoal.core.state.apply_fault import note_fault
from shoal.core.state.apply_queue import (
    add_job,
    claim,
    drop_job,
    join_queue,
    learn_run,
    leave_queue,
    leave_waiting,
    let_go,
    release_after,
    runs_no_more,
    runs_on,
    unclaim,
)
from shoal.core.state.apply_room import hold, release
from shoal.core.state.apply_service import not_served, replica_over
from shoal.core.state.apply_sleep import account, end_nap
from shoal.core.state.estimates import key_of
from shoal.core.state.records import Reservation
from shoal.core.state.saving import kept_ms
from shoal.core.state.state import State
from shoal.model.events import (
    EventBase,
    JobAdopted,
    JobCheckpointed,
    JobClaimed,
    JobFinished,
    JobPlaced,
    JobPromoted,
    JobReleased,
    JobRequeued,
    JobReserved,
    JobRunning,
    JobStopping,
    JobSubmitted,
    JobUnclaimed,
    MemberExited,
    MemberLost,
    MembersStarted,
)
from shoal.model.ids import number_of
from shoal.model.job import Job, Member, MemberStatus, Outcome, Phase, StopCause


def _job_submitted(state: State, event: JobSubmitted) -> None:
    state.next_job = max(state.next_job, number_of(event.job) + 1)
    state.submitted += 1
    state.foresight.saw(task_of(event.spec))
    add_job(state, new_job(state, event))


def _job_released(state: State, event: JobReleased) -> None:
    array = state.arrays.get(event.job)
    if array is not None:
        array.why = event.why
        release_array(state, array, event.by, event.at_ms)
        return
    job = state.jobs[event.job]
    job.why = event.why
    release_after(state, job, event.by, event.at_ms)
    job.requeued_ms = event.at_ms  # its wait for room begins with the last of them


def _job_placed(state: State, event: JobPlaced) -> None:
    job = state.jobs[event.job]
    leave_waiting(state, job)
    job.phase = Phase.STARTING
    job.share = share_of(job.spec.demand, event.slices[0].gpu_milli, state.totals)
    job.attempt = event.attempt
    job.said = ""
    job.members = [Member(slice_) for slice_ in event.slices]
    job.master, job.door = event.master, event.door
    job.placed_ms = event.at_ms
    job.running_ms = None
    job.stop_cause = None
    job.first_bad_code = None
    job.fault = ""
    job.saved_ms = job.idle_since_ms = None
    job.awake_ms = None
    job.naps = job.slept_ms = 0
    job.refused = ""
    job.not_before_ms = 0
    job.why = event.why
    state.next_port += 1
    hold(state, job)
    members = len(job.members)
    penalty = job.share * members * state.policy.entry_penalty_ms
    account(state, job, members, event.at_ms, penalty)
    job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)


def _job_reserved(state: State, event: JobReserved) -> None:
    counts = event.members or (0,) * len(event.nodes)
    named = sorted(zip((state.nodes[node].index for node in event.nodes), counts, strict=True))
    nodes, members = tuple(index for index, _ in named), tuple(count for _, count in named)
    before = state.reservations.get(event.job)
    promised_ms = event.at_ms if event.start_ms is None else event.start_ms
    if before is not None:
        promised_ms = before.promised_ms
    state.reservations[event.job] = Reservation(
        event.start_ms, nodes, event.at_ms, promised_ms, members if event.members else ()
    )
    state.agenda.other_gaps()


def _job_claimed(state: State, event: JobClaimed) -> None:
    job = state.jobs[event.job]
    job.why = event.why if job.phase is Phase.WAITING else job.why
    claim(state, job, event.slices)


def _job_unclaimed(state: State, event: JobUnclaimed) -> None:
    unclaim(state, state.jobs[event.job])


def _job_promoted(state: State, event: JobPromoted) -> None:
    job = state.jobs[event.job]
    waits = job.phase is Phase.WAITING and job.id not in state.claims
    if waits:
        leave_queue(state, job)
    job.elder = True
    state.elder = job.id
    least = (state.policy.run_ms_min, state.policy.turn_ms_min)
    state.agenda.stoppable.joins(job, *least)  # it is more entitled now
    if waits:
        join_queue(state, job)


def _members_started(state: State, event: MembersStarted) -> None:
    job = state.jobs[event.job]
    for number in event.members:
        job.members[number].status = MemberStatus.ALIVE
        job.members[number].started = True


def _job_running(state: State, event: JobRunning) -> None:
    job = state.jobs[event.job]
    for member in job.members:
        if not member.over:
            member.status = MemberStatus.ALIVE
            member.started = True
    job.phase = Phase.RUNNING
    job.running_ms = job.awake_ms = event.at_ms
    if job.spec.array:
        element_runs(state, job, event.at_ms)
    learn_run(state, job, job.attained_ms)
    runs_on(state, job)


def _member_exited(state: State, event: MemberExited) -> None:
    job = state.jobs[event.job]
    member = job.members[event.member]
    member.status = MemberStatus.EXITED
    member.code, member.stopped = event.code, event.stopped
    if event.code and job.first_bad_code is None:
        job.first_bad_code = event.code
        job.first_bad_member, job.first_bad_step = event.member, event.step
        if job.phase is not Phase.STOPPING:  # otherwise the reason for stopping it says more
            job.why = event.why
    elif not event.code and event.why:
        job.said = event.why
    member_over(state, job, event.member, event.at_ms)


def _member_lost(state: State, event: MemberLost) -> None:
    job = state.jobs[event.job]
    job.members[event.member].status = MemberStatus.LOST
    note_fault(state, job, event)
    member_over(state, job, event.member, event.at_ms)


def member_over(state: State, job: Job, number: int, at_ms: int) -> None:
    """A member no longer holds anything; `heal` decides what that means for its job."""
    release(state, job, number)
    if not job.members[number].lent:
        account(state, job, -1, at_ms)
    state.agenda.attention[job.id] = None


def _job_checkpointed(state: State, event: JobCheckpointed) -> None:
    job = state.jobs[event.job]
    job.saved_step, job.saved_ms = event.step, event.at_ms


def _job_stopping(state: State, event: JobStopping) -> None:
    job = state.jobs[event.job]
    not_served(state, job)
    if job.id in state.claims and job.phase is Phase.ASLEEP:
        unclaim(state, job)
    end_nap(state, job, event.at_ms)
    state.awake.pop(job.id, None)
    job.phase = Phase.STOPPING
    job.stop_cause = event.cause
    job.why = event.why
    runs_no_more(state)
    state.agenda.attention[job.id] = None


def _job_requeued(state: State, event: JobRequeued) -> None:
    job = state.jobs[event.job]
    let_go(state, job)
    not_served(state, job)
    if job.id in state.claims and job.phase is Phase.ASLEEP:
        unclaim(state, job)  # it was for waking up
    end_nap(state, job, event.at_ms)
    if job.running_ms is not None:
        learn_run(state, job, job.attained_ms + event.at_ms - job.running_ms)
    _wear(state, job, event.at_ms, event.cause in (StopCause.NODE_LOSS, StopCause.HANG))
    job.kept_ms = kept_ms(job, event.cause, event.at_ms)
    job.attained_ms += job.kept_ms
    job.phase = Phase.WAITING
    state.tally.wait(state.accounts, job, 1)
    job.not_before_ms = event.not_before_ms
    job.requeued_ms, job.waited_ms = event.at_ms, 0
    job.stop_cause = None
    if event.cause is StopCause.FAILURE:
        job.failures += 1
        _book_failure(state, job, event.at_ms)
    elif event.cause is StopCause.NODE_LOSS:
        job.losses += 1
    elif event.cause is StopCause.HANG:
        job.hangs += 1
    elif event.cause is StopCause.IDLE:
        job.idle_stops += 1
    elif event.cause in (StopCause.PREEMPT, StopCause.RESIZE, StopCause.MOVE):
        job.preemptions += 1
    job.why = event.why
    runs_no_more(state)
    if job.id not in state.claims:
        join_queue(state, job)


def _wear(state: State, job: Job, at_ms: int, lost: bool) -> None:
    if job.running_ms is not None:
        nodes = len({member.slice.node for member in job.members})
        state.wear.add(nodes * (at_ms - job.running_ms), lost)


def _book_failure(state: State, job: Job, at_ms: int) -> None:
    number = job.first_bad_member
    failed(
        state.failures,
        job.id,
        Failure(
            at_ms=at_ms,
            node=job.members[number].slice.node,
            member=number,
            code=job.first_bad_code or 0,
            step=job.first_bad_step,
            owner=job.spec.owner,
        ),
    )


def _job_adopted(state: State, event: JobAdopted) -> None:
    job = state.jobs[event.job]
    leave_waiting(state, job)
    for member in job.members:
        member.status = MemberStatus.ALIVE
        member.host_mb, member.asleep, member.lent = 0, False, False
    hold(state, job)
    account(state, job, len(job.members), event.at_ms)
    job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)
    job.attained_ms -= job.kept_ms  # the attempt was not over after all
    job.kept_ms = 0
    job.phase = Phase.RUNNING
    job.not_before_ms = 0
    if job.running_ms is None:
        job.running_ms = event.at_ms
    job.awake_ms = event.at_ms
    job.why = event.why
    runs_on(state, job)
    state.agenda.attention[job.id] = None  # its node may be draining by now


def _job_finished(state: State, event: JobFinished) -> None:
    job = state.jobs[event.job]
    if job.id in state.claims:
        unclaim(state, job)
    end_nap(state, job, event.at_ms)
    if job.phase is Phase.WAITING:
        leave_queue(state, job)
    else:
        let_go(state, job)
    if job.phase is not Phase.WAITING:
        _wear(state, job, event.at_ms, lost=job.stop_cause is StopCause.NODE_LOSS)
    if job.running_ms is not None:
        ran_ms = job.attained_ms + event.at_ms - job.running_ms
        learn_run(state, job, ran_ms)
        if event.outcome is Outcome.SUCCEEDED:
            state.estimates.ended(key_of(job), ran_ms)
            state.agenda.stuck.clear()
            nodes = tuple(dict.fromkeys(member.slice.node for member in job.members))
            ran_well(state.failures, job.id, nodes)
    forget(state.failures, job.id)
    state.ages.add(event.at_ms - job.submitted_ms)
    not_served(state, job)
    replica_over(state, job, event)
    if job.spec.array:
        element_ended(state, job, event)
    state.tally.job(state.accounts, job, -1)
    state.sizes.gone(job)
    job.phase = Phase.FINISHED
    job.outcome = event.outcome
    job.code = event.code
    job.why = event.why
    job.finished_ms = event.at_ms
    state.finished += 1
    drop_job(state, job)
    runs_no_more(state)


APPLY_JOB: dict[type[EventBase], Callable[[State, Any], None]] = {
    JobSubmitted: _job_submitted,
    JobReleased: _job_released,
    JobPlaced: _job_placed,
    JobReserved: _job_reserved,
    JobClaimed: _job_claimed,
    JobUnclaimed: _job_unclaimed,
    JobPromoted: _job_promoted,
    MembersStarted: _members_started,
    JobRunning: _job_running,
    MemberExited: _member_exited,
    MemberLost: _member_lost,
    JobCheckpointed: _job_checkpointed,
    JobStopping: _job_stopping,
    JobRequeued: _job_requeued,
    JobAdopted: _job_adopted,
    JobFinished: _job_finished,
}
