"""Orders of nodes: what suppliers report of them, giving them back, and what they do for jobs that
wait, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.features.ends import hear_notes, is_stray, lose, too_long
from shoal.core.features.identity import void_keys, void_order_key
from shoal.core.scheduling.ends import outlives
from shoal.core.scheduling.packing import fits_empty, on_one_node
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeIntended, NodeJoined, NodeJudged, NodeLost, NodeReady
from shoal.core.state.events.runs import MemberExited, MemberLost
from shoal.core.state.events.supply import NodesOrdered, OrderChanged
from shoal.core.state.events.supply import OrderEnded as Ended
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.core.state.supplied import (
    START_MS,
    headroom,
    kind_of,
    next_try_ms,
    nodes_brought,
    orders_of,
)
from shoal.model.durations import duration_text
from shoal.model.health import Record, Standing
from shoal.model.job import Job
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.reason import render
from shoal.model.resources import plural
from shoal.model.supply import (
    DrainMachine,
    Order,
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyReport,
)

MISSING_MS = 15_000  # an order that was seen and is no longer shown for this long is over
EARLY_MS = 300_000  # a node that is lost so soon after its order began counts as a failure
LINES_MAX = 3


def hear_supplies(round_: Round, reports: tuple[SupplyReport, ...]) -> None:
    """Take in what suppliers report, and close nodes that must get no job: before the scheduler
    sees them."""
    state = round_.state
    if state.brought:
        _judge_arrivals(round_)
        _end_silent(round_)
    for report in reports:
        before = state.heard.supplied.get(report.engine)
        if before is None or before.problem:
            state.agenda.supply_ms = round_.now_ms  # it may be asked now
        state.heard.supplied[report.engine] = report
        if report.problem:
            state.heard.trouble_ms.setdefault(report.engine, round_.now_ms)
            continue
        state.heard.trouble_ms.pop(report.engine, None)
        hear_notes(round_, report)
        shown = {status.order: status for status in report.orders}
        for order in [one for one in state.orders.values() if one.supply.engine == report.engine]:
            _hear_order(round_, order, shown.get(order.id))
        for status in report.orders:
            if status.order not in state.orders and status.phase not in (
                OrderPhase.ENDED,
                OrderPhase.UNKNOWN,
            ):
                why = "the cluster has no such order"
                round_.supplies.append(Release(order=status.order, engine=report.engine, why=why))


def _hear_order(round_: Round, order: Order, status: OrderStatus | None) -> None:
    heard, now_ms = round_.state.heard, round_.now_ms
    if status is None or status.phase is OrderPhase.UNKNOWN:
        if order.phase is OrderPhase.UNKNOWN:
            if order.release:
                end_order(round_, order, failed=order.failed, why=order.release)
            elif now_ms - order.at_ms >= START_MS:
                release(round_, order, "the supplier has no record of it", failed=True)
            else:
                round_.supplies.append(provision(order))
        elif now_ms - heard.missing_ms.setdefault(order.id, now_ms) >= MISSING_MS:
            failed = order.failed or not order.release
            why = order.release or "the supplier no longer lists it"
            end_order(round_, order, failed=failed, why=why)
        return
    heard.missing_ms.pop(order.id, None)
    void_order_key(round_, order.id, order.nodes)
    if status.phase is OrderPhase.ENDED:
        brought = order.phase is OrderPhase.RUNNING and order.id in round_.state.brought
        failed = order.failed or (not order.release and (status.failed or not brought))
        why = order.release or status.reason or "it ended"
        end_order(round_, order, failed=failed, why=why)
        return
    if (status.phase, status.reason, status.handle) != (order.phase, order.reason, order.handle):
        round_.emit(
            OrderChanged(
                at_ms=now_ms,
                order=order.id,
                phase=status.phase,
                reason=status.reason,
                handle=status.handle,
            )
        )
    if order.release:
        for node in nodes_brought(round_.state, order.id):
            _drain(round_, order, node)  # before jobs are healed, so that they move
        give_back(round_, order)


def end_order(round_: Round, order: Order, *, failed: bool, why: str) -> None:
    """Its supplier shows that nothing is left of it, so its nodes are gone as well."""
    for node in nodes_brought(round_.state, order.id):
        if node.health is not NodeHealth.LOST:
            lose(round_, node, dead=True, why=f"its machine was released: {why}")
        if node.intent is not NodeIntent.REMOVED:
            _intend(round_, node, NodeIntent.REMOVED, f"order {order.id} has ended: {why}")
    forget(round_.state, order.id)
    round_.emit(
        Ended(
            at_ms=round_.now_ms,
            order=order.id,
            supply=order.supply.name,
            failed=failed,
            why=why,
        )
    )


def release(round_: Round, order: Order, why: str, *, failed: bool = False) -> None:
    """Decide to give the order back: its nodes get nothing new, and go when nothing runs there."""
    round_.emit(
        OrderChanged(
            at_ms=round_.now_ms,
            order=order.id,
            phase=order.phase,
            reason=order.reason,
            handle=order.handle,
            release=why,
            failed=failed,
        )
    )
    give_back(round_, order)


def give_back(round_: Round, order: Order) -> None:
    """Drain what is left of the order. When nothing runs there, have the supplier end it. A node
    that does not answer cannot be drained: ending its machine makes sure that nothing runs."""
    state, empty = round_.state, True
    for node in nodes_brought(state, order.id):
        if _out_of_reach(round_, node):
            continue
        if not state.placed[node.id]:
            _drain(round_, order, node)
            continue
        empty = False
        if node.intent is NodeIntent.OPEN:  # drained before jobs are healed, so that they move
            _intend(round_, node, NodeIntent.CORDONED, f"order {order.id}: {order.release}")
    if not empty:
        return
    for node in nodes_brought(state, order.id):
        if node.intent is not NodeIntent.REMOVED and not state.placed[node.id]:
            _intend(round_, node, NodeIntent.REMOVED, f"order {order.id}: {order.release}")
    round_.supplies.append(
        Release(order=order.id, engine=order.supply.engine, why=render(order.release))
    )


def _drain(round_: Round, order: Order, node: Node) -> None:
    if node.intent in (NodeIntent.OPEN, NodeIntent.CORDONED):
        _intend(round_, node, NodeIntent.DRAINING, f"order {order.id}: {order.release}")


def provision(order: Order) -> Provision:
    return Provision(order=order.id, supply=order.supply, nodes=order.nodes, why=render(order.why))


def forget(state: State, order_id: str) -> None:
    state.heard.missing_ms.pop(order_id, None)


def _judge_arrivals(round_: Round) -> None:
    """Nodes that joined, or that were silent and are heard again while they are given back."""
    for event in list(round_.events):
        if isinstance(event, NodeJoined | NodeReady):
            node = round_.state.nodes[event.node]
            if node.spec.order:
                _judge_arrival(round_, node, round_.state.orders.get(node.spec.order))


def judge_nodes(round_: Round) -> None:
    """Ordered nodes that were lost in this step or found to be sick, and strays that are empty."""
    state = round_.state
    for event in list(round_.events):
        if isinstance(event, NodeIntended | MemberExited | MemberLost):
            _dismiss_stray(round_, state.nodes[event.node])
        if not isinstance(event, NodeLost | NodeJudged):
            continue
        node = state.nodes[event.node]
        order = state.orders.get(node.spec.order)
        if isinstance(event, NodeJudged):
            if event.record.standing is Standing.QUARANTINED and order is not None:
                round_.supplies.append(
                    DrainMachine(node=node.spec, engine=order.supply.engine, why=render(event.why))
                )
        elif order is not None:
            _judge_loss(round_, node, order)
        elif node.spec.order and node.intent is not NodeIntent.REMOVED:
            _intend(round_, node, NodeIntent.REMOVED, "its order has ended")


def _judge_arrival(round_: Round, node: Node, order: Order | None) -> None:
    """A name is used again for other machines, which have done nothing wrong yet."""
    if node.record.standing is not Standing.OK and node.record.since_ms < (
        order.at_ms if order is not None else 0
    ):
        round_.emit(
            NodeJudged(
                at_ms=round_.now_ms, node=node.id, record=Record(), why="it is another machine"
            )
        )
    if (order is None or order.release) and node.intent is NodeIntent.OPEN:
        why = order.release if order is not None else "the cluster has no such order"
        _intend(round_, node, NodeIntent.DRAINING, f"order {node.spec.order}: {why}")


def _dismiss_stray(round_: Round, node: Node) -> None:
    """A machine that outlives its order is dismissed as soon as nothing runs there."""
    state = round_.state
    draining = node.intent is NodeIntent.DRAINING and not state.placed[node.id]
    if draining and node.health is not NodeHealth.LOST and is_stray(state, node):
        _intend(round_, node, NodeIntent.REMOVED, "its order has ended")


def _judge_loss(round_: Round, node: Node, order: Order) -> None:
    """An order none of whose nodes is left is given back."""
    others = nodes_brought(round_.state, order.id)
    if order.release or any(other.health is not NodeHealth.LOST for other in others):
        return
    starting = round_.now_ms - order.since_ms < START_MS
    if starting and len(others) < len(order.nodes):
        return  # the rest of the lot is still expected
    early = round_.now_ms - order.since_ms < EARLY_MS and node.intent is NodeIntent.OPEN
    release(round_, order, f"{node.id} is lost: {node.why}", failed=early)


def _end_silent(round_: Round) -> None:
    """Nodes beyond the grace time: whoever brought them ends their machine, if nothing else is
    alive in the same order, so that no job runs twice."""
    state, latest_ms = round_.state, round_.now_ms - round_.policy.grace_ms
    for node_id, heard_ms in list(state.heard.contacts.items()):  # longest unheard first
        if heard_ms > latest_ms:
            return
        order = state.orders.get(state.nodes[node_id].spec.order)
        if order is None or order.release:
            continue
        if all(_out_of_reach(round_, node) for node in nodes_brought(state, order.id)):
            silent = duration_text(round_.now_ms - heard_ms)
            release(round_, order, f"{node_id} has been silent for {silent}")


def _out_of_reach(round_: Round, node: Node) -> bool:
    """Lost, or silent for longer than the grace period: nothing of it is waited for."""
    if node.health is NodeHealth.LOST:
        return True
    heard_ms = round_.state.heard.contacts.get(node.id, round_.now_ms)
    return heard_ms <= round_.now_ms - round_.policy.grace_ms


def _intend(round_: Round, node: Node, intent: NodeIntent, why: str) -> None:
    """The scheduler may have run already in this step: what was set aside for a job on this node is
    set aside no longer, so others may start."""
    round_.emit(NodeIntended(at_ms=round_.now_ms, node=node.id, intent=intent, why=why))
    round_.state.agenda.look_again(round_.now_ms)
    void_keys(round_, node)


# -- in sentences ----------------------------------------------------------------------------------


def supplier_text(state: State, supply: Supply) -> str:
    """`Slurm`, or `Slurm (big)` if the supply has a name of its own."""
    engine = state.functions.suppliers.get(supply.engine, supply.engine)
    return engine if supply.name == supply.engine else f"{engine} ({supply.name})"


def asked_for(state: State, job: Job, now_ms: int) -> tuple[bool, str]:
    """Whether nodes that suit the job are on their way; and a clause about that, or about why none
    are, empty if the policy has no supply."""
    gang = gang_of(job)
    suiting = [one for one in state.policy.supply if fits_empty(gang, kind_of(state, one))]
    if state.policy.supply and not suiting:
        return False, _unsuitable(state, gang)
    lasting = [one for one in suiting if not outlives(state, job, one)]
    coming = [text for one in lasting if (text := _coming(state, one, now_ms))]
    if coming:
        return True, "; ".join(coming[:LINES_MAX])
    texts = [
        obstacle(state, one, now_ms) if one in lasting else _short_lived(state, job, one)
        for one in suiting
    ]
    return False, "; ".join(texts[:LINES_MAX])


def _unsuitable(state: State, gang: Gang) -> str:
    """No supply has such nodes: what it asks for, and what they have."""
    demand = gang.demand
    labels = f" with {' and '.join(demand.where)}" if demand.where else ""
    members = (
        f" for {gang.members} members on one" if on_one_node(gang) and gang.members > 1 else ""
    )
    have = "; ".join(
        f"{supplier_text(state, one)} brings {one.kind}" for one in state.policy.supply[:LINES_MAX]
    )
    return f"no supply brings nodes of {demand}{labels}{members}: {have}"


def _short_lived(state: State, job: Job, one: Supply) -> str:
    lives = f"nodes of {supplier_text(state, one)} live {duration_text(one.lasts_ms)}"
    return f"{lives}, and {too_long(state, job)}"


def _coming(state: State, one: Supply, now_ms: int) -> str:
    pending = [
        order
        for order in orders_of(state, one.name)
        if not order.release and len(state.brought.get(order.id, ())) < len(order.nodes)
    ]
    if not pending:
        return ""
    first = min(pending, key=lambda order: order.at_ms)
    nodes = sum(len(order.nodes) - len(state.brought.get(order.id, ())) for order in pending)
    ago = duration_text(now_ms - first.at_ms)
    text = f"asked {supplier_text(state, one)} for {plural(nodes, 'node')} {ago} ago"
    return f"{text}: {stage_text(state, first)}"


def stage_text(state: State, order: Order) -> str:
    """What an order waits for."""
    heard = state.heard.supplied.get(order.supply.engine)
    if heard is not None and heard.problem:
        return heard.problem
    if order.phase is OrderPhase.RUNNING:
        return "machines allocated, Shoal is starting"
    if order.phase is OrderPhase.PENDING:
        return order.reason or "waiting for machines"
    return "no answer yet"


def obstacle(state: State, one: Supply, now_ms: int) -> str:
    """Why the supply brings no more nodes now."""
    who = supplier_text(state, one)
    heard = state.heard.supplied.get(one.engine)
    if heard is None:
        return f"{who} has not been reached yet"
    if heard.problem:
        return f"{who} cannot be asked: {heard.problem}"
    again_ms = next_try_ms(state, one.name)
    if again_ms > now_ms:
        setback = state.setbacks[one.name]
        return f"{who} failed: {setback.why}; next try in {duration_text(again_ms - now_ms)}"
    if headroom(state, one) < one.lot:
        return f"{who} may bring no more nodes ({_bound(state, one)})"
    return f"{who} could bring nodes, but not enough of them within its limits"


def _bound(state: State, one: Supply) -> str:
    count = sum(len(order.nodes) for order in orders_of(state, one.name))
    if one.most - count < one.lot:
        return f"most is {one.most}"
    return "its price ceiling is reached"


def state_text(state: State, one: Supply, now_ms: int) -> str:
    """What the supply does now, in a few words."""
    if not any(known.name == one.name for known in state.policy.supply):
        return "no longer in the policy: its orders end when they are idle"
    coming = _coming(state, one, now_ms)
    if coming:
        return coming
    heard = state.heard.supplied.get(one.engine)
    troubled = heard is None or heard.problem or next_try_ms(state, one.name) > now_ms
    if troubled or headroom(state, one) < one.lot:
        return obstacle(state, one, now_ms)
    return "ready"


def supply_lines(state: State, now_ms: int) -> list[str]:
    """One line for each supply that does something or cannot, for a screen of the cluster."""
    lines = []
    for one in state.policy.supply:
        text = state_text(state, one, now_ms)
        count = sum(len(state.brought.get(order.id, ())) for order in orders_of(state, one.name))
        if count or text != "ready":
            lines.append(f"{one.name}: {plural(count, 'node')} of at most {one.most}; {text}")
    return lines


# -- what always holds, in code that shares nothing with the code above ----------------------------


def orders_violation(state: State) -> str:
    names = [name for order in state.orders.values() for name in order.nodes]
    if len(set(names)) != len(names):
        return "two orders bring a node of the same name"
    brought: list[tuple[str, str]] = []
    for node in state.order:
        if node.spec.order:
            brought.append((node.spec.order, node.spec.id))
        order = state.orders.get(node.spec.order)
        given_back = node.spec.order and (order is None or order.release)
        if given_back and node.schedulable:
            return f"{node.spec.id} is open for jobs, but its order is given back"
    indexed = [(order_id, node) for order_id, nodes in state.brought.items() for node in nodes]
    if sorted(indexed) != sorted(brought):
        return "the nodes by order do not match the nodes"
    if f"o{state.next_order}" in state.orders:
        return "the number of an order would be used again"
    return ""


def ordered_violation(state: State, events: Iterable[Event]) -> str:
    """At the moment of an order, the policy's bounds on nodes and money held. Later the policy may
    have changed."""
    for event in events:
        if not isinstance(event, NodesOrdered):
            continue
        supplies = [one for one in state.policy.supply if one.name == event.supply.name]
        if not supplies:
            return f"{event.order} is for {event.supply.name}, which the policy lacks"
        supply = supplies[0]
        same = [o for o in state.orders.values() if o.supply.name == supply.name]
        nodes = sum(len(order.nodes) for order in same)
        cost = sum(len(order.nodes) * order.supply.price for order in same)
        if nodes > supply.most:
            return f"{supply.name} was asked for {nodes} nodes; most is {supply.most}"
        if supply.ceiling and cost > supply.ceiling:
            return f"{supply.name} would cost {cost} per hour, above its ceiling"
        order = state.orders.get(event.order)
        if order is not None and order.release:
            return f"{event.order} was placed and given back in one step"
    return ""
