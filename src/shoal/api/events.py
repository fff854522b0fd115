"""`GET /v1/events`: the log, as its reader may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

from litestar import Controller, Response, get
from litestar.params import Parameter

from shoal.api.identity import without_hash
from shoal.api.jobs import NUMBER_MAX, WaitS
from shoal.api.keys import event_without_keys
from shoal.api.principal import Needs
from shoal.api.reach import Reach
from shoal.api.read_threads import aside, encoded, respond
from shoal.api.seen import seen_events
from shoal.model.events import JobEvent, JobSubmitted, Recorded
from shoal.model.views import EventsView
from shoal.ports import Store

EVENTS_MAX = 10_000
READ_AT_ONCE = 2_000  # of the log, to find events of one tenant in it
READ_MAX = 100_000  # ... in one request; the next one continues from there

Name = Annotated[str, Parameter(max_length=64)]
Page = tuple[list[Recorded], int]  # and where to continue
Read = Callable[[int, int], list[Recorded]]


class Events(Controller):
    path = "/v1/events"
    opt = Needs.READ.opt

    @get()
    async def events(
        self,
        reach: Reach,
        after: Annotated[int, Parameter(ge=-EVENTS_MAX, le=NUMBER_MAX)] = 0,
        limit: Annotated[int, Parameter(ge=1, le=EVENTS_MAX)] = 1000,
        job: Name = "",
        node: Name = "",
        notable: bool = False,
        wait_s: WaitS = 0,
    ) -> Response[EventsView]:
        """`notable` leaves out frequent events that would hide the rest."""
        loop = reach.loop

        def read(start: int, most: int) -> list[Recorded]:
            found = loop.store.events(start, most, job, node, notable)
            return [event_without_keys(without_hash(one)) for one in found]

        deadline_s = time.monotonic() + wait_s
        while True:
            if job and not reach.who.admin and reach.find(job) is None:
                page: Page = ([], max(after, 0))  # as for a job that never was
            else:
                page = await _page(reach, read, after, limit)
            found, after = page
            left_s = deadline_s - time.monotonic()
            if found or left_s <= 0:
                break
            await reach.changed(job, left_s)
        body = await aside(lambda: encoded(EventsView(events=found, next_after=after)), limit)
        return respond(body)


async def _page(reach: Reach, read: Read, after: int, limit: int) -> Page:
    """Events that the sender may see, and where to continue."""
    if reach.who.admin:
        found = await aside(lambda: read(after, limit), limit)
        return found, found[-1].seq if found else max(after, 0)
    if after < 0:
        whole = await aside(lambda: read(-EVENTS_MAX, EVENTS_MAX), EVENTS_MAX)
        seen = await _seen(reach, whole)
        return seen[-min(limit, -after) :], whole[-1].seq if whole else 0
    for _ in range(READ_MAX // READ_AT_ONCE):
        start = after
        whole = await aside(lambda start=start: read(start, READ_AT_ONCE), READ_AT_ONCE)  # type: ignore[misc]
        seen = await _seen(reach, whole)
        if len(seen) > limit:
            return seen[:limit], seen[limit - 1].seq
        after = whole[-1].seq if whole else after
        if seen or len(whole) < READ_AT_ONCE:
            return seen, after
    return [], after


async def _seen(reach: Reach, found: list[Recorded]) -> list[Recorded]:
    owners = await aside(lambda: _owners(reach.loop.store, found), len(found))
    await reach.loop.settled()
    return seen_events(reach, found, owners)


def _owners(store: Store, found: Iterable[Recorded]) -> dict[str, str]:
    """The tenants of finished jobs, read in a thread."""
    owners: dict[str, str] = {}
    for recorded in found:
        event = recorded.event
        if isinstance(event, JobSubmitted):
            owners[event.job] = event.spec.tenant
        elif isinstance(event, JobEvent) and event.job not in owners:
            job = store.job(event.job)
            owners[event.job] = job.spec.tenant if job is not None else ""
    return owners
