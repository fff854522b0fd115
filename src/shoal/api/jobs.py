"""The API of jobs: submit, list, wait for, stop and wake them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
from collections.abc import AsyncIterator
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shoal.api.audit import note
from shoal.api.handling import ROWS_AT_ONCE, aside, encoded, handles, json_list, respond
from shoal.api.http import Request, Response
from shoal.api.packages import refuse_unknown_package
from shoal.api.problems import Refusal, accepted
from shoal.api.queue import jobs_of_group, position_of
from shoal.api.quotas import charge
from shoal.api.reach import Reach, scoped_key, seen_events
from shoal.api.secrets import refuse_unknown_secrets
from shoal.api.submitting import entered, entered_all, on_its_own
from shoal.api.views import (
    Samples,
    bound_of,
    ended_row,
    job_row,
    job_view,
    progress_view,
    seen_remedies,
)
from shoal.calls.histories import WhyView
from shoal.calls.jobs import JobCalls
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.answers.advice import advise
from shoal.core.answers.explain import attempts_of, learned_of, no_tail
from shoal.core.answers.outlook import outlook
from shoal.core.answers.why import Waits, explain, reason_of
from shoal.core.features.service.cold import complete
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.log import Recorded, published
from shoal.core.state.events.nodes import NodeChecked, NodeJudged, NodeLost
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.model.columns import COLUMNS, Kind, column_of
from shoal.model.explanation import Explanation
from shoal.model.finding import EVERY_JOB, Found, JobFilter, Mark, Order
from shoal.model.ids import array_of
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.report import (
    Cancel,
    Refused,
    RenewLease,
    Requeue,
    SleepJob,
    Submit,
    WakeJob,
)
from shoal.model.report import Retry as RetryElements
from shoal.model.views import (
    Done,
    JobRow,
    JobView,
    LeaseUntil,
    LeaseView,
    Submission,
    Submissions,
    Submitted,
)

JOBS_MAX = 10_000
WAIT_S_MAX = 30.0
NUMBER_MAX = 2**53 - 1  # the largest number that all JSON readers handle

KEY_MAX = 128
Key = Annotated[str, Meta(max_length=KEY_MAX)]
WaitS = Annotated[float, Meta(ge=0, le=WAIT_S_MAX)]
Index = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]


class Jobs:
    @handles(JobCalls.submit)
    async def submit(self, request: Request, reach: Reach, data: Submission) -> JobView:
        if len(data.key) > KEY_MAX:
            raise Refusal(422, f"is longer than {KEY_MAX} characters", "key")
        until_ms, cancelled = data.until_ms, data.cancelled
        job_id = await entered(reach, data.spec, data.key, until_ms=until_ms, cancelled=cancelled)
        note(request.scope, on=job_id)
        return job_view(reach, reach.job(job_id), explained=False)

    @handles(JobCalls.submit_many)
    async def submit_many(
        self, request: Request, reach: Reach, data: Submissions
    ) -> list[Submitted]:
        if len(data.key) > KEY_MAX:
            raise Refusal(422, f"is longer than {KEY_MAX} characters", "key")
        charge(request, len(data.specs) - 1)
        answers = await entered_all(reach, data)
        jobs = [one.id for one in answers if one.id]
        note(request.scope, on=f"{jobs[0]} and {len(jobs) - 1} more" if jobs else "")
        return answers

    @handles(JobCalls.jobs)
    async def listing(
        self,
        reach: Reach,
        wanted: JobFilter,
        finished: bool = False,
        limit: Annotated[int, Meta(ge=1, le=JOBS_MAX)] = 100,
        before: Key = "",
        sort: Annotated[str, Meta(max_length=32)] = "",
        cursor: Annotated[str, Meta(max_length=CURSOR_MAX)] = "",
        count: bool = False,
        group: Annotated[str, Meta(max_length=16)] = "",
    ) -> Response[list[JobRow]]:
        if wanted.array:
            reach.job(wanted.array)
        if group:
            # a list shows the array of a waiting element, unless the array is named
            ids = (
                job.id if wanted.array else job.spec.array or job.id
                for job in jobs_of_group(reach, group)
            )
            wanted = msgspec.structs.replace(wanted, among=frozenset(ids))
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
                await reach.loop.changed(job_id, left_s, starts=wait_for != "finished")
                job = reach.job(job_id)
        return job_view(reach, job)

    @handles(JobCalls.cancel)
    async def cancel(self, reach: Reach, job_id: str) -> Done:
        job = reach.job(job_id)
        if job.phase is Phase.FINISHED:
            return Done(id=job.id, note=f"it has already ended: {job.state}")
        said = await reach.loop.request(Cancel(job_id, reach.name))
        if isinstance(said, Refused) and said.missing:  # it has ended since we looked
            job = await _ended(reach, job_id)
            return Done(id=job.id, note=f"it has already ended: {job.state}")
        answer = accepted(said)
        return Done(id=answer.id, note=answer.note)

    @handles(JobCalls.renew_lease)
    async def renew_lease(self, reach: Reach, job_id: str, data: LeaseUntil) -> LeaseView:
        reach.job(job_id)
        said = await reach.loop.request(RenewLease(job_id, data.until_ms, reach.name))
        job = await _ended(reach, job_id)
        if isinstance(said, Refused) and said.missing:
            raise Refusal(422, f"{job.id} has ended ({job.state})", "job")
        answer, now_ms = accepted(said), reach.loop.clock.now_ms()
        return LeaseView(id=job.id, until_ms=job.until_ms, now_ms=now_ms, note=answer.note)

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


async def _ended(reach: Reach, job_id: str) -> Job:
    """As it is now: a job that has just left the state, from the store."""
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
    raise Refusal(422, f"{job.id} cannot be {what}: it has ended ({job.state})", "job")


def _reached(job: Job, goal: str) -> bool:
    """A finished job counts as having reached any phase."""
    if job.phase is Phase.FINISHED:
        return True
    if goal == "asleep":  # or it is known that it will not be
        return job.phase is not Phase.DOZING
    return goal == "running" and job.phase is Phase.RUNNING


# Lists of jobs: live and finished ones, without holding up the loop.
#
# Live jobs are looked at in parts, so that others get their turn; finished ones are read in a
# thread.


MATCHED_AT_ONCE = 5_000  # live jobs, which takes a few milliseconds
SEARCHED_AT_ONCE = 1_000  # ... and by words, which takes longer
CURSOR_MAX = 512
NEXT, COUNT, LEFT_OUT = "shoal-next", "shoal-count", "shoal-left-out"


class Place(NamedTuple):
    """An order, and where to go on in it."""

    order: Order
    mark: Mark | None = None


class _Cursor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    at_ms: int
    value: str | int
    number: int


def place_of(reach: Reach, sort: str, cursor: str) -> Place:
    down, column = sort.startswith("-"), column_of(sort.removeprefix("-"))
    if column is None or not column.sorts:
        names = ", ".join(one.name for one in COLUMNS.values() if one.sorts)
        raise Refusal(422, f"is one of {names}, with - before it to reverse", "sort")
    if not cursor:
        return Place(Order(column.name, down, reach.loop.clock.now_ms()))
    try:
        found = msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=_Cursor)
    except (msgspec.DecodeError, binascii.Error, ValueError):
        found = None
    words = column.kind is Kind.TEXT
    if found is None or isinstance(found.value, str) is not words:
        raise Refusal(422, "is not one of this list; begin again without it", "cursor")
    if max(abs(found.number), 0 if words else abs(int(found.value))) >= 2**63:
        raise Refusal(422, "is not one of this list; begin again without it", "cursor")
    return Place(Order(column.name, down, found.at_ms), (found.value, found.number))


def _cursor(place: Place, mark: Mark) -> str:
    body = msgspec.json.encode(_Cursor(place.order.at_ms, *mark))
    return base64.urlsafe_b64encode(body).decode()


# -- live first, then the last that ended -------------------------------------------------------


async def listed(
    reach: Reach, wanted: JobFilter, limit: int, *, finished: bool = False, before: str = ""
) -> Response[list[JobRow]]:
    """Live jobs in the order of the queue, then finished ones, the last to end first; `before`:
    only those that ended before this one."""
    found: list[Job] = []
    if not before:
        async for jobs in _matching(reach, wanted):
            found += jobs
    found = [job for job in found if reach.loop.state.live(job.id) is not None]
    live = [job.id for job in sorted(found, key=_queue_order)[:limit]]
    seen, left = set(live), limit - len(live)
    parts = [part async for part in _encoded(reach, list(live))]
    own = _own(reach, wanted)

    def ended() -> list[JobRow]:
        if own is None or wanted.only_live:
            return []
        rows = reach.loop.store.finished(left, wanted=own, before=before)
        return [ended_row(job) for job in rows if job.id not in seen]

    finished = finished or bool(before) or wanted.only_ended
    rows = await aside(ended, left) if finished and left else []
    parts += [part async for part in _encoded(reach, list(rows))]
    return respond(json_list(parts))


def _queue_order(job: Job) -> tuple[bool, int, int]:
    """Running jobs first, then waiting ones in the scheduler's order."""
    return job.phase is Phase.WAITING, -job.spec.priority, job.number


