"""The API of jobs: submit, list, wait for, stop and wake them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Request, Response
from litestar.params import Parameter

from shoal.api.audit import note
from shoal.api.explain import HISTORY_MAX, why_view
from shoal.api.handling import handles
from shoal.api.listing import CURSOR_MAX, listed, paged, place_of
from shoal.api.packages import note_package, refuse_unknown_package
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.read_threads import aside
from shoal.api.secrets import refuse_unknown_secrets
from shoal.api.views import job_state, job_view
from shoal.calls.jobs import JobCalls
from shoal.control.history.history import History
from shoal.model.finding import JobFilter
from shoal.model.ids import array_of
from shoal.model.job import Job, JobSpec, Phase
from shoal.model.report import Cancel, Refused, Requeue, SleepJob, Submit, WakeJob
from shoal.model.report import Retry as RetryElements
from shoal.model.views import Done, JobRow, JobView, Submission, WhyView

JOBS_MAX = 10_000
WAIT_S_MAX = 30.0
NUMBER_MAX = 2**53 - 1  # the largest number that all JSON readers handle

KEY_MAX = 128
Key = Annotated[str, Parameter(max_length=KEY_MAX)]
WaitS = Annotated[float, Parameter(ge=0, le=WAIT_S_MAX)]
Index = Annotated[int, Parameter(ge=0, le=NUMBER_MAX)]


class Jobs(Controller):
    @handles(JobCalls.submit)
    async def submit(
        self, request: Request[Any, Any, Any], reach: Reach, data: Submission
    ) -> JobView:
        if len(data.key) > KEY_MAX:
            raise Refusal(422, f"is longer than {KEY_MAX} characters", "key")
        job_id = await entered(reach, data.spec, data.key)
        note(request.scope, on=job_id)
        return job_view(reach, reach.job(job_id))

    @handles(JobCalls.jobs)
    async def listing(
        self,
        reach: Reach,
        wanted: JobFilter,
        finished: bool = False,
        limit: Annotated[int, Parameter(ge=1, le=JOBS_MAX)] = 100,
        before: Key = "",
        sort: Annotated[str, Parameter(max_length=32)] = "",
        cursor: Annotated[str, Parameter(max_length=CURSOR_MAX)] = "",
        count: bool = False,
    ) -> Response[list[JobRow]]:
        if wanted.array:
            reach.job(wanted.array)
        if sort:
            return await paged(reach, wanted, place_of(reach, sort, cursor), limit, count=count)
        if before:
            return await listed(reach, wanted, limit, before=before)
        return await listed(reach, wanted, limit, finished=finished)

    @handles(JobCalls.job)
    async def one(
        self,
        reach: Reach,
        job_id: str,
        wait_for: Literal["", "running", "asleep", "finished"] = "",
        wait_s: WaitS = 0,
    ) -> JobView:
        loop, job = reach.loop, reach.job(job_id)
        if wait_for and wait_s:
            deadline_ms = loop.clock.now_ms() + int(wait_s * 1000)
            while not _reached(job, wait_for):
                left_s = (deadline_ms - loop.clock.now_ms()) / 1000
                if left_s <= 0:
                    break
                await reach.loop.changed(job_id, left_s)
                job = reach.job(job_id)
        return job_view(reach, job)

    @handles(JobCalls.cancel)
    async def cancel(self, reach: Reach, job_id: str) -> Done:
        job = reach.job(job_id)
        if job.phase is Phase.FINISHED:
            return Done(id=job.id, note=f"it has already ended: {job_state(job)}")
        said = await reach.loop.request(Cancel(job_id, reach.name))
        if isinstance(said, Refused) and said.missing:  # it has ended since we looked
            job = await _ended(reach, job_id)
            return Done(id=job.id, note=f"it has already ended: {job_state(job)}")
        answer = accepted(said)
        return Done(id=answer.id, note=answer.note)

    @handles(JobCalls.sleep)
    async def sleep(self, reach: Reach, job_id: str) -> Done:
        return await _nap(reach, job_id, SleepJob(job_id, reach.name))

    @handles(JobCalls.wake)
    async def wake(self, reach: Reach, job_id: str) -> Done:
        return await _nap(reach, job_id, WakeJob(job_id, reach.name))

    @handles(JobCalls.requeue)
    async def requeue(self, reach: Reach, job_id: str, key: Key = "") -> Done:
        job = reach.job(job_id)
        if job.phase is not Phase.FINISHED:
            said = await reach.loop.request(Requeue(job_id, reach.name, reach.tenant))
            if not (isinstance(said, Refused) and said.missing):
                answer = accepted(said)
                return Done(id=answer.id, note=answer.note)
            job = await _ended(reach, job_id)  # since we looked
        if job.spec.array:
            return await self._retry(reach, job_id)
        if reach.loop.state.identity.is_earlier(job.spec.tenant, job.id):
            message = f"{job_id} is of a tenant {job.spec.tenant} that was removed"
            raise Refusal(422, message, "job")
        if job.spec.service:
            raise Refusal(
                422, f"was a replica of {job.spec.service}; the service replaces it", "job"
            )
        spec = reach.spec(on_its_own(job.spec))
        refuse_unknown_package(reach, spec.package)
        refuse_unknown_secrets(reach.loop, spec)
        request = Submit(spec, scoped_key(reach, spec, key), reach.tenant)
        answer = accepted(await reach.loop.request(request))
        return Done(id=answer.id, note=f"submitted again, because {job_id} has ended")

    @handles(JobCalls.retry)
    async def retry(self, reach: Reach, job_id: str) -> Done:
        job = reach.job(array_of(job_id) or job_id)
        if job.elements is None:
            message = f"{job.id} is not an array; run it again with: shoal requeue {job.id}"
            raise Refusal(422, message, "job")
        return await self._retry(reach, job_id)

    async def _retry(self, reach: Reach, job_id: str) -> Done:
        answer = accepted(
            await reach.loop.request(RetryElements(job_id, reach.name, scope=reach.tenant))
        )
        return Done(id=answer.id, note=answer.note)

    @handles(JobCalls.why)
    async def why(self, reach: Reach, history: History, job_id: str) -> WhyView:
        loop = reach.loop
        reach.job(job_id)
        told = await aside(lambda: loop.store.history(job_id, HISTORY_MAX))
        await loop.settled()
        return why_view(reach, reach.job(job_id), told, history.newest)


async def entered(reach: Reach, asked: JobSpec, key: str, instead: str = "") -> str:
    """Submit the job; its id. `instead`: a waiting job in whose place it comes."""
    spec = reach.spec(asked)
    refuse_unknown_package(reach, spec.package)
    refuse_unknown_secrets(reach.loop, spec)
    wanted = Submit(spec, scoped_key(reach, spec, key), reach.tenant, instead)
    answer = accepted(await reach.loop.request(wanted))
    await reach.loop.settled()
    note_package(reach, spec.package, spec.tenant)
    return str(answer.id)


def on_its_own(spec: JobSpec) -> JobSpec:
    """Submitted again, it is not a part of what it was submitted with."""
    return msgspec.structs.replace(
        spec, after=(), begin_ms=0, workflow="", schedule="", scheduled_ms=0
    )


async def _ended(reach: Reach, job_id: str) -> Job:
    """A job that has just left the state, from the store."""
    await reach.loop.settled()
    return reach.job(job_id)


async def _nap(reach: Reach, job_id: str, request: SleepJob | WakeJob) -> Done:
    job = reach.job(job_id)
    if job.phase is not Phase.FINISHED:
        said = await reach.loop.request(request)
        if not (isinstance(said, Refused) and said.missing):
            answer = accepted(said)
            return Done(id=answer.id, note=answer.note)
        job = await _ended(reach, job_id)  # since we looked
    what = "put to sleep" if isinstance(request, SleepJob) else "woken"
    raise Refusal(422, f"{job.id} cannot be {what}: it has ended ({job_state(job)})", "job")


def _reached(job: Job, goal: str) -> bool:
    """A finished job counts as having reached any phase."""
    if job.phase is Phase.FINISHED:
        return True
    if goal == "asleep":  # or it is known that it will not be
        return job.phase is not Phase.DOZING
    return goal == "running" and job.phase is Phase.RUNNING
