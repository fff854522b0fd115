"""The API of what nodes measure: the network between them, and their storage."""

from __future__ import annotations

from statistics import median

import msgspec

from shoal.api.handling import handles
from shoal.api.jobs import WaitS
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.cluster import NodeCalls
from shoal.control.history.history import History
from shoal.core.features.fabric.halves import halves, halves_text
from shoal.core.state.heard import Storing, Touring
from shoal.core.state.state import State
from shoal.model.amounts import listed, share_text
from shoal.model.fabric import Fabric, FabricView, LinkView, NetworkRequest, Weak, rate_text
from shoal.model.health import CheckResult
from shoal.model.report import CheckNetwork
from shoal.model.resources import plural
from shoal.model.storage import (
    LATE_MS,
    READ_MBS,
    SMALL_PER_S,
    WRITE_MBS,
    CheckStorage,
    Rates,
    StorageRequest,
    StorageView,
)

EVEN = 0.25  # links that differ by more are shown as a range


class FabricApi:
    @handles(NodeCalls.fabric)
    async def last(self, reach: Reach, history: History) -> FabricView:
        state, kept = reach.loop.state, history.measured.last
        tours = list(state.heard.tours.values())
        view = FabricView(id="")
        asked = [
            tour for tour in tours if tour.ended_ms is not None and not tour.about and not tour.cuts
        ]
        shown = asked[-1] if asked else kept.tour if kept is not None else None
        if shown is not None:
            view = fabric_view(shown, msgspec.structs.replace(state.fabric, id=shown.id))
        view.running = next((tour.id for tour in tours if tour.ended_ms is None), "")
        return view

    @handles(NodeCalls.check_network)
    async def check(self, reach: Reach, data: NetworkRequest) -> FabricView:
        request = CheckNetwork(tuple(data.nodes), data.collectives, reach.name, data.halves)
        answer = accepted(await reach.loop.request(request))
        view = _heard(reach.loop.state, answer.id) or FabricView(id=answer.id)
        view.notes += [answer.note] if answer.note else []
        return view

    @handles(NodeCalls.tour)
    async def tour(
        self, reach: Reach, history: History, tour: str, wait_s: WaitS = 0
    ) -> FabricView:
        loop = reach.loop
        deadline_ms = loop.clock.now_ms() + int(wait_s * 1000)
        while (view := _heard(loop.state, tour)) is not None and view.ended_ms is None:
            left_s = (deadline_ms - loop.clock.now_ms()) / 1000
            if left_s <= 0:
                break
            await reach.loop.changed("", left_s)
        if view is None and (kept := await history.tour(tour)) is not None:
            view = fabric_view(kept.tour, kept.fabric)
        if view is None:
            what = "it was lost when the controller restarted, or it is too long ago"
            raise Refusal(404, f"there is no tour {tour[:64]!r}: {what}", "tour")
        return view


def _heard(state: State, tour: str) -> FabricView | None:
    known = state.heard.tours.get(tour)
    return None if known is None else fabric_view(known, state.fabric)


def fabric_view(tour: Touring, fabric: Fabric) -> FabricView:
    """`fabric` counts only if it follows from this tour."""
    view = FabricView(
        id=tour.id,
        nodes=[host.node for host in tour.hosts],
        answered=len(tour.results),
        heard_from=list(tour.results),
        busy=[node for node, result in tour.results.items() if result.busy],
        begun_ms=tour.begun_ms,
        until_ms=tour.until_ms,
        ended_ms=tour.ended_ms,
        notes=[f"{node}: {text}" for node, result in tour.results.items() for text in result.notes],
        errors=[
            f"{node}: {text}"
            for node, result in tour.results.items()
            for text in (*result.faults, result.error, _too_old(result))
            if text
        ],
    )
    if tour.ended_ms is None:
        return view  # half a million links are not sent every two seconds
    if tour.cuts:
        view.halves = halves(tour.cuts, view.nodes, tour.results)
        view.verdict = "; ".join(map(halves_text, view.halves)) + "."
        return view
    view.links = _links(tour)
    view.collectives = [one for result in tour.results.values() for one in result.collectives]
    if fabric.id == tour.id:
        own = set(view.nodes)
        view.weak = list(fabric.weak)
        view.outliers = [weak_text(one) for one in fabric.weak]
        view.places = {node: place for node, place in fabric.places.items() if node in own}
        view.usual_mbs, view.usual_latency_us = fabric.usual_mbs, fabric.usual_latency_us
    _fill_usual(view)
    view.verdict = verdict(view)
    return view


def _too_old(result: CheckResult) -> str:
    """An agent of an earlier version measures the node itself."""
    if result.figures and not result.pairs:
        return "its agent is too old to measure the network; see: shoal upgrade"
    return ""


def _fill_usual(view: FabricView) -> None:
    """With few links nothing is judged, but people want to see a figure."""
    working = [link for link in view.links if not link.fault]
    if working and not view.usual_mbs:
        view.usual_mbs = int(median(min(link.mbs, link.back_mbs) for link in working))
        view.usual_latency_us = int(median(link.latency_us for link in working))


