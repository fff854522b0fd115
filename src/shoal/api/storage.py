"""The API of storage checks: what nodes can write and read at a path or URL."""

from __future__ import annotations

from litestar import Controller

from shoal.api.handling import handles
from shoal.api.jobs import WaitS
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.cluster import NodeCalls
from shoal.core.state.heard import Storing
from shoal.core.state.state import State
from shoal.model.health import CheckResult
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


class StorageApi(Controller):
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
            what = "it was lost when the controller restarted, or another has begun since"
            raise Refusal(404, f"there is no storage check {check[:64]!r}: {what}", "check")
        return view


def _view(state: State, check: str) -> StorageView | None:
    known = state.heard.storing
    return None if known is None or known.id != check else storage_view(known)


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
