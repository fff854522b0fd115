"""Sleepers that are to wake: as soon as their nodes have room, or room can be made."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.phases.round import Round
from shoal.core.phases.sleeping import rouse
from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.backfill import delayed_by, nodes_of
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import takes_turns
from shoal.core.scheduling.preempt import preempt
from shoal.core.scheduling.sleeping import bed
from shoal.core.state.queue import gang_of
from shoal.core.state.saving import unsaved_ms
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.events import JobClaimed, JobStopping
from shoal.model.job import Job, Phase, SleepCause, StopCause

LENDS = (SleepCause.PREEMPT, SleepCause.TURN)  # it sleeps for others
MAKERS_MAX = 8  # at most so many sleepers have room made for them in one cycle


def wake_sleepers(round_: Round, is_behind: Callable[[Job], bool] | None = None) -> None:
    """In the order in which they fell asleep, by priority. `is_behind`: says that a job that waits
    comes first, so that it is tried before."""
    state = round_.state
    tried = 0
    for job in sleepers(state):
        if job.id in state.claims or state.accounts.held_by(job.spec.tenant):
            continue
        given = bed(state, job)
        if given is None:
            tried += 1
            if is_behind is None and not (tried <= MAKERS_MAX and preempt(round_, job)):
                _go_elsewhere(round_, job)
        elif is_behind is None or not is_behind(job):
            rouse(round_, job, given)


def _go_elsewhere(round_: Round, job: Job) -> None:
    """A sleeper can wake on its own nodes only. When it has waited for them for as long as a
    restart costs, it is restarted where there is room: it then loses no more than it has slept."""
    state, now_ms = round_.state, round_.now_ms
    if job.sleep_cause not in LENDS or not takes_turns(job) or job.dozed_ms is None:
        return
    lost_ms = unsaved_ms(job, job.dozed_ms)
    due_ms = job.dozed_ms + lost_ms + state.policy.move_cost_ms
    if due_ms > now_ms:
        round_.look_again(due_ms)
        return
    gang = gang_of(job)
    if gang in state.agenda.hopeless:
        return
    delayed = delayed_by(state, job, state.reservations, now_ms)
    plan = fit(state, gang, {*kept_from(state, job, now_ms), *nodes_of(state, delayed)})
    if plan is None:
        return
    found = slices(state, plan, gang.demand)
    nodes = ", ".join(dict.fromkeys(slice_.node for slice_ in found))
    why = (
        f"restarts on {nodes}, because its own nodes have had no room for it for "
        f"{duration_text(now_ms - job.dozed_ms)}; {duration_text(lost_ms)} of work since its last "
        "checkpoint is lost"
    )
    round_.emit(
        JobStopping(at_ms=now_ms, job=job.id, attempt=job.attempt, cause=StopCause.MOVE, why=why)
    )
    round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=found, why=why))


def sleepers(state: State) -> list[Job]:
    """Jobs that sleep and are to wake, the first to be woken first."""
    jobs = (state.jobs[job_id] for job_id in state.napping)
    found = [job for job in jobs if job.phase is Phase.ASLEEP and job.wants]
    found.sort(key=lambda job: (-job.spec.priority, not job.elder, job.dozed_ms or 0, job.number))
    return found
