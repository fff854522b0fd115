"""Workflows: jobs that are submitted together, wait for each other, or replace each other."""

from __future__ import annotations

import msgspec

from shoal.core.features.array import progress_text
from shoal.core.features.caps import too_large, too_many
from shoal.core.scheduling.backfill import TYPICAL
from shoal.core.state.ending import cancel
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.queue import JobLeased, JobReleased, JobSubmitted
from shoal.core.state.expect import left_ms
from shoal.core.state.round import Round
from shoal.core.state.sizes import bytes_of
from shoal.core.state.state import State
from shoal.model.after import AFTER_MAX, DEPENDENTS_MAX, WORDS, Condition, conditions
from shoal.model.durations import about, duration_text, moment_text
from shoal.model.identity import EVERY_TENANT
from shoal.model.ids import array_of
from shoal.model.job import Job, JobSpec, Outcome, Phase, StopCause
from shoal.model.reason import Reader, job_part, private, render
from shoal.model.report import Accepted, Answer, CancelWorkflow, Ended, Refused, Submit
from shoal.model.resources import plural
from shoal.model.workflow import WORKFLOW_JOBS_MAX, WorkflowJob

_WHEN = ("", "ok", "any", "fail")


def graph_problem(jobs: tuple[WorkflowJob, ...]) -> Refused | None:
    """What is wrong with the names and the order, whatever the cluster."""
    if not 1 <= len(jobs) <= WORKFLOW_JOBS_MAX:
        return Refused("jobs", f"a workflow has 1 to {WORKFLOW_JOBS_MAX:,} jobs, not {len(jobs):,}")
    names: dict[str, WorkflowJob] = {}
    for job in jobs:
        if job.name[:1] == "j" and job.name[1:].replace(".", "").isdecimal():
            return Refused("jobs", f"{job.name} looks like a job's id; choose another name")
        if job.name in names:
            return Refused("jobs", f"two jobs have the name {job.name}")
        names[job.name] = job
    for job in jobs:
        if len(job.after) + len(job.spec.after) > AFTER_MAX:
            return Refused(f"{job.name}.after", f"has more than {AFTER_MAX} conditions")
        for text in job.after:
            name, colon, when = text.partition(":")
            if name not in names:
                return Refused(
                    f"{job.name}.after", f"there is no job {name[:64]!r} in this workflow"
                )
            if when not in _WHEN or (colon and not when):
                fix = f"write {name}, {name}:any or {name}:fail"
                return Refused(f"{job.name}.after", f"{text[:80]!r} says nothing; {fix}")
    if loop := _loop(names):
        return Refused(f"{loop[0]}.after", f"the jobs wait for each other: {' -> '.join(loop)}")
    return None


def _loop(jobs: dict[str, WorkflowJob]) -> list[str]:
    """The names along a circle, in the order in which they would have to run; empty: none."""
    left = {name: {text.partition(":")[0] for text in job.after} for name, job in jobs.items()}
    while free := [name for name, before in left.items() if not before]:
        for name in free:
            del left[name]
        gone = frozenset(free)
        for before in left.values():
            before -= gone
    if not left:
        return []
    path = [next(iter(left))]
    while (name := min(left[path[-1]])) not in path:
        path.append(name)
    return [*path[path.index(name) :], name][::-1]


def enter_all(round_: Round, jobs: tuple[WorkflowJob, ...], key: str) -> Accepted:
    """Every job was looked at, so each gets its id. The first carries the key."""
    first = round_.state.next_job
    ids = {job.name: f"j{first + place}" for place, job in enumerate(jobs)}
    for place, job in enumerate(jobs):
        enter(round_, _placed_in(job, ids), "" if place else key)
    return Accepted(f"j{first}")


def _placed_in(job: WorkflowJob, ids: dict[str, str]) -> JobSpec:
    """Names become ids."""
    parts = [text.partition(":") for text in job.after]
    after = tuple(f"{ids[name]}{colon}{when}" for name, colon, when in parts)
    return msgspec.structs.replace(
        job.spec, name=job.name, after=(*after, *job.spec.after), workflow=next(iter(ids.values()))
    )


def cancel_workflow(round_: Round, request: CancelWorkflow) -> Answer:
    state = round_.state
    found = [state.live(job_id) for job_id in state.flows.get(request.workflow, ())]
    live = [job for job in found if job is not None]
    left = [job for job in live if job.stop_cause is not StopCause.CANCEL]
    for job in left:
        cancel(round_, job, f"cancelled with its workflow by {request.who}")
    note = f"{plural(len(left), 'job')} cancelled" if left else "none of its jobs was live"
    return Accepted(request.workflow, note)


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
            return Refused("after", f"{DEPENDENTS_MAX:,} jobs wait for {one.job}, the maximum")
    return None


def _known(state: State, job_id: str) -> Job | None:
    """A job or array that has not ended; of an element that has not begun, its array."""
    return state.live(job_id) or (state.arrays[array_of(job_id)] if state.pending(job_id) else None)


