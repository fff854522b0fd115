"""`GET /v1/events`: the log, as its reader may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.api.handling import aside, encoded, handles, respond
from shoal.api.http import Response
from shoal.api.jobs import NUMBER_MAX, WaitS
from shoal.api.reach import Reach, seen_events
from shoal.calls.cluster import ClusterCalls
from shoal.calls.histories import EventsView
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.base import JobEvent
from shoal.core.state.events.log import Recorded, published
from shoal.core.state.events.queue import JobSubmitted
from shoal.model.finding import JobFilter
from shoal.ports import Store

EVENTS_MAX = 10_000
READ_AT_ONCE = 2_000  # of the log, to find events of one tenant in it
READ_MAX = 100_000  # ... in one request; the next one continues from there

Name = Annotated[str, Meta(max_length=64)]
Page = tuple[list[Recorded], int]  # and where to continue
Read = Callable[[int, int], list[Recorded]]


class Events:
    @handles(ClusterCalls.events)
    async def events(
        self,
        reach: Reach,
        wanted: JobFilter,
        after: Annotated[int, Meta(ge=-EVENTS_MAX, le=NUMBER_MAX)] = 0,
        limit: Annotated[int, Meta(ge=1, le=EVENTS_MAX)] = 1000,
        job: Name = "",
        node: Name = "",
        notable: bool = False,
        wait_s: WaitS = 0,
    ) -> Response[EventsView]:
        loop = reach.loop
        since_ms, wanted = wanted.since_ms, msgspec.structs.replace(wanted, since_ms=0)
        first = await aside(lambda: loop.store.seq_at(since_ms)) if since_ms else 0
        after = max(after, first) if after >= 0 else after

        def read(start: int, most: int) -> list[Recorded]:
            return loop.store.events(start, most, job, node, notable)

        deadline_s = time.monotonic() + wait_s
        while True:
            if job and not reach.who.admin and reach.find(job) is None:
                page: Page = ([], max(after, 0))  # as for a job that never was
            else:
                page = await _page(reach, read, after, limit, wanted)
                page = ([one for one in page[0] if one.seq > first], page[1])
            found, after = page
            left_s = deadline_s - time.monotonic()
            if found or left_s <= 0:
                break
            await reach.loop.changed(job, left_s, starts=bool(job))
        body = await aside(
            lambda: encoded(EventsView(events=published(found), next_after=after)), limit
        )
        return respond(body)


async def newest(reach: Reach, kinds: tuple[type[JobEvent], ...], most: int) -> list[Recorded]:
    """The last ones of these kinds that the sender may see, in the newest part of the log."""

    def read() -> list[Recorded]:
        found = reach.loop.store.events(-EVENTS_MAX, EVENTS_MAX, notable=True)
        return [one for one in found if isinstance(one.event, kinds)]

    found = await aside(read, EVENTS_MAX)
    return (await _seen(reach, found[-READ_AT_ONCE:]))[-most:]


async def _page(reach: Reach, read: Read, after: int, limit: int, wanted: JobFilter) -> Page:
    """Events that the sender may see, and where to continue."""
    if reach.who.admin and not wanted.given:
        found = await aside(lambda: seen_events(reach, read(after, limit)), limit)
        return found, found[-1].seq if found else max(after, 0)
    if after < 0:
        whole = await aside(lambda: read(-EVENTS_MAX, EVENTS_MAX), EVENTS_MAX)
        seen = await _matching(reach, await _seen(reach, whole), wanted)
        return seen[-min(limit, -after) :], whole[-1].seq if whole else 0
    for _ in range(READ_MAX // READ_AT_ONCE):
        start = after
        whole = await aside(lambda start=start: read(start, READ_AT_ONCE), READ_AT_ONCE)  # type: ignore[misc]
        seen = await _matching(reach, await _seen(reach, whole), wanted)
        if len(seen) > limit:
            return seen[:limit], seen[limit - 1].seq
        after = whole[-1].seq if whole else after
        if seen or len(whole) < READ_AT_ONCE:
            return seen, after
    return [], after


async def _matching(reach: Reach, found: list[Recorded], wanted: JobFilter) -> list[Recorded]:
    """Only events of jobs that match."""
    if not wanted.given:
        return found
    events = [one for one in found if isinstance(one.event, JobEvent)]
    named = {one.event.job for one in events}  # type: ignore[attr-defined]
    known = {name: reach.loop.state.jobs.get(name) for name in named}
    live = {name for name, job in known.items() if job is not None and wanted.matches(job)}
    gone = [name for name, job in known.items() if job is None]

    def ended() -> set[str]:
        jobs = (reach.loop.store.job(name) for name in gone)
        return {job.id for job in jobs if job is not None and wanted.matches(job)}

    names = {*live, *await aside(ended, len(gone))}
    await reach.loop.settled()
    return [one for one in events if one.event.job in names]  # type: ignore[attr-defined]


async def _seen(reach: Reach, found: list[Recorded]) -> list[Recorded]:
    owners = await aside(lambda: _owners(reach.loop.store, found), len(found))
    await reach.loop.settled()
    return seen_events(reach, found, owners)


def _owners(store: Store, found: Iterable[Recorded]) -> dict[str, str]:
    """The tenants of finished jobs, read in a thread."""
    owners: dict[str, str] = {}
    for recorded in found:
        event = recorded.event
        if isinstance(event, JobSubmitted | ArraySubmitted):
            owners[event.job] = event.spec.tenant
        elif isinstance(event, JobEvent) and event.job not in owners:
            job = store.job(event.job)
            owners[event.job] = job.spec.tenant if job is not None else ""
    return owners
