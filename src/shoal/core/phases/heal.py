"""Decide about jobs that something happened to: retry, requeue, move, or give up."""

from __future__ import annotations

from shoal.core.books.failures import Failure, FailureBook, blame, failed, same_way
from shoal.core.features.health import suspect
from shoal.core.features.sleep import touch
from shoal.core.scheduling.ends import end_text, goes_on, must_leave
from shoal.core.scheduling.leave import leave
from shoal.core.scheduling.sleepers import cap_of, has_to_finish, idle_on_given_back
from shoal.core.scheduling.sleeping import bed, rouse
from shoal.core.state.ending import CANCELLED_CODE, finish, is_served, stop
from shoal.core.state.events.runs import JobRequeued
from shoal.core.state.round import Round
from shoal.core.state.saving import kept_ms, worked_until_ms
from shoal.model.durations import duration_text
from shoal.model.health import Suspicion
from shoal.model.job import Job, MemberStatus, Outcome, Phase, Restart, StopCause
from shoal.model.node import NodeIntent
from shoal.model.resources import plural

TIMED_OUT_CODE = 124  # as timeout(1) reports it
HANG_CODE = 124  # like a timeout: a step took too long
BROKEN_CODE = 1  # it reported no error, but did not do its work
NODE_LOST_CODE = 143  # as if ended by SIGTERM: the error was not its own
ENDS_FOR_GOOD = (StopCause.CANCEL, StopCause.LEASE)
# Stopped by us: it runs again, and no retry is used up.
AGAIN = (
    StopCause.DRAIN,
    StopCause.PREEMPT,
    StopCause.RESIZE,
    StopCause.MOVE,
    StopCause.BUDGET,
    StopCause.IDLE,
)
IDLE_STOPS_MAX = 3
GOOD_WHILE = 60  # times the backoff: a job that ran this long does not crash in a loop
BACKOFF_DOUBLINGS_MAX = 20  # by then any backoff has reached its ceiling
LOSSES_AT_ONCE = 3  # after so many, a job that a node could not run waits before its next try
PAUSE_MS_MAX = 30_000


def heal(round_: Round) -> None:
    """Look once at every job whose members or nodes changed, or whose time limit is over."""
    _enforce_limits(round_)
    touched, round_.state.agenda.attention = round_.state.agenda.attention, {}
    for job_id in touched:
        job = round_.state.jobs.get(job_id)
        if job is None or not job.active:
            continue
        if all(member.over for member in job.members):
            _settle(round_, job)
        elif job.phase is not Phase.STOPPING:
            cause = _cause_to_stop(round_, job)
            if cause is not None:
                _end(round_, job, *cause)
            elif not job.wants and (node := has_to_finish(round_.state, job, round_.now_ms)):
                why = f"is waking to finish before {node} is gone: it must not run twice"
                touch(round_, job, why)
            else:
                leave(round_, job)
    # Stopping a job puts it here again, but nothing is left to decide until a member ends.
    round_.state.agenda.attention = {}


def _end(round_: Round, job: Job, cause: StopCause, why: str) -> None:
    """A sleeper that has to leave its node is woken first, if it can be: asleep, it cannot save its
    work. One whose GPU was full cannot."""
    asleep = job.phase is Phase.ASLEEP and not job.full_ms
    if cause is StopCause.DRAIN and asleep and goes_on(job):
        given = bed(round_.state, job)
        free = job.id not in round_.state.claims and not cap_of(round_.state, job)
        if given is not None and free:
            rouse(round_, job, given, f", to save its work and stop: {why}")
            return
    stop(round_, job, cause, why)


def _enforce_limits(round_: Round) -> None:
    state = round_.state
    while state.limits and state.limits[0][0] <= round_.now_ms:
        job = state.jobs[state.limits[0][1]]
        limit = duration_text(job.spec.time_limit_ms)
        stop(round_, job, StopCause.TIME_LIMIT, f"reached its time limit of {limit}")


