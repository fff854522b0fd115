"""`GET /v1/timeline`: which job held which GPUs from when to when, and why that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.api.handling import ROWS_AT_ONCE, aside, encoded, handles, respond
from shoal.api.http import Response, State
from shoal.api.jobs import NUMBER_MAX
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.views import STANDING_HIDDEN
from shoal.calls.page import PageCalls
from shoal.control.past.following import Bars
from shoal.control.past.store import ShownBar, ShownSpan, gpus_of
from shoal.model.durations import HOUR_MS
from shoal.model.health import Standing
from shoal.model.node import NodeIntent
from shoal.model.policy import Others
from shoal.model.reason import ANOTHER
from shoal.model.resources import plural

BARS = "bars"  # in the application's state
BARS_MAX = 20_000
RETRY_S = 2

Moment = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Name = Annotated[str, Meta(max_length=64)]


class TimelineNode(msgspec.Struct, frozen=True):
    id: str
    gpus: int
    place: str


class BarRow(msgspec.Struct, frozen=True, array_like=True):
    """`node` is an index into the nodes. Without a `job` it is another tenant's, or `why` says how
    many short ones it stands for. `milli`: the share of each GPU."""

    node: int
    gpus: tuple[int, ...]
    job: str
    attempt: int
    member: int
    begin_ms: int
    end_ms: int | None
    cause: str
    why: str
    name: str
    tenant: str
    milli: int


class StateRow(msgspec.Struct, frozen=True, array_like=True):
    """A node was not ready, but in this state."""

    node: int
    state: str
    begin_ms: int
    end_ms: int | None
    why: str


class TimelineView(msgspec.Struct, kw_only=True):
    """`known_ms`: after this time only what already was is known yet. `oldest_ms`: bars that ended
    before this time are no longer known. `left_out`: bars beyond the limit, the shortest."""

    from_ms: int
    to_ms: int
    oldest_ms: int
    known_ms: int
    now_ms: int
    nodes: list[TimelineNode]
    bars: list[BarRow]
    states: list[StateRow]
    left_out: int


class Timeline:
    @handles(PageCalls.timeline)
    async def timeline(
        self,
        reach: Reach,
        state: State,
        from_ms: Moment = 0,
        to_ms: Moment = 0,
        node: Name = "",
        job: Name = "",
        least_ms: Moment = 0,
    ) -> Response[TimelineView]:
        bars: Bars | None = state.get(BARS)
        if bars is None:
            raise Refusal(503, "this head keeps no time line: it does not lead", retry_s=RETRY_S)
        now_ms = reach.loop.clock.now_ms()
        to_ms = to_ms or now_ms
        from_ms = from_ms or max(0, to_ms - HOUR_MS)
        if from_ms >= to_ms:
            raise Refusal(422, "is not before to_ms", "from_ms")
        if job:
            reach.job(job)
        if node and node not in reach.loop.state.nodes:
            raise Refusal(404, f"there is no node {node[:64]!r}; see: shoal nodes", "node")
        found, spans, place = await bars.shown(from_ms, to_ms, node, job)
        shown, left_out = await aside(lambda: fewer(found, least_ms, now_ms), len(found))
        await reach.loop.settled()
        nodes = _nodes(reach, node, {bar.node for bar in shown} | {one.node for one in spans})
        view = TimelineView(
            from_ms=from_ms,
            to_ms=to_ms,
            oldest_ms=place.oldest_ms,
            known_ms=place.known_ms,
            now_ms=now_ms,
            nodes=nodes,
            bars=await _seen(reach, shown, nodes),
            states=_states(reach, spans[-BARS_MAX:], nodes),
            left_out=left_out,
        )
        return respond(await aside(lambda: encoded(view), len(shown)))


# -- what is shown ----------------------------------------------------------------------------


class _Run:
    """Short bars on the same GPUs, one after the other."""

    def __init__(self, bar: ShownBar, end_ms: int) -> None:
        self.first = bar
        self.end_ms = end_ms
        self.jobs = {bar.job}

    def takes(self, bar: ShownBar, end_ms: int, least_ms: int) -> bool:
        if bar.begin_ms - self.end_ms >= least_ms:
            return False
        if bar.tenant != self.first.tenant:
            self.first = self.first._replace(tenant="")
        self.jobs.add(bar.job)
        self.end_ms = max(self.end_ms, end_ms)
        return True

    @property
    def bar(self) -> ShownBar:
        first = self.first
        if len(self.jobs) == 1 and self.end_ms == first.end_ms:
            return first
        return first._replace(
            job="",
            attempt=0,
            member=0,
            end_ms=self.end_ms,
            cause="",
            why=plural(len(self.jobs), "job"),
            name="",
        )


def fewer(bars: Iterable[ShownBar], least_ms: int, now_ms: int) -> tuple[list[ShownBar], int]:
    """Short neighbors merged, and no more than the limit: the longest, and how many are left out.
    `bars` are in the order of their beginnings."""
    shown: list[ShownBar] = []
    runs: dict[tuple[str, str], _Run] = {}
    for bar in bars:
        if bar.end_ms is None or bar.end_ms - bar.begin_ms >= least_ms:
            shown.append(bar)
            continue
        run = runs.get((bar.node, bar.gpus))
        if run is None or not run.takes(bar, bar.end_ms, least_ms):
            if run is not None:
                shown.append(run.bar)
            runs[bar.node, bar.gpus] = _Run(bar, bar.end_ms)
    shown += [run.bar for run in runs.values()]
    if len(shown) <= BARS_MAX:
        return shown, 0

    def length_ms(bar: ShownBar) -> int:
        return (now_ms if bar.end_ms is None else bar.end_ms) - bar.begin_ms

    return nlargest(BARS_MAX, shown, key=length_ms), len(shown) - BARS_MAX


def _nodes(reach: Reach, wanted: str, named: set[str]) -> list[TimelineNode]:
    """Those of the cluster, and those that were in the range and have been removed."""
    return [
        TimelineNode(node.id, node.spec.gpus, node.spec.place)
        for node in reach.loop.state.order
        if (not wanted or node.id == wanted)
        and (node.intent is not NodeIntent.REMOVED or node.id in named)
    ]


async def _seen(
    reach: Reach, bars: Sequence[ShownBar], nodes: Sequence[TimelineNode]
) -> list[BarRow]:
    """Others' jobs have no name here, as on the map; reasons are without their jobs."""
    index = {node.id: number for number, node in enumerate(nodes)}
    gpus: dict[str, tuple[int, ...]] = {}
    texts: dict[str, str] = {}
    others = reach.loop.policy.others is Others.TENANTS
    rows = []
    for number, bar in enumerate(bars):
        if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
            await reach.loop.settled()
        if bar.gpus not in gpus:
            gpus[bar.gpus] = gpus_of(bar.gpus)
        shown = (
            _own(reach, bar, texts)
            if reach.who.sees_job(bar.tenant, bar.job)
            else _anothers(bar, others)
        )
        if bar.node in index:
            rows.append(BarRow(index[bar.node], gpus[bar.gpus], *shown[2:]))
    return rows


def _own(reach: Reach, bar: ShownBar, texts: dict[str, str]) -> ShownBar:
    if bar.why not in texts:
        texts[bar.why] = reach.text(bar.why)
    return bar._replace(why=texts[bar.why])


def _anothers(bar: ShownBar, others: bool) -> ShownBar:
    """As on the map: without an id, at most with the tenant as @TENANT."""
    if not bar.job:
        return bar._replace(tenant="")
    tenant = bar.tenant if others else ""
    named = f"@{tenant}" if tenant else ""
    return bar._replace(
        job=named, attempt=0, member=0, cause="", why=ANOTHER, name="", tenant=tenant
    )


def _states(
    reach: Reach, spans: Sequence[ShownSpan], nodes: Sequence[TimelineNode]
) -> list[StateRow]:
    index = {node.id: number for number, node in enumerate(nodes)}
    rows = []
    for span in spans:
        hidden = span.state == Standing.QUARANTINED and not reach.who.sees_all
        why = STANDING_HIDDEN if hidden else reach.text(span.why)
        if span.node in index:
            rows.append(StateRow(index[span.node], *span[1:4], why))
    return rows
