"""Storage checks: nodes write and read at one place, some of them alone, then all together."""

from __future__ import annotations

from shoal.core.features.fabric.tours import ready_nodes, running_tour
from shoal.core.state.heard import Storing
from shoal.core.state.round import Round
from shoal.core.state.state import Node
from shoal.model.commands import Check
from shoal.model.fabric import TOUR_NODES_MAX
from shoal.model.health import CheckResult
from shoal.model.node import NodeHealth
from shoal.model.report import Accepted, Answer, NodeReport, Refused
from shoal.model.resources import plural
from shoal.model.storage import PAUSE_MS, PHASES, CheckStorage, Storage, target_problem

ALONE_MAX = 8  # nodes that measure alone, one after the other; more would take minutes
LEAD_MS = 4_000  # until all nodes have heard that they measure together, and have begun
START_MS = 20_000  # a slow machine needs this long to start a probe and to end one
ANSWER_MS = 10_000  # after a probe must have ended


def begin_storage(round_: Round, request: CheckStorage) -> Answer:
    heard = round_.state.heard
    if problem := target_problem(request.target):
        return Refused("target", problem)
    running = running_storage(round_)
    if running is not None and running.target != request.target:
        return Refused("target", f"{running.target} is being measured; try again in a minute")
    if running_tour(round_) is not None:
        return Refused("target", "a tour of the network is under way; try again when it has ended")
    nodes = _nodes(round_, request)
    if isinstance(nodes, Refused):
        return nodes
    names = tuple(node.id for node in nodes)
    if running is not None and set(running.nodes) == set(names):
        return Accepted(running.id, "this storage was being measured already")
    if running is not None:
        others = plural(len(running.nodes), "node")
        return Refused(
            "nodes", f"{running.target} is being measured from {others}; try again in a minute"
        )
    spread = names[:: -(-len(names) // ALONE_MAX)] if len(names) > 1 else ()
    storing = Storing(
        id=f"s{round_.now_ms}",
        target=request.target,
        nodes=names,
        alone=spread,
        begun_ms=round_.now_ms,
        phase_ms=request.phase_ms,
    )
    heard.storing = storing
    _begin_turn(round_, storing)
    return Accepted(storing.id)


def _nodes(round_: Round, request: CheckStorage) -> list[Node] | Refused:
    found = ready_nodes(round_.state, request.nodes)
    if isinstance(found, Refused):
        return found
    if not found:
        return Refused("nodes", "no node is ready")
    if len(found) > TOUR_NODES_MAX:
        return Refused("nodes", f"{len(found)} nodes are too many; name {TOUR_NODES_MAX} at most")
    return found


def running_storage(round_: Round) -> Storing | None:
    storing = round_.state.heard.storing
    return storing if storing is not None and storing.ended_ms is None else None


def end_storage(round_: Round, inventories: list[NodeReport]) -> None:
    """Take in what nodes measured, and go on with the next node, or with all together."""
    storing = running_storage(round_)
    if storing is None:
        return
    wanted, found = _asked(storing), _results(storing)
    for inventory in inventories:
        for result in inventory.checks:
            if result.id == _check_id(storing) and inventory.spec.id in wanted:
                found[inventory.spec.id] = result
    waits = [
        name
        for name in wanted
        if name not in found and round_.state.nodes[name].health is not NodeHealth.LOST
    ]
    if waits and round_.now_ms < storing.turn_until_ms:
        return
    storing.turn += 1
    if storing.turn > len(storing.alone):
        storing.ended_ms = round_.now_ms
        round_.state.agenda.look_again(round_.now_ms)
    else:
        _begin_turn(round_, storing)


def _begin_turn(round_: Round, storing: Storing) -> None:
    probe_ms = PHASES * (storing.phase_ms + PAUSE_MS) + START_MS
    together = storing.turn == len(storing.alone) and len(storing.nodes) > 1
    storing.at_ms = round_.now_ms + LEAD_MS if together else 0
    storing.turn_begun_ms = round_.now_ms
    storing.limit_ms = probe_ms + (LEAD_MS if together else 0)
    storing.turn_until_ms = round_.now_ms + storing.limit_ms + ANSWER_MS
    round_.look_again(storing.turn_until_ms)


def _asked(storing: Storing) -> tuple[str, ...]:
    turn = storing.turn
    return storing.alone[turn : turn + 1] if turn < len(storing.alone) else storing.nodes


def _results(storing: Storing) -> dict[str, CheckResult]:
    return storing.own if storing.turn < len(storing.alone) else storing.results


def _check_id(storing: Storing) -> str:
    return f"{storing.id}.{storing.turn}"


def storage_wanted(round_: Round, inventories: list[NodeReport]) -> list[Check]:
    """At once when a turn begins, and again after every report of a node that has not answered."""
    storing = running_storage(round_)
    if storing is None:
        return []
    begins = storing.turn_begun_ms == round_.now_ms
    reported = {one.spec.id for one in inventories}
    asked, answered = _asked(storing), _results(storing)
    wanted: list[Check] = []
    for name in asked:
        node = round_.state.nodes[name]
        if name in answered or node.health is NodeHealth.LOST or not (begins or name in reported):
            continue
        what = Storage(
            target=storing.target,
            nodes=len(asked),
            at_ms=storing.at_ms,
            phase_ms=storing.phase_ms,
            limit_ms=storing.limit_ms,
        )
        wanted.append(
            Check(node=name, incarnation=node.incarnation, id=_check_id(storing), storage=what)
        )
    return wanted
