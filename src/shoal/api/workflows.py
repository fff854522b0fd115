"""The API of workflows: submit one as a whole, see its graph, cancel what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Controller, Request

from shoal.api.audit import note
from shoal.api.handling import aside, handles
from shoal.api.packages import note_package, refuse_unknown_package
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.secrets import refuse_unknown_secrets
from shoal.calls.jobs import FlowCalls
from shoal.core.answers.why import explain
from shoal.model.after import conditions
from shoal.model.job import Job, Phase
from shoal.model.report import CancelWorkflow, SubmitWorkflow
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


class Workflows(Controller):
    @handles(FlowCalls.submit_workflow)
    async def submit(
        self, request: Request[Any, Any, Any], reach: Reach, data: WorkflowSubmission
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
