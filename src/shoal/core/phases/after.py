"""Jobs that wait for other jobs: how they enter, and what the other's end means for them."""

from __future__ import annotations

from shoal.core.phases.ending import cancel
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.after import DEPENDENTS_MAX, WORDS, Condition, conditions
from shoal.model.events import ArraySubmitted, JobReleased, JobSubmitted
from shoal.model.identity import EVERY_TENANT
from shoal.model.ids import array_of
from shoal.model.job import Job, JobSpec, Outcome
from shoal.model.reason import Reader, job_part, private, render
from shoal.model.report import Accepted, Ended, Refused

HOW = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.TIMED_OUT: "ran out of time",
}


def after_problem(round_: Round, spec: JobSpec, scope: str) -> Refused | None:
    """A job of another tenant is as unknown as one that never was."""
    state = round_.state
    for one in conditions(spec.after):
        live, ended = _known(state, one.job), round_.ends.get(one.job)
        tenant = live.spec.tenant if live is not None else ended.tenant if ended else ""
        earlier = state.identity.is_earlier(tenant, one.job)
        if not tenant or earlier or scope not in (EVERY_TENANT, tenant):
            return Refused("after", f"there is no job {one.job}; see: shoal ps -a")
        if len(state.dependents.get(one.job, ())) >= DEPENDENTS_MAX:
            return Refused(
                "after", f"{DEPENDENTS_MAX:,} jobs wait for {one.job}, which is the most"
            )
    return None


def _known(state: State, job_id: str) -> Job | None:
    """A job or array that has not ended; of an element that has not begun, its array."""
    return state.live(job_id) or (state.arrays[array_of(job_id)] if state.pending(job_id) else None)


def enter(round_: Round, spec: JobSpec, key: str = "") -> Accepted:
    """The job is in the log from here on. If what it waits for can no longer come true, it ends at
    once: whether the other job fails just before or just after makes no difference."""
    found = conditions(spec.after)
    awaits = dict.fromkeys(one.job for one in found if one.job not in round_.ends)
    job_id = f"j{round_.state.next_job}"
    kind = JobSubmitted if spec.sweep is None else ArraySubmitted
    round_.emit(kind(at_ms=round_.now_ms, job=job_id, spec=spec, key=key, awaits=tuple(awaits)))
    if (why := in_vain(round_, spec)) is not None:
        cancel(round_, _live(round_, job_id), why)
        return Accepted(job_id, f"it was cancelled at once: {render(why, Reader(spec.tenant))}")
    return Accepted(job_id)


def in_vain(round_: Round, spec: JobSpec) -> str | None:
    """Why the job would end as soon as it enters."""
    over = [(one, round_.ends[one.job]) for one in conditions(spec.after) if one.job in round_.ends]
    vain = (_in_vain(spec.tenant, one, ended) for one, ended in over if not _holds(one, ended))
    return next(vain, None)


def settle_dependents(round_: Round) -> None:
    """One look at every job that waits for one that has ended in this step. A job that is cancelled
    here has ended, too, so those that wait for it follow."""
    looked = 0
    while looked < len(round_.finished):
        over = round_.finished[looked]
        ended = round_.ends[over.id]
        looked += 1
        for job_id in list(round_.state.dependents.get(ended.id, ())):
            _settle(round_, _live(round_, job_id), ended)
        if over.elements is None:
            continue
        for element in [one for one in round_.state.dependents if array_of(one) == ended.id]:
            never = Ended(element, ended.tenant, Outcome.CANCELLED, "it never began")
            for job_id in list(round_.state.dependents[element]):
                _settle(round_, _live(round_, job_id), never)


def _live(round_: Round, job_id: str) -> Job:
    job = round_.state.live(job_id)
    assert job is not None, job_id
    return job


def _settle(round_: Round, job: Job, ended: Ended) -> None:
    for one in conditions(job.spec.after):
        if one.job == ended.id and not _holds(one, ended):
            cancel(round_, job, _in_vain(job.spec.tenant, one, ended))
            return
    why = f"{label(ended)} {HOW[ended.outcome]}"
    round_.emit(JobReleased(at_ms=round_.now_ms, job=job.id, by=ended.id, why=why))


def _holds(one: Condition, ended: Ended) -> bool:
    return one.holds(succeeded=ended.outcome is Outcome.SUCCEEDED)


def _in_vain(tenant: str, one: Condition, ended: Ended) -> str:
    because = f": {ended.why}" if ended.why else ""
    if ended.tenant != tenant:
        because = private(because)
    name = job_part(ended.tenant, ended.id)
    return f"it waited for {label(ended)} to {WORDS[one.when]}, but {name} " + (
        f"{HOW[ended.outcome]}{because}"
    )


def label(ended: Ended) -> str:
    title = f"{ended.id} ({ended.name})" if ended.name else ended.id
    return job_part(ended.tenant, ended.id, title)
