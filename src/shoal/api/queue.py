"""`GET /v1/queue`: waiting jobs in the scheduler's order, why they wait and what would help."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from time import monotonic
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.reach import Reach
from shoal.api.views import job_row, seen_remedies
from shoal.calls.page import PageCalls
from shoal.control.loop import ControlLoop
from shoal.core.answers.advice import advise
from shoal.core.answers.outlook import outlook
from shoal.core.answers.waits import groups_of
from shoal.core.features.caps import caps_of
from shoal.core.scheduling.order import place_in_line
from shoal.model.job import Job, Phase
from shoal.model.reason import render
from shoal.model.views import JobRow, Remedy

ROWS_MAX = 500
FORESEEN_MAX = 50  # predictions further back say little and cost as much
# With thousands of nodes one prediction takes a tenth of a second, and the loop waits for it.
LOOK_S = 0.02  # a request predicts for this long, but at least one job
PAUSE_FACTOR = 20  # ... then no request does for this many times as long
FRESH_S = 5.0
GROUPS_S = 1.0
GROUPS_MAX = 100
TENANTS_KNOWN_MAX = 100
KNOWN_MAX = 1_000  # predictions kept: several tenants may ask in turn


class Outlook(NamedTuple):
    """When a job will probably start and what would help it, predicted at `seen_s`."""

    seen_s: float
    early_ms: int | None
    late_ms: int | None
    start: str  # the same in words; empty: `why` says it all
    remedies: list[Remedy]


class Foresight:
    """Cached outlooks of the first in line, so that all requests together take at most a twentieth
    of the controller's time."""

    def __init__(self) -> None:
        self._known: dict[str, Outlook] = {}
        self._next_s = 0.0
        self._groups: dict[str, tuple[float, list[GroupView]]] = {}

    @property
    def known(self) -> dict[str, Outlook]:
        return self._known

    def groups(self, loop: ControlLoop, tenant: str) -> list[GroupView]:
        """What the jobs wait for, of one tenant or of all, as it was a moment ago."""
        began = monotonic()
        until_s, found = self._groups.get(tenant, (0.0, []))
        if began < until_s:
            return found
        told = groups_of(loop.state, loop.policy, loop.clock.now_ms(), tenant)
        found = [
            GroupView(
                key=_key(one.what),
                what=one.what,
                kind=one.kind,
                detail=one.detail,
                count=one.count,
                like=one.like,
            )
            for one in told[:GROUPS_MAX]
        ]
        if len(self._groups) >= TENANTS_KNOWN_MAX:
            self._groups.clear()
        until_s = began + max(GROUPS_S, PAUSE_FACTOR * (monotonic() - began))
        self._groups[tenant] = (until_s, found)
        return found

    def of(self, loop: ControlLoop, jobs: list[Job]) -> dict[str, Outlook]:
        """The outlooks known so far, the front of the line first."""
        if len(self._known) > KNOWN_MAX:
            self._known = {job.id: self._known[job.id] for job in jobs if job.id in self._known}
        began = monotonic()
        if began < self._next_s:
            return self._known
        for job in jobs:
            known = self._known.get(job.id)
            if known is not None and began - known.seen_s < FRESH_S:
                continue
            self._known[job.id] = _outlook(loop, job, began)
            if monotonic() - began > LOOK_S:
                break
        self._next_s = began + PAUSE_FACTOR * (monotonic() - began)
        return self._known


def _outlook(loop: ControlLoop, job: Job, seen_s: float) -> Outlook:
    now_ms = loop.clock.now_ms()
    told = outlook(loop.state, job, loop.policy, now_ms)
    remedies = advise(loop.state, job, now_ms)
    return Outlook(seen_s, told.early_ms, told.late_ms, told.start, remedies)


class QueueRow(JobRow, frozen=True, kw_only=True):
    since_ms: int  # it has waited since then; earlier attempts do not count
    position: int  # among all waiting jobs; beyond the first 500, at least that; 0: not known
    early_ms: int | None  # it will probably start between these two times
    late_ms: int | None
    start: str  # the same in words; empty: `why` says it all
    help: list[str]  # what would let it start sooner
    remedies: list[Remedy]  # the same, as what can be done
    foreseen: bool  # False: not predicted yet, so the fields above are empty


class GroupView(msgspec.Struct, kw_only=True):
    """Jobs that wait for the same: "412 jobs wait" and `what`."""

    key: str  # for `group`
    what: str
    kind: str  # what they wait for in a word, such as room, turn or budget; empty: other reasons
    detail: str  # for whom or for what; may be empty
    count: int
    like: bool  # counted by the reason of one job like them; not looked at one by one


class QueueView(msgspec.Struct, kw_only=True):
    waiting: int  # as many as the sender may see
    now_ms: int
    policy: str
    caps: list[str]  # tenants that may have only so many jobs, the fullest first
    groups: list[GroupView]
    rows: list[QueueRow]


