"""The API of workflows and schedules: submit, list, pause, resume, cancel and remove them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.api.audit import note
from shoal.api.handling import aside, handles
from shoal.api.http import Request
from shoal.api.jobs import Key
from shoal.api.packages import note_package, refuse_unknown_package
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.secrets import refuse_unknown_secrets
from shoal.api.views import COMMAND_CHARACTERS_MAX
from shoal.calls.jobs import FlowCalls
from shoal.core.answers.why import explain
from shoal.cron import BadCron, due_times, next_due, parse, zone_of
from shoal.model.after import conditions
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import DEFAULT_TENANT, Job, Phase
from shoal.model.report import (
    CancelWorkflow,
    PauseSchedule,
    RemoveSchedule,
    RunSchedule,
    SetSchedule,
    SubmitWorkflow,
)
from shoal.model.schedule import NEXT_SHOWN, Schedule, ScheduleSpec, ScheduleView
from shoal.model.views import Done
from shoal.model.workflow import (
    WORKFLOW_JOBS_MAX,
    WorkflowEdge,
    WorkflowJob,
    WorkflowNode,
    WorkflowSubmission,
    WorkflowView,
)

Look = Callable[[str], Job | None]


class Workflows:
    @handles(FlowCalls.submit_workflow)
    async def submit(
        self, request: Request, reach: Reach, data: WorkflowSubmission
    ) -> WorkflowView:
        if len(data.key) > 128:
            raise Refusal(422, "is longer than 128 characters", "key")
        jobs = own_jobs(reach, data.jobs)
        key = scoped_key(reach, jobs[0].spec, data.key) if jobs else ""
        answer = accepted(await reach.loop.request(SubmitWorkflow(jobs, key, reach.tenant)))
        note(request.scope, on=answer.id)
        await reach.loop.settled()
        note_packages(reach, jobs)
        return await view_of(reach, answer.id)

    @handles(FlowCalls.workflow)
    async def one(self, reach: Reach, workflow: str) -> WorkflowView:
        return await view_of(reach, workflow)

    @handles(FlowCalls.cancel_workflow)
    async def cancel(self, reach: Reach, workflow: str) -> Done:
        await view_of(reach, workflow)  # whoever does not see it cannot cancel it
        answer = accepted(await reach.loop.request(CancelWorkflow(workflow, reach.name)))
        return Done(id=answer.id, note=answer.note)


def own_jobs(reach: Reach, jobs: tuple[WorkflowJob, ...]) -> tuple[WorkflowJob, ...]:
    """With the sender's tenant and user, and nothing that is not there."""
    found = []
    for job in jobs[: WORKFLOW_JOBS_MAX + 1]:
        spec = reach.spec(job.spec)
        refuse_unknown_package(reach, spec.package)
        refuse_unknown_secrets(reach.loop, spec)
        found.append(msgspec.structs.replace(job, spec=spec))
    return tuple(found)


def note_packages(reach: Reach, jobs: tuple[WorkflowJob, ...]) -> None:
    for package, tenant in dict.fromkeys((job.spec.package, job.spec.tenant) for job in jobs):
        note_package(reach, package, tenant)


async def view_of(reach: Reach, workflow: str) -> WorkflowView:
    """Its jobs have numbers in a row, because they came in one request: live ones are in the state,
    the others in the store, as far as it still has them."""
    missing = Refusal(404, f"there is no workflow {workflow[:64]!r}; see: shoal ps -a", "workflow")
    if not (workflow[:1] == "j" and workflow[1:].isdecimal() and len(workflow) < 18):
        raise missing
    state, store, first = reach.loop.state, reach.loop.store, int(workflow[1:])
    live = {job_id: state.live(job_id) for job_id in state.flows.get(workflow, ())}
    last = min(first + WORKFLOW_JOBS_MAX, state.next_job)

    def look() -> list[Job]:
        found: list[Job] = []
        for number in range(first, last):
            job = live.get(f"j{number}") or store.job(f"j{number}")
            if job is not None and job.spec.workflow != workflow:
                break
            if job is not None:
                found.append(job)
        return found

    jobs = await aside(look)
    await reach.loop.settled()
    jobs = [state.live(job.id) or job for job in jobs if reach.sees(job)]
    if not jobs:
        raise missing
    return WorkflowView(
        id=workflow,
        tenant=jobs[0].spec.tenant,
        state=_state(jobs),
        nodes=[_node(reach, job) for job in jobs],
        edges=[
            WorkflowEdge(before=one.job, after=job.id, when=one.when.value)
            for job in jobs
            for one in conditions(job.spec.after)
        ],
    )


def _node(reach: Reach, job: Job) -> WorkflowNode:
    loop = reach.loop
    why = job.why
    if job.phase is not Phase.FINISHED:
        why = explain(loop.state, job, loop.policy, loop.clock.now_ms())
    return WorkflowNode(
        id=job.id, name=job.spec.name or job.id, state=job.state, why=reach.text(why)
    )