def _cause_to_stop(round_: Round, job: Job) -> tuple[StopCause, str] | None:
    """Why the rest of the gang cannot go on; None if it can."""
    lost = [m.slice.node for m in job.members if m.status is MemberStatus.LOST]
    if lost and job.fault:
        return StopCause.NODE_LOSS, job.fault
    if lost:
        names = ", ".join(sorted(set(lost)))
        return StopCause.NODE_LOSS, f"lost {plural(len(lost), 'member')} with {names}"
    if job.first_bad_code is not None:
        return StopCause.FAILURE, _failure_text(job)
    ended = [number for number, member in enumerate(job.members) if member.done]
    if job.spec.service and ended:
        where = f"member {ended[0]} on {job.members[ended[0]].slice.node}"
        return StopCause.FAILURE, f"{where} exited 0, but a server must keep running"
    if node_id := idle_on_given_back(round_.state, job):
        return (
            StopCause.IDLE,
            f"it was unused, and {node_id}, where it was asleep, is being released",
        )
    if job.spec.restart is not Restart.NEVER and not is_served(round_.state, job):
        for member in job.members:
            node = round_.state.nodes[member.slice.node]
            if member.over:
                continue
            if node.end is not None and must_leave(round_.state, node, job, round_.now_ms):
                return StopCause.DRAIN, f"{node.id} {end_text(node.end, round_.now_ms)}"
            if node.intent is NodeIntent.DRAINING:
                return StopCause.DRAIN, f"{node.id} is being drained"
    return None


def _settle(round_: Round, job: Job) -> None:
    """Every member has ended: decide what follows."""
    cause = job.stop_cause
    lost = sorted({m.slice.node for m in job.members if m.status is MemberStatus.LOST})
    if not job.spec.service and all(member.done for member in job.members):
        # The reason to stop it came too late. A server, though, is never done.
        late = f" before it was stopped: {job.why}" if cause is not None else ""
        said = f": {job.said}" if job.said and not late else ""
        _finish(round_, job, Outcome.SUCCEEDED, 0, f"every member exited 0{said}{late}")
    elif cause in ENDS_FOR_GOOD:
        _finish(round_, job, Outcome.CANCELLED, CANCELLED_CODE, job.why)
    elif cause is StopCause.TIME_LIMIT:
        _finish(round_, job, Outcome.TIMED_OUT, TIMED_OUT_CODE, job.why)
    elif cause is StopCause.HALVING:
        _finish(round_, job, Outcome.SUCCEEDED, 0, job.why)
    elif lost or cause is StopCause.NODE_LOSS:
        # Peers of a lost member often fail before the loss is known: the node is to blame.
        _settle_loss(round_, job, lost)
    elif cause is StopCause.HANG:
        _settle_hang(round_, job)
    elif cause is StopCause.IDLE and _idle_for_good(round_, job):
        _finish(round_, job, Outcome.CANCELLED, CANCELLED_CODE, job.why)
    elif cause in AGAIN:
        _requeue(round_, job, cause, round_.now_ms, f"stopped to run again: {job.why}")
    elif job.first_bad_code is not None:
        _settle_failure(round_, job)
    elif cause is StopCause.FAILURE:  # a broken replica that exited 0 when it was stopped
        _finish(round_, job, Outcome.FAILED, BROKEN_CODE, job.why)
    else:
        _finish(round_, job, Outcome.SUCCEEDED, 0, "every member exited 0")


def _idle_for_good(round_: Round, job: Job) -> bool:
    """A job that keeps taking GPUs without using them is not started forever."""
    never = job.spec.restart is Restart.NEVER
    return round_.policy.idle_ends or never or job.idle_stops + 1 >= IDLE_STOPS_MAX


def _settle_loss(round_: Round, job: Job, lost: list[str]) -> None:
    how = job.fault or f"lost with {', '.join(lost) or 'its node'}"
    # A job that never started may be placed again, whatever its restart rule is.
    ran = not job.fault or any(member.started for member in job.members)
    if job.spec.restart is Restart.NEVER and ran:
        why = f"{how}, and restart is never"
        _finish(round_, job, Outcome.FAILED, NODE_LOST_CODE, why)
    elif job.losses >= round_.policy.losses_max:
        why = f"{how}; it lost a node {job.losses + 1} times, the most the policy allows"
        _finish(round_, job, Outcome.FAILED, NODE_LOST_CODE, why)
    else:
        pause_ms = _pause_ms(job)
        when = f" in {duration_text(pause_ms)}" if pause_ms else ""
        why = f"{how}; restarts elsewhere{when} (does not count as a retry)"
        _requeue(round_, job, StopCause.NODE_LOSS, round_.now_ms + pause_ms, why)


def _pause_ms(job: Job) -> int:
    """A job that finds no node able to run it, or no free port, is tried less and less often: it
    must not use up its losses within seconds."""
    over = job.losses - LOSSES_AT_ONCE if job.fault else -1
    return min(1_000 << min(over, BACKOFF_DOUBLINGS_MAX), PAUSE_MS_MAX) if over >= 0 else 0