class Waiting:
    @handles(PageCalls.queue)
    def listing(
        self,
        reach: Reach,
        foresight: Foresight,
        limit: Annotated[int, Meta(ge=1, le=ROWS_MAX)] = 100,
        group: Annotated[str, Meta(max_length=16)] = "",
    ) -> QueueView:
        loop, who = reach.loop, reach.who
        front = _of_group(reach, group, limit) if group else own_in_line(reach, limit)
        near = [job for position, job in front if 0 < position <= FORESEEN_MAX or not group]
        outlooks = foresight.of(loop, near[:FORESEEN_MAX])
        groups = foresight.groups(loop, "" if who.sees_all else who.tenant)
        counted = sum(one.count for one in groups)  # a moment ago, so there may be more by now
        return QueueView(
            waiting=loop.state.queue.size if who.sees_all else max(counted, len(front)),
            now_ms=loop.clock.now_ms(),
            policy=loop.policy.name,
            caps=caps_of(loop.state, who.sees),
            groups=[
                msgspec.structs.replace(
                    one, what=reach.text(one.what), detail=reach.text(one.detail)
                )
                for one in groups
            ],
            rows=[queue_row(reach, job, position, outlooks.get(job.id)) for position, job in front],
        )


def jobs_of_group(reach: Reach, key: str) -> Iterator[Job]:
    """To be read before the next step."""
    loop = reach.loop
    own = "" if reach.who.sees_all else reach.who.tenant
    for group in groups_of(loop.state, loop.policy, loop.clock.now_ms(), own):
        if _key(group.what) == key:
            return map(loop.state.job_numbered, chain(*group.lines))
    return iter(())


def _of_group(reach: Reach, key: str, limit: int) -> list[tuple[int, Job]]:
    places = {job.id: position for position, job in own_in_line(reach, ROWS_MAX)}
    found = [(places.get(job.id, 0), job) for job in islice(jobs_of_group(reach, key), limit)]
    return sorted(found, key=lambda row: row[0] or ROWS_MAX + 1)


def position_of(reach: Reach, job: Job) -> int:
    """Its place among the first 500 in line; 0: it is further back, or not in line."""
    if job.phase is not Phase.WAITING or job.elements is not None:
        return 0
    line = enumerate(first_in_line(reach.loop, ROWS_MAX), 1)
    return next((position for position, one in line if one.id == job.id), 0)


def _key(what: str) -> str:
    """It says nothing: the words may name a job that the sender may not know."""
    return f"{zlib.crc32(render(what).encode()):08x}"


def own_in_line(reach: Reach, limit: int) -> list[tuple[int, Job]]:
    """The first of the waiting jobs that the sender may see, with their positions among all."""
    if reach.who.sees_all:
        return list(enumerate(first_in_line(reach.loop, limit), 1))
    front = list(enumerate(first_in_line(reach.loop, ROWS_MAX), 1))
    seen = [(position, job) for position, job in front if reach.sees(job)]
    known = {job.id for _, job in seen}
    later = first_in_line(reach.loop, limit, reach.who.tenant)
    behind = (job for job in later if job.id not in known)
    return [*seen, *enumerate(behind, len(front) + 1)][:limit]


def first_in_line(loop: ControlLoop, limit: int, tenant: str = "") -> list[Job]:
    """The jobs that the scheduler tries first, then those that may not start yet; `tenant`: its
    own only."""
    state, now_ms = loop.state, loop.clock.now_ms()
    # Each lane holds jobs that are alike, so its first `limit` are enough.
    lanes = state.queue.lanes.items()
    numbers = [
        number for lane, line in lanes if tenant in ("", lane.tenant) for _, number in line[:limit]
    ]
    delayed = state.queue.delayed
    most = len(delayed) if tenant else limit
    numbers += [number for _, number in heapq.nsmallest(most, delayed)]
    claimed = [state.jobs[job_id] for job_id in state.claims]
    jobs = [*claimed, *(state.job_numbered(number) for number in numbers)]
    if tenant:
        jobs = [job for job in jobs if job.spec.tenant == tenant]

    def place(job: Job) -> Any:
        return job.not_before_ms > now_ms, place_in_line(state, job, now_ms)

    return heapq.nsmallest(limit, jobs, key=place)


def queue_row(reach: Reach, job: Job, position: int, seen: Outlook | None) -> QueueRow:
    remedies = seen_remedies(reach, seen.remedies) if seen else []
    return QueueRow(
        **msgspec.structs.asdict(job_row(reach, job)),
        since_ms=max(job.submitted_ms, job.requeued_ms),
        position=position,
        early_ms=seen.early_ms if seen else None,
        late_ms=seen.late_ms if seen else None,
        start=seen.start if seen else "",
        help=[one.text for one in remedies],
        remedies=remedies,
        foreseen=seen is not None,
    )
