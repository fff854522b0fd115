"""Nodes that ask to leave, or whose order is over: drained, then removed, then dismissed."""

from __future__ import annotations

from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Command, Dismiss
from shoal.model.events import NodeIntended
from shoal.model.node import NodeIntent
from shoal.model.report import NodeReport


def note_leaving(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Note what the node asks for. It is removed when nothing runs there and all exits are in."""
    if inventory.leaving and not node.leaving:
        _intend(round_, node, NodeIntent.DRAINING, "it wants to leave the cluster")
    elif not inventory.leaving and node.leaving:
        _intend(round_, node, NodeIntent.OPEN, "it no longer wants to leave")
    empty = not (inventory.alive or inventory.exits or round_.state.placed[node.id])
    if inventory.leaving and empty and node.intent is NodeIntent.DRAINING:
        _intend(round_, node, NodeIntent.REMOVED, "it has left the cluster")


def note_left(round_: Round, node: Node, *, ended: bool = False) -> None:
    """A node that wanted to leave and is gone has left, even if jobs still ran on it. So has one
    that ended when it said it would."""
    if ended:
        _intend(round_, node, NodeIntent.REMOVED, "it has ended, as it said it would")
    elif node.leaving and node.intent is not NodeIntent.REMOVED:
        _intend(round_, node, NodeIntent.REMOVED, "it has left the cluster while jobs ran on it")


def dismissals(state: State, inventories: list[NodeReport]) -> list[Command]:
    """Sent after each report until the node is gone."""
    found: list[Command] = []
    for inventory in inventories:
        node = state.nodes[inventory.spec.id]
        if node.intent is NodeIntent.REMOVED and (inventory.leaving or is_stray(state, node)):
            found.append(Dismiss(node=node.id, incarnation=inventory.incarnation))
    return found


def is_stray(state: State, node: Node) -> bool:
    """Was it brought by an order that is over? Its supplier knows of nothing to end there."""
    return bool(node.spec.order) and node.spec.order not in state.orders


def _intend(round_: Round, node: Node, intent: NodeIntent, why: str) -> None:
    leaving = intent is not NodeIntent.OPEN
    round_.emit(
        NodeIntended(at_ms=round_.now_ms, node=node.id, intent=intent, leaving=leaving, why=why)
    )