def _settle_hang(round_: Round, job: Job) -> None:
    """The node or the job may be at fault: the job is tried again, but not forever."""
    if job.spec.restart is Restart.NEVER:
        why = f"{job.why}; restart is never"
        _finish(round_, job, Outcome.FAILED, HANG_CODE, why)
    elif job.hangs + 1 >= round_.policy.hangs_max:
        why = f"{job.why}; it hung {job.hangs + 1} times, the most the policy allows"
        _finish(round_, job, Outcome.FAILED, HANG_CODE, why)
    else:
        why = f"{job.why}; restarts from its last checkpoint (does not count as a retry)"
        _requeue(round_, job, StopCause.HANG, round_.now_ms, why)


def _settle_failure(round_: Round, job: Job) -> None:
    spec = job.spec
    failure = job.why if job.stop_cause is StopCause.FAILURE else _failure_text(job)
    again = _same_way(round_, job)
    if again is not None:
        _finish(round_, job, Outcome.FAILED, job.first_bad_code or 1, f"{failure}; {again}")
        return
    if spec.restart is Restart.ON_FAILURE and job.failures < spec.retries:
        backoff_ms = _backoff_ms(round_, job)
        when = f"in {duration_text(backoff_ms)}" if backoff_ms else "at once"
        why = f"{failure}; retry {job.failures + 1} of {spec.retries} {when}"
        _requeue(round_, job, StopCause.FAILURE, round_.now_ms + backoff_ms, why)
        return
    if spec.restart is Restart.ON_FAILURE:
        failure += f"; its retries ({spec.retries}) are used up"
    _finish(round_, job, Outcome.FAILED, job.first_bad_code or 1, failure)


def _backoff_ms(round_: Round, job: Job) -> int:
    """A job that made progress is tried again at once: it took steps, or ran for long enough."""
    watch = round_.state.heard.watches.get(job.id)
    until_ms = worked_until_ms(job, round_.now_ms)
    ran_ms = until_ms - (job.running_ms if job.running_ms is not None else until_ms)
    if (watch is not None and watch.pace.steps) or ran_ms > GOOD_WHILE * job.spec.backoff_ms:
        return 0
    doublings = min(job.failures, BACKOFF_DOUBLINGS_MAX)
    return min(job.spec.backoff_ms << doublings, round_.policy.backoff_ms_max)


def _same_way(round_: Round, job: Job) -> str | None:
    """Would one more failure be the third of the same kind at the same step?"""
    book = FailureBook(jobs={job.id: list(round_.state.failures.jobs.get(job.id, []))})
    failed(
        book,
        job.id,
        Failure(
            at_ms=round_.now_ms,
            node=job.members[job.first_bad_member].slice.node,
            member=job.first_bad_member,
            code=job.first_bad_code or 0,
            step=job.first_bad_step,
        ),
    )
    return same_way(book, job.id)


def _failure_text(job: Job) -> str:
    """`job.why` is at this point what the node reported about the first bad exit."""
    code = job.first_bad_code or 0
    number = job.first_bad_member
    who = f"member {number} on {job.members[number].slice.node}" if len(job.members) > 1 else "it"
    how = f"was ended by signal {code - 128}" if 128 < code < 128 + 65 else f"exited {code}"
    return f"{who} {how}" + (f" ({job.why})" if job.why else "")


def _requeue(round_: Round, job: Job, cause: StopCause, not_before_ms: int, why: str) -> None:
    round_.emit(
        JobRequeued(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            cause=cause,
            not_before_ms=not_before_ms if not_before_ms > round_.now_ms else 0,
            why=why + _cost_text(job, cause, round_.now_ms),
        )
    )


def _cost_text(job: Job, cause: StopCause, now_ms: int) -> str:
    """What the restart costs: the time since the last checkpoint, on all GPUs of the gang."""
    if job.running_ms is None or job.spec.service:
        return ""
    ran_ms = worked_until_ms(job, now_ms) - job.running_ms
    lost_ms = ran_ms - kept_ms(job, cause, now_ms)
    if lost_ms < 1000:
        return ""
    gpus = sum(len(member.slice.gpus) for member in job.members)
    on = f" on {plural(gpus, 'GPU')}" if gpus else ""
    return f"; {duration_text(lost_ms)} of work{on} lost"


def _finish(round_: Round, job: Job, outcome: Outcome, code: int, why: str) -> None:
    state = round_.state
    failed_on = {failure.node for failure in state.failures.jobs.get(job.id, [])}
    finish(round_, job, outcome, code, why)
    for node_id in sorted(failed_on):  # if it ran well elsewhere, these nodes are suspect
        found = blame(state.failures, node_id, round_.now_ms)
        if found is not None:
            news = Suspicion(
                at_ms=round_.now_ms,
                why=found.why,
                job=job.id,
                proven=len(found.owners) > 1,
                owner=job.spec.owner,
                refutable=True,
            )
            suspect(round_, state.nodes[node_id], news)
