"""Nodes that are gone for good make room for new ones, so that the state does not grow with every
machine that ever joined."""

from __future__ import annotations

from shoal.core.state.state import Node, State
from shoal.model.durations import DAY_MS
from shoal.model.health import Standing
from shoal.model.node import NodeIntent

FORGOTTEN_MS = 30 * DAY_MS  # a node that is lost for so long may be forgotten ...
GONE_MAX = 1_000  # ... and if there are more of them than this, sooner


def long_gone(state: State, now_ms: int) -> str:
    """The node whose place a new one may take: the one that is gone for longest; empty: none."""
    lost = (state.order[index] for index in state.lost)
    gone = sorted((node.since_ms, node.index) for node in lost if _gone(state, node))
    if not gone or (now_ms - gone[0][0] < FORGOTTEN_MS and len(gone) <= GONE_MAX):
        return ""
    named = _named(state)
    nodes = (state.order[index].id for _, index in gone)
    return next((node for node in nodes if node not in named), "")


def _gone(state: State, node: Node) -> bool:
    """Nobody means to have it again: what an operator has set, or found out, about a node stays
    until the node is removed, and so does a node of this machine."""
    if state.placed[node.id] or node.spec.order in state.orders:
        return False
    usual = node.intent is NodeIntent.OPEN and node.record.standing is Standing.OK
    own = not node.spec.origin or node.labels_set or node.taints_set
    return node.intent is NodeIntent.REMOVED or (usual and not own)


def _named(state: State) -> set[str]:
    """Nodes that live jobs remember, or that room is reserved on."""
    named = {
        node
        for job in state.jobs.values()
        for node in (*(member.slice.node for member in job.members), *job.missing_on)
    }
    for slices in state.claims.values():
        named.update(slice_.node for slice_ in slices)
    for reservation in state.reservations.values():
        named.update(state.order[index].id for index in reservation.nodes)
    for failures in state.failures.jobs.values():
        named.update(failure.node for failure in failures)
    return named
