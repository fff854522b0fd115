"""Sleepers that are to wake: as soon as their nodes have room, or room can be made."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.phases.round import Round
from shoal.core.phases.sleeping import rouse
from shoal.core.scheduling.preempt import preempt
from shoal.core.scheduling.sleeping import bed
from shoal.core.state.state import State
from shoal.model.job import Job, Phase

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
            if is_behind is None and tried < MAKERS_MAX:
                tried += 1
                preempt(round_, job)
        elif is_behind is None or not is_behind(job):
            rouse(round_, job, given)


def sleepers(state: State) -> list[Job]:
    """Jobs that sleep and are to wake, the first to be woken first."""
    jobs = (state.jobs[job_id] for job_id in state.napping)
    found = [job for job in jobs if job.phase is Phase.ASLEEP and job.wants]
    found.sort(key=lambda job: (-job.spec.priority, not job.elder, job.dozed_ms or 0, job.number))
    return found
