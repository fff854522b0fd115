"""What the driver saw of a Ray, as the inventory of our orders. Pure.

An order is an actor in Ray and an agent on a machine, and either may outlive the other. The agent
decides: while it lives, the order runs, and an actor that is gone is made again beside it.
"""

from __future__ import annotations

import msgspec

from shoal.engines.ray.render import Ask, whole_of
from shoal.model.resources import plural
from shoal.model.supply import REASON_CHARACTERS_MAX, OrderPhase, OrderStatus

# Ray may lose sight of a machine, or be restarted as a whole, while the agents there work on. They
# report over their own links; so an order is not called ended before Ray had this long to return.
LOST_MS = 600_000


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    address: str
    alive: bool
    total: dict[str, float]
    free: dict[str, float]


class RayActor(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of one order, as Ray's head knows it."""

    state: str  # ALIVE, DEAD, PENDING_CREATION, DEPENDENCIES_UNREADY, RESTARTING
    node: str  # Ray's id of the node; empty as long as it has none
    cause: str = ""  # of its death


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder says of the agent that it started."""

    ended: bool = False
    reason: str = ""
    failed: bool = False


class Living(msgspec.Struct, frozen=True, kw_only=True):
    """An order whose agent was found alive, on the machine of these Ray nodes."""

    ask: Ask
    nodes: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a Ray; everything of ours, by order. `session` changes when Ray is restarted."""

    session: str
    nodes: tuple[RayNode, ...] = ()
    searched: tuple[str, ...] = ()  # nodes where no living agent could have been overlooked
    actors: dict[str, RayActor] = {}
    held: dict[str, Held] = {}
    living: dict[str, Living] = {}
    asked: dict[str, Ask] = {}
    released: tuple[str, ...] = ()


class Seen(msgspec.Struct, frozen=True):
    """An order that ran when we last looked; `since_ms`: when we last saw it in order."""

    status: OrderStatus
    session: str
    since_ms: int


class Reading(msgspec.Struct, frozen=True):
    """`again`: living agents without an actor, and the Ray node to hold each of them on."""

    orders: tuple[OrderStatus, ...]
    again: tuple[tuple[Ask, str], ...]
    seen: dict[str, Seen]


def reading(facts: Facts, seen: dict[str, Seen], now_ms: int) -> Reading:
    orders: list[OrderStatus] = []
    again: list[tuple[Ask, str]] = []
    remembered: dict[str, Seen] = {}
    nodes = {node.id: node for node in facts.nodes}
    for order in sorted({*facts.actors, *facts.held, *facts.living, *facts.released, *seen}):
        before = seen.get(order)
        actor = facts.actors.get(order)
        living = facts.living.get(order)
        held = facts.held.get(order, Held())
        if held.ended:
            status = _status(order, OrderPhase.ENDED, held.reason, failed=held.failed)
        elif actor is not None and actor.state != "DEAD":
            status = _present(order, actor, living, facts, nodes)
        elif order in facts.released:
            phase = OrderPhase.ENDED if living is None else OrderPhase.RUNNING
            status = _status(order, phase, "released")
        elif living is not None:
            place = _place(living, nodes)
            again += [(_again(living.ask), place.id)] if place is not None else []
            status = _status(order, OrderPhase.RUNNING, "its actor was lost; Ray starts another")
        else:
            found = _absent(order, actor, before, facts, nodes, now_ms)
            if found is None:
                continue
            status, lost = found
            if lost and before is not None:
                remembered[order] = before
        orders.append(status)
        if status.phase is OrderPhase.RUNNING and order not in remembered:
            remembered[order] = Seen(status, facts.session, now_ms)
    return Reading(tuple(orders), tuple(again), remembered)


def _present(
    order: str, actor: RayActor, living: Living | None, facts: Facts, nodes: dict[str, RayNode]
) -> OrderStatus:
    if actor.state == "ALIVE":
        handle = nodes[actor.node].address if actor.node in nodes else ""
        return _status(order, OrderPhase.RUNNING, handle=handle)
    if living is not None:
        reason = "Ray gave its GPUs to others while its actor was lost"
        return _status(order, OrderPhase.RUNNING, reason)
    return _status(order, OrderPhase.PENDING, why_pending(facts.asked.get(order), facts.nodes))


def _absent(
    order: str,
    actor: RayActor | None,
    before: Seen | None,
    facts: Facts,
    nodes: dict[str, RayNode],
    now_ms: int,
) -> tuple[OrderStatus, bool] | None:
    """Neither an actor nor an agent was found. If Ray cannot see the machine, that means nothing
    yet: then the order counts as running, and as lost."""
    patient = before is not None and now_ms - before.since_ms < LOST_MS
    if actor is None:
        if before is None or before.session == facts.session or not patient:
            return None
        reason = "Ray was restarted and does not have the machine back yet"
        return _status(order, OrderPhase.RUNNING, reason), True
    machine = nodes.get(actor.node)
    seen = machine is not None and machine.alive and actor.node in facts.searched
    if actor.node and not seen:
        where = machine.address if machine is not None else "gone"
        if patient:
            reason = f"Ray lost its node ({where}); the agent may live"
            return _status(order, OrderPhase.RUNNING, reason), True
        return _status(order, OrderPhase.ENDED, f"Ray lost its node ({where})", failed=True), False
    return _status(order, OrderPhase.ENDED, actor.cause or "its actor ended", failed=True), False


def _again(ask: Ask) -> Ask:
    return msgspec.structs.replace(ask, again=True)


def _place(living: Living, nodes: dict[str, RayNode]) -> RayNode | None:
    """Several Ray nodes may be on one machine: prefer one that has room for the actor."""
    found = [nodes[id_] for id_ in living.nodes if id_ in nodes and nodes[id_].alive]
    found = [node for node in found if fits(living.ask, node.total)]
    return min(found, key=lambda node: (not fits(living.ask, node.free), node.id), default=None)


def fits(ask: Ask, amounts: dict[str, float]) -> bool:
    wanted = {"CPU": ask.cpus, "GPU": ask.gpus, "memory": ask.memory_bytes}
    return all(amounts.get(name, 0) >= amount for name, amount in wanted.items())


def why_pending(ask: Ask | None, nodes: tuple[RayNode, ...]) -> str:
    if ask is None:
        return "Ray has not placed it yet"
    living = [node for node in nodes if node.alive]
    capable = [node for node in living if fits(ask, node.total)]
    what = " and ".join(
        part
        for part in (
            plural(int(ask.gpus), "GPU") if ask.gpus else "",
            f"{ask.cpus:g} CPU{'' if ask.cpus == 1 else 's'}" if ask.cpus else "",
            f"{ask.memory_bytes >> 20} MB" if ask.memory_bytes else "",
        )
        if part
    )
    if not capable:
        return f"none of Ray's {plural(len(living), 'node')} has {what}"
    if not any(fits(ask, node.free) for node in capable):
        return f"none of Ray's {plural(len(capable), 'node')} has {what} free"
    return "Ray is starting it"


def choose_whole(nodes: tuple[RayNode, ...], ask: Ask) -> tuple[Ask, str] | str:
    """A Ray node that nobody uses, and the request for all of it; or why there is none."""
    living = [
        node for node in nodes if node.alive and (node.total.get("CPU") or node.total.get("GPU"))
    ]
    for node in sorted(living, key=lambda node: (-node.total.get("GPU", 0), node.id)):
        if all(node.free.get(name) == node.total.get(name) for name in ("CPU", "GPU")):
            return whole_of(ask, node.total), node.id
    return (
        f"all of Ray's {plural(len(living), 'node')} are in use" if living else "Ray has no nodes"
    )


def _status(
    order: str, phase: OrderPhase, reason: str = "", *, failed: bool = False, handle: str = ""
) -> OrderStatus:
    reason = reason[:REASON_CHARACTERS_MAX]
    return OrderStatus(order=order, phase=phase, reason=reason, failed=failed, handle=handle)