# -- all of them in one order --------------------------------------------------------------------


async def paged(
    reach: Reach, wanted: JobFilter, place: Place, limit: int, *, count: bool
) -> Response[list[JobRow]]:
    order, own = place.order, _own(reach, wanted)
    live: list[tuple[Mark, str | JobRow]] = []
    matched = 0
    async for jobs in _matching(reach, wanted):
        matched += len(jobs)
        marked = ((order.mark(job), job.id) for job in jobs)
        more = (row for row in marked if place.mark is None or order.after(row[0], place.mark))
        live = order.first([*live, *more], limit + 1)

    alive = {name for _, name in live}

    def ended() -> tuple[Found, list[tuple[Mark, str | JobRow]], int]:
        if own is None or wanted.only_live:
            return Found([]), [], 0
        store = reach.loop.store
        found = store.listed(limit, own, order, place.mark)
        rows = [(mark, ended_row(job)) for mark, job in found.jobs if job.id not in alive]
        return found, [*rows], store.count(own) if count else 0

    found, rows, others = await aside(ended, limit)
    known = [*live, *rows]
    if (end := found.next) is not None:  # beyond it the store may know others
        known = [row for row in known if not order.after(row[0], end)]
    shown = order.first(known, limit)
    further = shown[-1][0] if len(known) > limit else found.next
    headers = {NEXT: _cursor(place, further)} if further is not None else {}
    headers |= {LEFT_OUT: "true"} if found.left_out else {}
    if count:
        about = "about " if others and own is not None and own.given else ""
        headers[COUNT] = f"{about}{matched + others}"
    parts = [part async for part in _encoded(reach, [what for _, what in shown], wanted)]
    return respond(json_list(parts), headers)


