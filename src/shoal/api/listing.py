"""Lists of jobs: live and finished ones, without holding up the loop.

Live jobs are looked at in parts, so that others get their turn; finished ones are read in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec
from litestar import Response

from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.read_threads import ROWS_AT_ONCE, aside, encoded, json_list, respond
from shoal.api.views import ended_row, job_row
from shoal.model.finding import EVERY_JOB, SORTS, Found, JobFilter, Mark, Order
from shoal.model.job import Job, Phase
from shoal.model.views import JobRow

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
    down, by = sort.startswith("-"), sort.removeprefix("-")
    if by not in SORTS:
        raise Refusal(422, f"is one of {', '.join(SORTS)}, with - before it to reverse", "sort")
    if not cursor:
        return Place(Order(by, down, reach.loop.clock.now_ms()))
    try:
        found = msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=_Cursor)
    except (msgspec.DecodeError, binascii.Error, ValueError):
        found = None
    words = by in ("name", "user", "tenant", "state")
    if found is None or isinstance(found.value, str) is not words:
        raise Refusal(422, "is not one of this list; begin again without it", "cursor")
    if max(abs(found.number), 0 if words else abs(int(found.value))) >= 2**63:
        raise Refusal(422, "is not one of this list; begin again without it", "cursor")
    return Place(Order(by, down, found.at_ms), (found.value, found.number))


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
                what.why = reach.text(what.why)
                rows.append(what)
            elif (job := reach.find(what)) is not None and wanted.matches(job):
                rows.append(job_row(reach, job))
        yield encoded(rows)
        await asyncio.sleep(0)
