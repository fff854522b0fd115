"""How a job is ended: at once if it waits, by stopping its members if it has any."""

from __future__ import annotations

from shoal.core.state.events.arrays import ArrayCancelled
from shoal.core.state.events.neighbors import JobWithdrawn
from shoal.core.state.events.runs import JobFinished, JobStopping
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import Job, Outcome, Phase, StopCause

CANCELLED_CODE = 130  # what a shell reports for a command ended by Ctrl-C


def is_served(state: State, job: Job) -> bool:
    """Requests go to it, so `serve` ends it when they go elsewhere."""
    service = state.services.get(job.spec.service)
    return service is not None and job.id in service.ready


def stop(round_: Round, job: Job, cause: StopCause, why: str) -> None:
    round_.emit(
        JobStopping(at_ms=round_.now_ms, job=job.id, attempt=job.attempt, cause=cause, why=why)
    )


def finish(round_: Round, job: Job, outcome: Outcome, code: int, why: str) -> None:
    """It has ended, and leaves the state."""
    at_ms, attempt = round_.now_ms, job.attempt
    round_.emit(
        JobFinished(at_ms=at_ms, job=job.id, attempt=attempt, outcome=outcome, code=code, why=why)
    )


def cancel(round_: Round, job: Job, why: str, cause: StopCause = StopCause.CANCEL) -> None:
    """`cause` is for the members, if there are any; a job that waits ends at once. Of an array,
    what has not begun never will, and what runs is stopped."""
    if job.elements is not None:
        round_.emit(ArrayCancelled(at_ms=round_.now_ms, job=job.id, why=why))
        for job_id in list(round_.state.unfolded[job.id].jobs):
            element = round_.state.jobs[job_id]
            if element.stop_cause is not StopCause.CANCEL:
                cancel(round_, element, why, cause)
        return
    if job.away is not None:  # it has ended when the neighbor says so
        if job.away.cancelled:
            return
        neighbor = job.away.neighbor
        round_.emit(
            JobWithdrawn(
                at_ms=round_.now_ms,
                job=job.id,
                attempt=job.attempt,
                neighbor=neighbor,
                why=why,
                cancelled=True,
            )
        )
        return
    if job.phase is not Phase.WAITING:
        stop(round_, job, cause, why)
        return
    finish(round_, job, Outcome.CANCELLED, CANCELLED_CODE, why)
