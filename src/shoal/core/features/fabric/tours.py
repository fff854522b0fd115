"""Tours: nodes that measure the network between them, and what follows from it: nodes whose links
are weak are suspected, checked by small tours, quarantined, and come back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from shoal.core.books import quarantine
from shoal.core.books.quarantine import rule_of
from shoal.core.features.fabric.conclusion import conclude
from shoal.core.features.fabric.halves import HOSTS_MIN, cuts_of, slots_of
from shoal.core.features.fabric.judging import Judged, shared
from shoal.core.features.fabric.links import Table, table_of
from shoal.core.features.health import judge_node, room_left, suspect
from shoal.core.state.events.nodes import FabricMeasured
from shoal.core.state.heard import Touring
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Check
from shoal.model.fabric import SLOT_MS, TOUR_NODES_MAX, Cut, Fabric, Host, Tour
from shoal.model.health import Standing, Suspicion
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.report import Accepted, Answer, CheckNetwork, NodeReport, Refused
from shoal.model.resources import plural

PAIR_MS = 250
# A pair connects, measures the latency, and both directions; slow machines take longer.
ROUND_MS = 2 * PAIR_MS + 1_000
START_MS = 30_000  # until the last node has heard of the tour and has started its probe
COLLECTIVES_MS = 180_000  # torch is loaded, then every size of every collective
LEAD_MS = 6_000  # until halves begin: the last node has heard of it, and started its probe
ANSWER_MS = 10_000  # after the tour itself must have ended
PEERS_MAX = 3


def begin_tour(round_: Round, request: CheckNetwork) -> Answer:
    state = round_.state
    for tour in state.heard.tours.values():
        if tour.ended_ms is None and not tour.about:
            others = plural(len(tour.hosts), "node")
            return Accepted(
                tour.id, f"a tour of {others} was under way already; this is its result"
            )
    nodes = ready_nodes(state, request.nodes)
    if isinstance(nodes, Refused):
        return nodes
    if len(nodes) < 2:
        have = plural(len(nodes), "ready node")
        return Refused("nodes", f"a network is measured between two or more; here is {have}")
    if len(nodes) > TOUR_NODES_MAX:
        return Refused(
            "nodes", f"{len(nodes)} nodes are too many for one tour; name {TOUR_NODES_MAX} at most"
        )
    if not request.halves:
        return Accepted(start_tour(round_, nodes, collectives=request.collectives).id)
    if request.collectives:
        return Refused("halves", "cannot be combined with collectives")
    if len(nodes) < HOSTS_MIN:
        return Refused("nodes", f"halves are measured between {HOSTS_MIN} nodes or more")
    place = {node.id: next(reversed(state.rooms[node.index].domains), "") for node in nodes}
    in_order = sorted(nodes, key=lambda node: (place[node.id], node.index))
    cuts = cuts_of([place[node.id] for node in in_order])
    return Accepted(start_tour(round_, in_order, cuts=cuts).id)


def running_tour(round_: Round) -> Touring | None:
    for tour in round_.state.heard.tours.values():
        if tour.ended_ms is None:
            return tour
    return None


def start_tour(
    round_: Round,
    nodes: list[Node],
    *,
    collectives: bool = False,
    about: str = "",
    cuts: tuple[Cut, ...] = (),
) -> Touring:
    """It waits while the links of a node are checked. Of those that have ended, the last that a
    user asked for is remembered."""
    heard = round_.state.heard
    running = running_tour(round_)
    number = round_.now_ms
    while any(one.id[1:] == str(number) for one in heard.tours.values()):
        number += 1
    tour = Touring(
        id=f"{'r' if about else 't'}{number}",
        hosts=_hosts(round_, nodes),
        begun_ms=0,
        until_ms=0,
        collectives=collectives,
        about=about,
        cuts=cuts,
    )
    asked = [one for one in heard.tours.values() if one.ended_ms is not None and not one.about]
    open_ = [one for one in heard.tours.values() if one.ended_ms is None]
    heard.tours = {one.id: one for one in (*asked[-1:], *open_, tour)}
    if running is None:
        _begin(round_, tour)
    return tour


def _begin(round_: Round, tour: Touring) -> None:
    limit_ms = START_MS + len(tour.hosts) * ROUND_MS + COLLECTIVES_MS * tour.collectives
    if tour.cuts:
        limit_ms = LEAD_MS + len(slots_of(tour.cuts)) * SLOT_MS
    tour.begun_ms, tour.until_ms = round_.now_ms, round_.now_ms + limit_ms + ANSWER_MS
    # One of 128 random bits that nobody else knows: it does not follow from the facts.
    seed = round_.port_seed.to_bytes(16, "little")
    tour.key = hashlib.sha256(seed + tour.id.encode()).hexdigest()
    tour.incarnations = {
        host.node: round_.state.nodes[host.node].incarnation for host in tour.hosts
    }
    round_.look_again(tour.until_ms)


def _gone(tour: Touring, node: Node) -> bool:
    """A node that died in the middle and is back has missed its peers. It would report that it
    reached none of them, and its links would count as broken."""
    began_as = tour.incarnations.get(node.id, node.incarnation)
    return node.health is NodeHealth.LOST or node.incarnation != began_as


def _hosts(round_: Round, nodes: list[Node]) -> tuple[Host, ...]:
    """Ports from the policy's range that nobody knows beforehand."""
    policy = round_.policy
    first = round_.port_seed
    return tuple(
        Host(
            node.id,
            node.spec.address,
            policy.port_first + policy.port_count - 1 - (first + number) % policy.port_count,
        )
        for number, node in enumerate(nodes)
    )


