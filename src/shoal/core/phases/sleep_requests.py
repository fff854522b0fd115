"""Users put jobs to sleep and wake them."""

from __future__ import annotations

from shoal.core.features.array import no_live_job
from shoal.core.phases.sleeping import touch
from shoal.core.scheduling.sleepers import beforehand, has_to_finish
from shoal.core.scheduling.sleeping import doze, why_not
from shoal.core.state.apply_array import parts_of
from shoal.core.state.round import Round
from shoal.model.job import Job, Phase, SleepCause
from shoal.model.reason import render
from shoal.model.report import Accepted, Answer, Refused, SleepJob, WakeJob


def put_to_sleep(round_: Round, request: SleepJob) -> Answer:
    job = _found(round_, request.job)
    if not isinstance(job, Job):
        return job
    why = f"put to sleep by {request.who}; wakes when it is used, or by: shoal wake {job.mention}"
    if job.phase in (Phase.DOZING, Phase.ASLEEP):
        if node := has_to_finish(round_.state, job, round_.now_ms):
            why = f"it is to wake, to finish before {node} is gone"
            return Refused("job", f"{job.id} cannot stay asleep: {why}")
        if job.wants:
            touch(round_, job, why, wants=False)
            return Accepted(job.id, "it was asleep already; now it stays so until it is woken")
        asleep = job.phase is Phase.ASLEEP
        return Accepted(job.id, f"it is already {'asleep' if asleep else 'falling asleep'}")
    if reason := why_not(round_.state, job, asked=True):
        return Refused("job", f"{job.id} cannot be put to sleep: {render(reason, job.reader)}")
    doze(round_, job, SleepCause.USER, why + beforehand(round_.state, job, SleepCause.USER))
    return Accepted(job.id)


def wake(round_: Round, request: WakeJob) -> Answer:
    job = _found(round_, request.job)
    if not isinstance(job, Job):
        return job
    if job.phase not in (Phase.DOZING, Phase.ASLEEP):
        if request.why or job.phase is Phase.WAKING:
            return Accepted(job.id, f"it is {job.phase.value}")
        return Refused("job", f"{job.id} is not asleep: it is {job.phase.value}")
    if job.wants:
        return Accepted(job.id, "it wakes as soon as there is room")
    touch(round_, job, request.why or f"is to wake, because {request.who} asked")
    return Accepted(job.id)


def _found(round_: Round, job_id: str) -> Job | Refused:
    state = round_.state
    if (array := state.arrays.get(job_id)) is not None:
        first = f"{job_id}.{parts_of(array)[0].index_at(0)}"
        return Refused("job", f"{job_id} is an array; name one of its elements, e.g. {first}")
    job = state.jobs.get(job_id)
    return job if job is not None else no_live_job(state, job_id)
