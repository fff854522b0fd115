"""The API of jobs: submit, list, wait for, stop and wake them, and read their output."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Request, Response, get, post
from litestar.params import Parameter

from shoal.api.audit import note
from shoal.api.explain import HISTORY_MAX, why_view
from shoal.api.listing import CURSOR_MAX, listed, paged, place_of
from shoal.api.log_search import matching
from shoal.api.packages import note_package, refuse_unknown_package
from shoal.api.principal import Needs
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.read_threads import aside
from shoal.api.secrets import refuse_unknown_secrets
from shoal.api.views import job_state, job_view
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.state.apply_array import parts_of
from shoal.model.finding import JobFilter
from shoal.model.ids import array_of
from shoal.model.job import Job, JobSpec, MemberRef, Phase
from shoal.model.report import Cancel, Refused, Requeue, SleepJob, Submit, WakeJob
from shoal.model.report import Retry as RetryElements
from shoal.model.views import Done, JobRow, JobView, LogView, Submission, WhyView

JOBS_MAX = 10_000
WAIT_S_MAX = 30.0
NUMBER_MAX = 2**53 - 1  # the largest number that all JSON readers handle

Key = Annotated[str, Parameter(max_length=128)]
WaitS = Annotated[float, Parameter(ge=0, le=WAIT_S_MAX)]
Index = Annotated[int, Parameter(ge=0, le=NUMBER_MAX)]


class Jobs(Controller):
    path = "/v1/jobs"
    opt = Needs.READ.opt

    @post(opt=Needs.WRITE.opt)
    async def submit(
        self, request: Request[Any, Any, Any], reach: Reach, data: Submission
    ) -> JobView:
        if len(data.key) > 128:
            raise Refusal(422, "is longer than 128 characters", "key")
        spec = reach.spec(data.spec)
        refuse_unknown_package(reach, spec.package)
        refuse_unknown_secrets(reach.loop, spec)
        wanted = Submit(spec, scoped_key(spec, data.key), reach.tenant)
        answer = accepted(await reach.loop.request(wanted))
        note(request.scope, on=answer.id)
        await reach.loop.settled()
        note_package(reach, spec.package, spec.tenant)
        return job_view(reach, reach.job(answer.id))

    @get()
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
        """Arrays as one row each; with `wanted.array`, the elements of that one. `before`: only
        finished jobs, those that ended before this one: the next page.

        `sort` (submitted, started, ended, name, user, tenant, state, priority, gpus, time,
        attempts; with "-" before it, the largest first) lists live and finished jobs together. The
        header `shoal-next` is the `cursor` of the next page; without it, this was the last. With
        `count`, the header `shoal-count` says how many match ("about 812" if some only may).
        `shoal-left-out` is there if too many match to sort all of them."""
        if wanted.array:
            reach.job(wanted.array)
        if sort:
            return await paged(reach, wanted, place_of(reach, sort, cursor), limit, count=count)
        if before:
            return await listed(reach, wanted, limit, before=before)
        return await listed(reach, wanted, limit, finished=finished)

    @get("/{job_id:str}")
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
                await reach.changed(job_id, left_s)
                job = reach.job(job_id)
        return job_view(reach, job)

    @post("/{job_id:str}/cancel", status_code=200, opt=Needs.WRITE.opt)
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

    @post("/{job_id:str}/sleep", status_code=200, opt=Needs.WRITE.opt)
    async def sleep(self, reach: Reach, job_id: str) -> Done:
        """Put the running job to sleep, until it is used or woken."""
        return await _nap(reach, job_id, SleepJob(job_id, reach.name))

    @post("/{job_id:str}/wake", status_code=200, opt=Needs.WRITE.opt)
    async def wake(self, reach: Reach, job_id: str) -> Done:
        """Wake the job as soon as there is room."""
        return await _nap(reach, job_id, WakeJob(job_id, reach.name))

    @post("/{job_id:str}/requeue", status_code=200, opt=Needs.WRITE.opt)
    async def requeue(self, reach: Reach, job_id: str, key: Key = "") -> Done:
        """Run the job again from its last checkpoint. A finished job: once for each key."""
        job = reach.job(job_id)
        if job.phase is not Phase.FINISHED:
            said = await reach.loop.request(Requeue(job_id, reach.name))
            if not (isinstance(said, Refused) and said.missing):
                answer = accepted(said)
                return Done(id=answer.id, note=answer.note)
            job = await _ended(reach, job_id)  # since we looked
        if job.spec.array:
            return await self._retry(reach, job_id)
        if job.spec.service:
            raise Refusal(
                422, f"was a replica of {job.spec.service}; the service replaces it", "job"
            )
        spec = reach.spec(on_its_own(job.spec))
        refuse_unknown_package(reach, spec.package)
        refuse_unknown_secrets(reach.loop, spec)
        request = Submit(spec, scoped_key(spec, key), reach.tenant)
        answer = accepted(await reach.loop.request(request))
        return Done(id=answer.id, note=f"submitted again, because {job_id} has ended")

    @post("/{job_id:str}/retry", status_code=200, opt=Needs.WRITE.opt)
    async def retry(self, reach: Reach, job_id: str) -> Done:
        """Run elements of an array again that ended without success: one, or all of them."""
        job = reach.job(array_of(job_id) or job_id)
        if job.elements is None:
            message = f"{job.id} is not an array; run it again with: shoal requeue {job.id}"
            raise Refusal(422, message, "job")
        return await self._retry(reach, job_id)

    async def _retry(self, reach: Reach, job_id: str) -> Done:
        answer = accepted(await reach.loop.request(RetryElements(job_id, reach.name)))
        return Done(id=answer.id, note=answer.note)

    @get("/{job_id:str}/why")
    async def why(self, reach: Reach, history: History, job_id: str) -> WhyView:
        loop = reach.loop
        reach.job(job_id)
        told = await aside(lambda: loop.store.history(job_id, HISTORY_MAX))
        await loop.settled()
        return why_view(reach, reach.job(job_id), told, history.newest)

    @get("/{job_id:str}/logs")
    async def logs(
        self,
        reach: Reach,
        job_id: str,
        member: Index = 0,
        attempt: Index = 0,
        offset: Annotated[int, Parameter(ge=-NUMBER_MAX, le=NUMBER_MAX)] = 0,
        wait_s: WaitS = 0,
        grep: Annotated[str, Parameter(max_length=256)] = "",
        since_ms: Index = 0,
    ) -> LogView:
        """`grep`: only lines that contain this text. `since_ms`: from what was written then."""
        loop, job = reach.loop, reach.job(job_id)
        if job.elements is not None:
            first = f"{job.id}.{parts_of(job)[0].index_at(0)}"
            raise Refusal(422, f"{job.id} is an array; name an element, e.g. {first}", "job")
        last = max(job.spec.members, job.spec.members_max) - 1
        if member > last:
            raise Refusal(422, f"{job.id} has members 0 to {last}", "member")
        if attempt > job.attempt:
            raise Refusal(422, f"{job.id} has had {job.attempt} attempts", "attempt")
        if since_ms:
            offset = loop.logs.offset_at(
                MemberRef(job.id, attempt or job.attempt, member), since_ms
            )
        search = grep.encode()
        view = await _search(reach, job, attempt or job.attempt, member, offset, search)
        deadline_s = time.monotonic() + wait_s
        while not view.data and not view.ended and (left_s := deadline_s - time.monotonic()) > 0:
            await reach.changed(job_id, left_s)
            job = reach.job(job_id)
            offset = max(offset, view.next_offset) if search else offset
            view = await _search(reach, job, attempt or job.attempt, member, offset, search)
        return view


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


def _member_over(job: Job, member: int) -> bool:
    """An elastic gang may have shrunk below this member's number."""
    return member >= len(job.members) or job.members[member].over


async def _search(
    reach: Reach, job: Job, attempt: int, member: int, offset: int, search: bytes
) -> LogView:
    """A search may read many megabytes, so it is done in a thread."""
    loop = reach.loop
    if not search:
        return _log(loop, job, attempt, member, offset, search)
    view = await aside(lambda: _log(loop, job, attempt, member, offset, search))
    await loop.settled()
    return view


def _log(
    loop: ControlLoop, job: Job, attempt: int, member: int, offset: int, search: bytes
) -> LogView:
    # Look whether more can come before reading, so that nothing is missed in between.
    over = (
        job.phase is Phase.FINISHED
        or attempt < job.attempt
        or (job.phase is Phase.WAITING and attempt > 0)
        or (attempt == job.attempt and bool(job.members) and _member_over(job, member))
    )
    ref = MemberRef(job.id, attempt, member)
    if search and offset >= 0:
        read = matching(loop.logs, ref, offset, search, over=over)
    else:
        read = loop.logs.read(ref, offset)
    return LogView(
        attempt=attempt,
        member=member,
        offset=read.start,
        next_offset=read.next,
        ended=over and read.next >= read.size,
        data=read.data,
    )
