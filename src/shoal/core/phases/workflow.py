"""Workflows: named jobs that are submitted together, all or none, and wait for each other."""

from __future__ import annotations

import msgspec

from shoal.core.phases.after import enter
from shoal.core.phases.ending import cancel
from shoal.core.state.round import Round
from shoal.model.after import AFTER_MAX
from shoal.model.job import JobSpec, StopCause
from shoal.model.report import Accepted, Answer, CancelWorkflow, Refused
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
