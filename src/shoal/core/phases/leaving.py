"""Nodes that want to leave: emptied like drained ones, then removed and let go."""

from __future__ import annotations

from shoal.core.phases.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Command, Dismiss
from shoal.model.events import NodeIntended
from shoal.model.node import NodeIntent
from shoal.model.report import NodeReport


def note_leaving(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Take in what the node wants. It is removed when nothing runs there and no exit is untold."""
    if inventory.leaving and not node.leaving:
        _intend(round_, node, NodeIntent.DRAINING, "it wants to leave the cluster")
    elif not inventory.leaving and node.leaving:
        _intend(round_, node, NodeIntent.OPEN, "it stays after all")
    empty = not (inventory.alive or inventory.exits or round_.state.placed[node.id])
    if inventory.leaving and empty and node.intent is NodeIntent.DRAINING:
        _intend(round_, node, NodeIntent.REMOVED, "it has left the cluster")


def note_left(round_: Round, node: Node) -> None:
    """Who wanted to leave and is gone did leave, in however much of a hurry."""
    if node.leaving and node.intent is not NodeIntent.REMOVED:
        _intend(round_, node, NodeIntent.REMOVED, "it has left the cluster, with jobs on it")


def dismissals(state: State, inventories: list[NodeReport]) -> list[Command]:
    """Told with each report until it is gone."""
    return [
        Dismiss(node=inventory.spec.id, incarnation=inventory.incarnation)
        for inventory in inventories
        if inventory.leaving and state.nodes[inventory.spec.id].intent is NodeIntent.REMOVED
    ]


def _intend(round_: Round, node: Node, intent: NodeIntent, why: str) -> None:
    leaving = intent is not NodeIntent.OPEN
    round_.emit(
        NodeIntended(at_ms=round_.now_ms, node=node.id, intent=intent, leaving=leaving, why=why)
    )