def _state(jobs: list[Job]) -> str:
    states = {job.state for job in jobs}
    if any(job.phase is not Phase.FINISHED for job in jobs):
        return "running"
    return "succeeded" if states == {"succeeded"} else "ended"


# The API of schedules: set, list, pause, resume, run and remove them.


class Schedules:
    """A schedule is named by its tenant: `tenant` is for admins, who may name any."""

    @handles(FlowCalls.schedules)
    def listing(self, reach: Reach) -> list[ScheduleView]:
        found = reach.loop.state.schedules.values()
        return [_view(reach, one) for one in found if reach.who.sees(one.spec.tenant)]

    @handles(FlowCalls.schedule)
    def one(self, reach: Reach, name: str, tenant: Key = "") -> ScheduleView:
        return _view(reach, _find(reach, name, tenant))

    @handles(FlowCalls.set_schedule)
    async def set(
        self, request: Request, reach: Reach, name: str, data: ScheduleSpec
    ) -> ScheduleView:
        if data.name != name:
            raise Refusal(422, f"is {data.name!r}, but the URL has {name[:64]!r}", "name")
        loop = reach.loop
        spec = msgspec.structs.replace(data, jobs=own_jobs(reach, data.jobs))
        owner = reach.who.user if reach.who.token else ""
        next_ms = _next(spec, loop.clock.now_ms())
        wanted = SetSchedule(spec, next_ms, owner, reach.name, reach.tenant)
        accepted(await loop.request(wanted))
        note(request.scope, on=spec.name)
        await loop.settled()
        note_packages(reach, spec.jobs)
        return _view(reach, _find(reach, name, spec.tenant))

    @handles(FlowCalls.pause_schedule)
    async def pause(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        key = _find(reach, name, tenant).spec.key
        answer = await reach.loop.request(PauseSchedule(key, 0, reach.name, reach.tenant))
        return _done(accepted(answer))

    @handles(FlowCalls.resume_schedule)
    async def resume(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        spec = _find(reach, name, tenant).spec
        next_ms = _next(spec, reach.loop.clock.now_ms())
        wanted = PauseSchedule(spec.key, next_ms, reach.name, reach.tenant)
        return _done(accepted(await reach.loop.request(wanted)))

    @handles(FlowCalls.run_schedule)
    async def run(self, reach: Reach, name: str, tenant: Key = "", key: Key = "") -> Done:
        spec = _find(reach, name, tenant).spec
        once = scoped_key(reach, spec.jobs[0].spec, key)
        wanted = RunSchedule(spec.key, once, reach.name, reach.tenant)
        return _done(accepted(await reach.loop.request(wanted)))

    @handles(FlowCalls.remove_schedule)
    async def remove(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        key = _find(reach, name, tenant).spec.key
        answer = await reach.loop.request(RemoveSchedule(key, reach.name, reach.tenant))
        return _done(accepted(answer))


def _done(answer: Any) -> Done:
    return Done(id=answer.id, note=answer.note)


def _next(spec: ScheduleSpec, now_ms: int) -> int:
    try:
        zone_of(spec.timezone)
    except BadCron as error:
        raise Refusal(422, str(error), "timezone") from None
    try:
        return next_due(spec, now_ms)
    except BadCron as error:
        raise Refusal(422, str(error), "cron") from None


def _find(reach: Reach, name: str, tenant: str) -> Schedule:
    own = DEFAULT_TENANT if reach.who.tenant == EVERY_TENANT else reach.who.tenant
    found = reach.loop.state.schedules.get(f"{tenant or own}/{name}")
    if found is None or not reach.who.sees(found.spec.tenant):
        message = f"there is no schedule {name[:64]!r}; see: shoal schedule list"
        raise Refusal(404, message, "schedule")
    return found


def _view(reach: Reach, schedule: Schedule) -> ScheduleView:
    spec = schedule.spec
    shown: list[int] = []
    if schedule.next_ms:
        zone = zone_of(spec.timezone)
        shown = due_times(parse(spec.cron), zone, schedule.next_ms, NEXT_SHOWN - 1)
        shown.insert(0, schedule.next_ms)
    last = reach.find(schedule.last_job) if schedule.last_job else None
    command = shlex.join(spec.jobs[0].spec.command)
    if spec.workflow:
        command = f"{len(spec.jobs)} jobs: {', '.join(job.name for job in spec.jobs)}"
    return ScheduleView(
        name=spec.name,
        tenant=spec.tenant,
        user=schedule.owner or spec.user,
        cron=spec.cron,
        timezone=spec.timezone or "UTC",
        overlap=spec.overlap.value,
        missed_rule=spec.missed.value,
        state="active" if schedule.next_ms else "paused",
        why=reach.text(schedule.paused or schedule.note),
        next_ms=shown,
        runs=schedule.runs,
        missed=schedule.missed,
        skipped=schedule.skipped,
        last_ms=schedule.last_ms,
        last_job=schedule.last_job,
        last_state=last.state if last is not None else "",
        command=command[:COMMAND_CHARACTERS_MAX],
        spec=spec,
    )