# -- shared --------------------------------------------------------------------------------------


def _own(reach: Reach, wanted: JobFilter) -> JobFilter | None:
    """The filter for the store, which knows no senders; None: the sender may see none of these."""
    who = reach.who
    if who.sees_all:
        return wanted
    if not who.sees(wanted.tenant or who.tenant):
        return None
    return msgspec.structs.replace(wanted, tenant=who.tenant, first_job=who.first_job)


async def _matching(reach: Reach, wanted: JobFilter) -> AsyncIterator[list[Job]]:
    """Live jobs that match, in parts. Arrays are among them, and their elements are not, unless one
    array is named. Others get their turn between two parts, so a job may have ended since."""
    shown = [job for job in reach.jobs() if job.spec.array == wanted.array]
    shown += [] if wanted.array else reach.arrays()
    names = [] if wanted.only_ended else [job.id for job in shown]
    many = SEARCHED_AT_ONCE if wanted.text else MATCHED_AT_ONCE
    for start in range(0, len(names), many):
        jobs = (reach.loop.state.live(name) for name in names[start:][:many])
        yield [job for job in jobs if job is not None and wanted.matches(job)]
        if start + many < len(names):
            await asyncio.sleep(0)
            await reach.loop.settled()


async def _encoded(
    reach: Reach, jobs: list[str | JobRow], wanted: JobFilter = EVERY_JOB
) -> AsyncIterator[bytes]:
    """Rows as JSON, in pieces; of live jobs, which are named, as they are now. `wanted`: without
    those that no longer match."""
    for start in range(0, len(jobs), ROWS_AT_ONCE):
        await reach.loop.settled()
        rows = []
        for what in jobs[start : start + ROWS_AT_ONCE]:
            if isinstance(what, JobRow):
                rows.append(msgspec.structs.replace(what, why=reach.text(what.why)))
            elif (job := reach.find(what)) is not None and wanted.matches(job):
                rows.append(job_row(reach, job))
        yield encoded(rows)
        await asyncio.sleep(0)


# Explains what happened to a job, from the log of events, even long after its end.


HISTORY_MAX = 20_000  # events of a job that are read
WHY_EVENTS_MAX = 200  # of these, how many are shown
NODES_MAX = 64  # nodes whose events are read
NODE_EVENTS_MAX = 500  # events of each node
TAIL_BYTES = 16 * 1024
COMMAND_CHARACTERS_MAX = 500
AFTER_END_MS = 3_600_000  # what happens to its nodes later than this has other causes


