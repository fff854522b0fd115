"""What events do to nodes; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.books.baseline import count, learn
from shoal.core.books.failures import refute
from shoal.core.state.apply_job import member_over
from shoal.core.state.apply_labels import node_labelled
from shoal.core.state.apply_queue import unclaim_on
from shoal.core.state.apply_room import (
    add_node,
    close,
    drop_node,
    file_again,
    open_up,
    replace_node,
    set_end,
    set_intent,
)
from shoal.core.state.state import Node, State
from shoal.model.events import (
    EventBase,
    FabricMeasured,
    NodeChecked,
    NodeEnding,
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLabelled,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.model.health import Standing
from shoal.model.job import MemberStatus
from shoal.model.node import NodeHealth, NodeIntent


def _node_joined(state: State, event: NodeJoined) -> None:
    node = state.nodes.get(event.node)
    if node is None:
        index = drop_node(state, event.instead) if event.instead else len(state.order)
        node = Node(spec=event.spec, index=index, incarnation=event.incarnation)
        add_node(state, node)
    elif event.incarnation != node.incarnation:
        replace_node(state, node, event.spec, event.incarnation)
    if node.intent is NodeIntent.REMOVED or node.leaving:
        set_intent(state, node, NodeIntent.OPEN)
        node.leaving, node.closed_from = False, None
    node.dead = False
    _set_health(state, node, NodeHealth.JOINING, event)


def _node_ready(state: State, event: NodeReady) -> None:
    _set_health(state, state.nodes[event.node], NodeHealth.READY, event)


def _node_silent(state: State, event: NodeSilent) -> None:
    _set_health(state, state.nodes[event.node], NodeHealth.SILENT, event)


def _node_lost(state: State, event: NodeLost) -> None:
    node = state.nodes[event.node]
    _set_health(state, node, NodeHealth.LOST, event)
    node.dead = event.dead
    if node.own_end is not None:
        set_end(state, node, None, node.set_end)  # its next life says when that ends
    state.heard.contacts.pop(node.id, None)
    unclaim_on(state, node.id)
    for ref, job in list(state.placed[node.id].items()):
        job.members[ref.member].status = MemberStatus.LOST
        member_over(state, job, ref.member, event.at_ms)


def _node_intended(state: State, event: NodeIntended) -> None:
    node = state.nodes[event.node]
    before = node.intent
    close(state, node)
    set_intent(state, node, event.intent)
    node.leaving = event.leaving
    node.closed_from = before if event.ending else None
    open_up(state, node)
    if event.intent is NodeIntent.REMOVED and node.end is not None:
        set_end(state, node, None, None)
    if event.intent is NodeIntent.DRAINING:
        for job in state.placed[node.id].values():
            state.agenda.attention[job.id] = None


def _node_ending(state: State, event: NodeEnding) -> None:
    node = state.nodes[event.node]
    own, wanted = (event.end, node.set_end) if event.own else (node.own_end, event.end)
    set_end(state, node, own, wanted)


def _node_checked(state: State, event: NodeChecked) -> None:
    if event.passed and not event.result.error:
        learn(state.fleet, event.node, state.nodes[event.node].spec.kind, event.result)
        refute(state.failures, event.node)
    count(state.fleet, event.node, event.result)


def _node_judged(state: State, event: NodeJudged) -> None:
    node = state.nodes[event.node]
    close(state, node)
    node.record = event.record
    open_up(state, node)
    if node.record.standing is Standing.OK:
        state.troubled.pop(node.id, None)
        return
    state.troubled[node.id] = None
    if node.record.standing is Standing.QUARANTINED:
        unclaim_on(state, node.id)
        for job in state.placed[node.id].values():
            state.agenda.attention[job.id] = None


def _fabric_measured(state: State, event: FabricMeasured) -> None:
    state.fabric = event.fabric
    file_again(state)


def _set_health(
    state: State,
    node: Node,
    health: NodeHealth,
    event: NodeJoined | NodeReady | NodeSilent | NodeLost,
) -> None:
    close(state, node)
    node.health = health
    node.since_ms = event.at_ms
    node.why = event.why
    open_up(state, node)


APPLY_NODE: dict[type[EventBase], Callable[[State, Any], None]] = {
    NodeJoined: _node_joined,
    NodeReady: _node_ready,
    NodeSilent: _node_silent,
    NodeLost: _node_lost,
    NodeIntended: _node_intended,
    NodeEnding: _node_ending,
    NodeLabelled: node_labelled,
    NodeChecked: _node_checked,
    NodeJudged: _node_judged,
    FabricMeasured: _fabric_measured,
}