def tours_wanted(round_: Round, inventories: list[NodeReport]) -> list[Check]:
    """At once for all nodes of a tour that begins, and again after every report of one that has
    not answered."""
    tour = running_tour(round_)
    if tour is None:
        return []
    begins = tour.begun_ms == round_.now_ms
    known = {one.spec.id: {result.id for result in one.checks} for one in inventories}
    wanted: list[Check] = []
    slots = slots_of(tour.cuts) if tour.cuts else []
    for own, host in enumerate(tour.hosts):
        node = round_.state.nodes[host.node]
        if not begins and (host.node not in known or tour.id in known[host.node]):
            continue
        if host.node in tour.results or _gone(tour, node):
            continue
        asked = Tour(
            hosts=tour.hosts,
            own=own,
            key=tour.key,
            pair_ms=PAIR_MS,
            start_ms=START_MS,
            limit_ms=tour.until_ms - ANSWER_MS - tour.begun_ms,
            collectives=tour.collectives,
            gpus=node.spec.gpus if tour.collectives else 0,
            slots=tuple(slot.get(own, -1) for slot in slots),
            at_ms=tour.begun_ms + LEAD_MS if slots else 0,
        )
        wanted.append(Check(node=node.id, incarnation=node.incarnation, id=tour.id, tour=asked))
    return wanted


def end_tours(round_: Round, inventories: list[NodeReport]) -> None:
    """Take in what nodes measured, and begin the next check of links that is due."""
    _take_results(round_, inventories)
    if round_.state.troubled and running_tour(round_) is None and (nodes := next_check(round_)):
        start_tour(round_, nodes, about=nodes[0].id)


def _take_results(round_: Round, inventories: list[NodeReport]) -> None:
    """A tour ends when all have answered that still can, or when its time is up."""
    tour = running_tour(round_)
    if tour is None:
        return
    asked = {host.node for host in tour.hosts}
    for inventory in inventories:
        for result in inventory.checks:
            if result.id == tour.id and inventory.spec.id in asked:
                # Later reports of it leave the pairs out.
                tour.results.setdefault(inventory.spec.id, result)
    missing = [
        host.node
        for host in tour.hosts
        if host.node not in tour.results and not _gone(tour, round_.state.nodes[host.node])
    ]
    if missing and round_.now_ms < tour.until_ms:
        return
    tour.key, tour.ended_ms = "", round_.now_ms
    _conclude(round_, tour)
    if (waiting := running_tour(round_)) is not None:
        _begin(round_, waiting)


def _conclude(round_: Round, tour: Touring) -> None:
    if tour.cuts:
        return  # it says nothing about single links
    state, now_ms = round_.state, round_.now_ms
    names = sorted(host.node for host in tour.hosts)
    table = table_of(names, tour.results)
    typed = {name: state.nodes[name].spec.place for name in names}
    whole = not tour.about and _whole(state, names)
    fabric, judged = conclude(
        table,
        _still_here(state),
        typed,
        whole=whole,
        about=tour.about,
        one_machine=len({host.address for host in tour.hosts}) == 1,
        results=tour.results,
    )
    tour.unmeasured = table.unmeasured
    judge_links(round_, tour, table, judged)
    if tour.about and fabric == state.fabric:
        return
    fabric = msgspec.structs.replace(fabric, id=tour.id, at_ms=now_ms)
    why = f"{plural(table.links, 'link')} between {plural(len(names), 'node')} were measured"
    if judged.more:
        why += f"; {judged.more} more are weak"
    round_.emit(
        FabricMeasured(at_ms=now_ms, id=tour.id, nodes=tuple(names), fabric=fabric, why=why)
    )


def _still_here(state: State) -> Fabric:
    """Without nodes that were removed."""
    fabric = state.fabric
    gone = {node.id for node in state.order if node.intent is NodeIntent.REMOVED}
    if not gone:
        return fabric
    return msgspec.structs.replace(
        fabric,
        places={name: place for name, place in fabric.places.items() if name not in gone},
        weak=tuple(one for one in fabric.weak if not gone & {one.node, one.peer}),
    )


def _whole(state: State, names: list[str]) -> bool:
    """Does the tour show the whole topology? One of a few nodes only shows some links of it."""
    placed = [
        name
        for name in state.fabric.places
        if name in state.nodes and state.nodes[name].health is NodeHealth.READY
    ]
    return 2 * len(set(placed) & set(names)) >= len(placed)


def ready_nodes(state: State, names: Sequence[str]) -> list[Node] | Refused:
    if not names:
        return [node for node in state.order if node.health is NodeHealth.READY]
    found: list[Node] = []
    for name in dict.fromkeys(names):
        node = state.nodes.get(name)
        if node is None:
            return Refused("node", f"there is no node {name}", missing=True)
        if node.health is not NodeHealth.READY:
            return Refused("node", f"{name} is {node.health}: {node.why}")
        found.append(node)
    return found


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
