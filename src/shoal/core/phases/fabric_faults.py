"""Nodes whose links are weak: suspected, checked by small tours, quarantined, and back."""

from __future__ import annotations

from shoal.core.books import quarantine
from shoal.core.books.quarantine import rule_of
from shoal.core.fabric.judging import Judged, shared
from shoal.core.fabric.links import Table
from shoal.core.phases.watch import judge_node, room_left, suspect
from shoal.core.state.heard import Touring
from shoal.core.state.round import Round
from shoal.core.state.state import Node
from shoal.model.health import Standing, Suspicion
from shoal.model.node import NodeHealth, NodeIntent

PEERS_MAX = 3


def next_check(round_: Round) -> list[Node]:
    """The node whose links have waited longest for a check, and peers for it; empty if none is
    due. Without any peer nothing can be said against a node."""
    state, rule = round_.state, rule_of(round_.policy)
    due = [
        node
        for name in state.troubled
        if (node := state.nodes[name]).record.network
        and quarantine.wants_check(node.record)
        and node.health is NodeHealth.READY
        and node.intent is not NodeIntent.REMOVED
    ]
    for node in sorted(due, key=lambda node: (node.record.check_since_ms, node.index)):
        if peers := _peers(round_, node):
            return [node, *peers]
        why = "there is no other node to measure with"
        record = quarantine.checked(node.record, True, why, round_.now_ms, rule, room=True)
        judge_node(round_, node, record)
    return []


def _peers(round_: Round, node: Node) -> list[Node]:
    """Nodes that are well, the nearest first. The last is from another group, and each retest takes
    another: the node may have got its place while its links were ill."""
    state = round_.state
    fabric = state.fabric
    ill = {weak.node for weak in fabric.weak if not weak.peer}
    own = fabric.places.get(node.id, "")
    well = [
        other
        for other in state.order
        if other is not node
        and other.health is NodeHealth.READY
        and other.record.standing is Standing.OK
        and other.id not in ill
    ]
    well.sort(key=lambda other: (-shared(own, fabric.places.get(other.id, "")), other.index))
    near = well[: PEERS_MAX - 1]
    rest = [other for other in well if other not in near]
    far = [other for other in rest if fabric.places.get(other.id, "") != own] or rest[:1]
    return [*near, far[node.record.strikes % len(far)]] if far else near


def judge_links(round_: Round, tour: Touring, table: Table, judged: Judged) -> None:
    """What a tour says about nodes: for those that it finds weak, and for those that were."""
    rule, now_ms = rule_of(round_.policy), round_.now_ms
    weak = {one.node: one.why for one in judged.weak if not one.peer}
    if tour.about and len(tour.hosts) == 2:  # a node in quarantine stays while its link is ill
        weak |= dict.fromkeys([tour.about][: len(judged.weak)], "its link to the only peer is slow")
    for name in table.names:
        node = round_.state.nodes[name]
        record = node.record
        asked = record.network and quarantine.wants_check(record)
        well = name not in weak and any(table.rates[table.at[name]])
        if name in weak and asked:
            room = room_left(round_, rule)
            judged_ = quarantine.checked(record, False, weak[name], now_ms, rule, room=room)
            judge_node(round_, node, judged_)
        elif name in weak and record.standing is not Standing.QUARANTINED:
            suspect(round_, node, Suspicion(at_ms=now_ms, why=weak[name], network=True))
        elif well and record.network:
            why = "its links are as fast as those of others"
            judged_ = quarantine.checked(record, True, why, now_ms, rule, room=True)
            judge_node(round_, node, judged_)
        elif name == tour.about and asked:
            why = table.unmeasured.get(name, "none of its peers could be measured")
            judge_node(round_, node, quarantine.unanswered(record, now_ms, rule, why))