def verdict(view: FabricView) -> str:
    """How even the links are, and which are weak, in one sentence."""
    rates = [min(link.mbs, link.back_mbs) for link in view.links if not link.fault]
    silent = len(view.nodes) - len(view.heard_from)
    missing = f"{plural(silent, 'node')} did not answer" if silent else ""
    if not view.links:
        return f"No links were measured{f': {missing}' if missing else ''}."
    links = plural(len(view.links), "link")
    broken = [f"{link.a}-{link.b}" for link in view.links if link.fault]
    if view.weak:
        names = [f"{w.node}-{w.peer}" if w.peer else f"{w.node} (all its links)" for w in view.weak]
        slow = {w.node for w in view.weak if not w.peer}
        count = sum(bool(slow & {link.a, link.b}) for link in view.links)
        count += sum(bool(w.peer and not slow & {w.node, w.peer}) for w in view.weak)
        text = f"{count} of {links} {'is' if count == 1 else 'are'} weak: {listed(names)}"
    elif broken:
        text = f"{len(broken)} of {links} failed: {listed(broken)}"
    else:
        off = max(abs(rate - view.usual_mbs) for rate in rates) / max(1, view.usual_mbs)
        range_ = (
            f"within {share_text(off)} of the median, {rate_text(view.usual_mbs)}"
            if off <= EVEN
            else f"{rate_text(min(rates))} to {rate_text(max(rates))}"
        )
        text = f"{links} measured, none of them weak: {range_}"
    return f"{text}; {missing}." if missing else f"{text}."


def weak_text(weak: Weak) -> str:
    """One sentence about a weak link, or about a node all of whose links are."""
    usual = f"{rate_text(weak.usual_mbs)} is usual"
    if weak.peer:
        if weak.why and not weak.mbs:
            return f"{weak.node} - {weak.peer}: no connection ({weak.why})"
        return f"{weak.node} - {weak.peer}: {rate_text(weak.mbs)}, where {usual}"
    why = weak.why or "its links are weak"
    return f"{weak.node}: {why}; they carry {rate_text(weak.mbs)}, where {usual}"


def _links(tour: Touring) -> list[LinkView]:
    return [
        LinkView(node, pair.peer, pair.latency_us, pair.mbs, pair.back_mbs, pair.fault)
        for node, result in tour.results.items()
        for pair in result.pairs
    ]


# The API of storage checks: what nodes can write and read at a path or URL.


LAST = "last"  # whatever its id is; without an id: there was none


class StorageApi:
    """Only admins: probes run as the agents' users, and write wherever those may."""

    @handles(NodeCalls.check_storage)
    async def check(self, reach: Reach, data: StorageRequest) -> StorageView:
        request = CheckStorage(data.target, tuple(data.nodes), data.phase_ms, reach.name)
        answer = accepted(await reach.loop.request(request))
        view = _view(reach.loop.state, answer.id) or StorageView(id=answer.id)
        view.notes += [answer.note] if answer.note else []
        return view

    @handles(NodeCalls.storage_check)
    async def result(self, reach: Reach, check: str, wait_s: WaitS = 0) -> StorageView:
        loop = reach.loop
        deadline_ms = loop.clock.now_ms() + int(wait_s * 1000)
        while (view := _view(loop.state, check)) is not None and view.ended_ms is None:
            left_s = (deadline_ms - loop.clock.now_ms()) / 1000
            if left_s <= 0:
                break
            await reach.loop.changed("", left_s)
        if view is None:
            if check == LAST:
                return StorageView(id="")
            what = "it was lost when the controller restarted, or another has begun since"
            raise Refusal(404, f"there is no storage check {check[:64]!r}: {what}", "check")
        return view


def _view(state: State, check: str) -> StorageView | None:
    known = state.heard.storing
    return None if known is None or check not in (known.id, LAST) else storage_view(known)


def storage_view(known: Storing) -> StorageView:
    over = known.ended_ms is not None
    done = known.alone[: known.turn]
    view = StorageView(
        id=known.id,
        target=known.target,
        nodes=list(known.nodes),
        begun_ms=known.begun_ms,
        until_ms=known.turn_until_ms,
        ended_ms=known.ended_ms,
        alone=[_rates(name, known.own.get(name)) for name in done],
        together=[_rates(name, known.results.get(name)) for name in known.nodes] if over else [],
    )
    if not over:
        view.doing = (
            f"{known.alone[known.turn]} measures alone ({known.turn + 1} of {len(known.alone)})"
            if known.turn < len(known.alone)
            else f"{plural(len(known.nodes), 'node')} measure at the same time"
            if len(known.nodes) > 1
            else f"{known.nodes[0]} measures"
        )
    if len(known.alone) < len(known.nodes) > 1:
        view.notes.append(f"{len(known.alone)} of {len(known.nodes)} nodes measured alone, too")
    return view


def _rates(node: str, result: CheckResult | None) -> Rates:
    if result is None:
        return Rates(node=node, problem="it did not answer; see: shoal nodes")
    problem = result.error or "; ".join(result.faults)
    if not problem and WRITE_MBS not in result.figures:
        problem = "its agent is too old to measure storage; see: shoal upgrade"
    late_ms = result.figures.get(LATE_MS, 0)
    late = (f"it began {late_ms} ms after the others; is its clock right?",) if late_ms else ()
    return Rates(
        node=node,
        write_mbs=result.figures.get(WRITE_MBS, 0),
        read_mbs=result.figures.get(READ_MBS, 0),
        small_per_s=result.figures.get(SMALL_PER_S, 0),
        busy=result.busy,
        notes=(*result.notes, *late),
        problem=problem,
    )