def enter(round_: Round, spec: JobSpec, key: str = "", until_ms: int = 0) -> Accepted:
    """The job is in the log from here on. If what it waits for can no longer come true, it ends at
    once: whether the other job fails just before or just after makes no difference."""
    awaits: dict[str, None] = {}
    if spec.after:
        named = [one.job for one in conditions(spec.after)]
        awaits = dict.fromkeys(name for name in named if name not in round_.ends)
    job_id = f"j{round_.state.next_job}"
    kind = JobSubmitted if spec.sweep is None else ArraySubmitted
    round_.emit(kind(at_ms=round_.now_ms, job=job_id, spec=spec, key=key, awaits=tuple(awaits)))
    if until_ms:
        round_.emit(JobLeased(at_ms=round_.now_ms, job=job_id, until_ms=until_ms))
    if (why := in_vain(round_, spec)) is not None:
        cancel(round_, _live(round_, job_id), why)
        return Accepted(job_id, f"it was cancelled at once: {render(why, Reader(spec.tenant))}")
    return Accepted(job_id)


def in_vain(round_: Round, spec: JobSpec) -> str | None:
    """Why the job would end as soon as it enters."""
    if not spec.after:
        return None
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
            never = Ended(element, ended.tenant, Outcome.CANCELLED, "it never started")
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


def submit_instead(round_: Round, request: Submit) -> Answer:
    """One job takes the place of another that waits, so a full queue has room for it. What others
    count on stays: a job that has started, or that belongs to more than itself."""
    state, spec = round_.state, request.spec
    old = state.live(request.instead)
    if old is None or request.scope not in (EVERY_TENANT, old.spec.tenant):
        return Refused("job", f"there is no live job {request.instead}", missing=True)
    if old.spec.tenant != spec.tenant:
        return Refused("tenant", f"{old.id} is a job of {old.spec.tenant}, and stays one")
    if old.elements is not None or has_others(state, old):
        what = "others belong to it or wait for it; submit the change as another job"
        return Refused("job", f"{old.id} cannot be replaced: {what}")
    if old.phase is not Phase.WAITING or old.attempt:
        return Refused("job", f"{old.id} has already started; submit the change as another job")
    if any(one.job == old.id for one in conditions(spec.after)):
        return Refused("after", f"{old.id} is the job that this one replaces")
    if (vain := in_vain(round_, spec)) is not None:
        return Refused("after", render(vain, Reader(spec.tenant)))
    full = too_many(state.tally, state.accounts, spec.tenant, 1, waiting=1, gone=1)
    more = bytes_of(spec) - bytes_of(old.spec)
    full = full or too_large(state.sizes, spec.tenant, more)
    if full is not None:
        return full  # a cap was lowered since the old one came
    cancel(
        round_,
        old,
        f"replaced by {job_part(spec.tenant, f'j{state.next_job}')}, which asks for something else",
    )
    return enter(round_, spec, request.key, request.until_ms)


def has_others(state: State, job: Job) -> bool:
    spec = job.spec
    group = spec.array or spec.service or spec.workflow or spec.schedule
    return bool(group) or bool(state.dependents.get(job.id))


def awaited(state: State, job: Job, now_ms: int) -> str:
    """The first job that it waits for and that job's state; of the others, the number."""
    first = job.awaits[0]
    words = [WORDS[one.when] for one in conditions(job.spec.after) if one.job == first]
    other = state.live(first)
    name, now = job_part(job.spec.tenant, first), ""
    if other is not None:
        name, now = other.label, _state_of(state, other, now_ms)
    more = len(job.awaits) - 1
    rest = f"; and for {plural(more, 'other job')}" if more else ""
    return f"waits for {name} to {words[0]}{now}{rest}"


def _state_of(state: State, other: Job, now_ms: int) -> str:
    text = f"; {other.mention} is {other.phase.value}"
    if other.elements is not None:
        return f"; {other.mention}: {progress_text(state, other)}"
    if other.phase is Phase.RUNNING:
        left = left_ms(state, other, now_ms, TYPICAL)
        return text if left is None else f"{text} and will probably end in about {about(left)}"
    if other.phase is Phase.WAITING and other.awaits:
        return f"{text} for {job_part(other.spec.tenant, other.awaits[0])}"
    return text


def begins(job: Job, now_ms: int) -> str:
    left = duration_text(job.not_before_ms - now_ms)
    return f"may begin at {moment_text(job.not_before_ms)}, in {left}"


# -- what always holds, in code that shares nothing with the code above ----------------------------


def workflow_violation(state: State) -> str:
    """Empty if all is well."""
    waiting: dict[str, dict[str, None]] = {}
    flows: dict[str, dict[str, None]] = {}
    for job in (*state.jobs.values(), *state.arrays.values()):
        named = {text.partition(":")[0] for text in job.spec.after}
        for other in job.awaits:
            waiting.setdefault(other, {})[job.id] = None
            if other not in state.jobs and other.partition(".")[0] not in state.arrays:
                return f"{job.id} waits for {other}, which is not live"
            if other not in named:
                return f"{job.id} waits for {other}, but was not asked to"
        if job.awaits and (job.phase is not Phase.WAITING or job.attempt):
            return f"{job.id} is {job.phase.value}, but waits for {job.awaits[0]}"
        if job.elements is None and bool(job.awaits) != (job.number in state.queue.parked):
            return f"{job.id} is not where jobs wait for others, or should not be there"
        if job.spec.workflow:
            flows.setdefault(job.spec.workflow, {})[job.id] = None
    if waiting != state.dependents:
        return "the index of jobs that wait for others does not match the jobs"
    if flows != state.flows:
        return "the index of workflows does not match the jobs"
    return ""