class Explanations:
    @handles(JobCalls.explanation)
    async def explanation(self, reach: Reach, history: History, job_id: str) -> Explanation:
        loop = reach.loop
        reach.job(job_id)
        read = await aside(lambda: _read(loop, job_id))
        await loop.settled()
        return explanation_of(reach, reach.job(job_id), read, history.newest)


def why_view(
    reach: Reach, job: Job, told: list[Recorded] | None = None, samples: Samples | None = None
) -> WhyView:
    """`told` is the job's history, if it was already read."""
    loop = reach.loop
    now_ms = loop.clock.now_ms()
    seen = outlook(loop.state, job, loop.policy, now_ms)
    waits = job.phase is Phase.WAITING
    told = loop.store.history(job.id, HISTORY_MAX) if told is None else told
    told = seen_events(reach, told, {job.id: job.spec.tenant})
    return WhyView(
        id=job.id,
        state=job.state,
        early_ms=seen.early_ms,
        late_ms=seen.late_ms,
        start=seen.start,
        position=position_of(reach, job),
        since_ms=max(job.submitted_ms, job.requeued_ms) if waits else None,
        why=_with_holders(reach, job, reach.text(seen.why), now_ms),
        progress=progress_view(loop, job, samples),
        events=published(told[-WHY_EVENTS_MAX:]),
        attempts=attempts_of((one.event for one in told), no_tail),
        labels=job.spec.labels,
        notes=list(job.notes),
        remedies=seen_remedies(reach, advise(loop.state, job, now_ms)),
    )


def _with_holders(reach: Reach, job: Job, why: str, now_ms: int) -> str:
    """A job that waits for room names the jobs that hold it."""
    if job.phase is not Phase.WAITING or job.elements is not None:
        return why
    reason = reason_of(reach.loop.state, job, reach.loop.policy, now_ms)
    held = reach.holders(job) if reason and reason.kind is Waits.ROOM else ""
    return f"{why}; {held}" if held else why


def _read(loop: ControlLoop, job_id: str) -> tuple[list[Recorded], list[Recorded]]:
    own = loop.store.history(job_id, HISTORY_MAX)
    return own, _with_nodes(loop, own)


def explanation_of(
    reach: Reach,
    job: Job,
    read: tuple[list[Recorded], list[Recorded]] | None = None,
    samples: Samples | None = None,
) -> Explanation:
    loop = reach.loop
    own, around = read or _read(loop, job.id)
    seen = seen_events(reach, around, {job.id: job.spec.tenant})
    events = [recorded.event for recorded in seen]
    now_ms = loop.clock.now_ms()
    until_ms = (job.finished_ms if job.finished_ms is not None else now_ms) + AFTER_END_MS
    events = [event for event in events if event.at_ms <= until_ms]

    def tail(attempt: int, member: int) -> str:
        read = loop.logs.read(MemberRef(job.id, attempt, member), -TAIL_BYTES)
        return read.data.decode("utf-8", "replace")

    attempts = attempts_of(events, tail)
    if attempts and attempts[-1].attempt == job.attempt and job.phase is Phase.RUNNING:
        attempts[-1].bound = bound_of(loop, job, samples or {})
    if attempts and (cold := attempts[-1].cold) and job.active:
        complete(loop.state, job, cold)
    command = shlex.join(job.spec.command)
    return Explanation(
        id=job.id,
        name=job.spec.name or "",
        tenant=job.spec.tenant,
        state=job.state,
        why=reach.text(explain(loop.state, job, loop.policy, now_ms)),
        command=command[:COMMAND_CHARACTERS_MAX],
        members=job.spec.members,
        submitted_ms=job.submitted_ms,
        finished_ms=job.finished_ms,
        now_ms=now_ms,
        code=job.code,
        complete=bool(own) and isinstance(own[0].event, JobSubmitted | ArraySubmitted),
        attempts=attempts,
        learned=learned_of(events, job.id),
        labels=job.spec.labels,
        notes=list(job.notes),
    )


def _with_nodes(loop: ControlLoop, own: list[Recorded]) -> list[Recorded]:
    """The job's events, and those of its nodes since the job was first placed on them."""
    first: dict[str, int] = {}
    for recorded in own:
        if isinstance(recorded.event, JobPlaced):
            for slice_ in recorded.event.slices:
                first.setdefault(slice_.node, recorded.seq)
    found = list(own)
    for node, seq in list(first.items())[:NODES_MAX]:
        for recorded in loop.store.events(seq, NODE_EVENTS_MAX, node=node):
            if isinstance(recorded.event, NodeLost | NodeChecked | NodeJudged):
                found.append(recorded)
    return sorted(found, key=lambda recorded: recorded.seq)
