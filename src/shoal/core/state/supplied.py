"""What the state says about supplies: what nodes they bring, how many there are, what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.state.asked import full_kind
from shoal.core.state.room import UNLIMITED
from shoal.core.state.state import Node, State
from shoal.model.node import NodeHealth
from shoal.model.resources import Kind
from shoal.model.supply import ORDERS_MAX, Order, Supply

BACKOFF_MS = 30_000  # after the first failure; each further one doubles it
BACKOFF_MS_MAX = 1_800_000
START_MS = 600_000  # in which an order that runs must bring its nodes


def orders_of(state: State, supply: str) -> Iterator[Order]:
    return (order for order in state.orders.values() if order.supply.name == supply)


def nodes_brought(state: State, order_id: str) -> list[Node]:
    return [state.nodes[name] for name in state.brought.get(order_id, ())]


def count_of(state: State, supply: str) -> int:
    """Nodes that it has brought or was asked for. Those being given back may still exist."""
    return sum(len(order.nodes) for order in orders_of(state, supply))


def kept_of(state: State, supply: str) -> int:
    """The same, without orders that are being given back."""
    return sum(len(order.nodes) for order in orders_of(state, supply) if not order.release)


def cost_of(state: State, supply: str) -> int:
    """Per hour, in millionths."""
    return sum(order.supply.price * len(order.nodes) for order in orders_of(state, supply))


def headroom(state: State, supply: Supply) -> int:
    """How many more nodes it may bring: within `most`, the ceiling, and all orders' bound."""
    nodes = supply.most - count_of(state, supply.name)
    if supply.ceiling and supply.price:
        nodes = min(nodes, (supply.ceiling - cost_of(state, supply.name)) // supply.price)
    lots = min(nodes // supply.lot, ORDERS_MAX - len(state.orders))
    return max(0, lots) * supply.lot


def next_try_ms(state: State, supply: str) -> int:
    """When it may be asked again after failures; 0: at any time."""
    setback = state.setbacks.get(supply)
    if setback is None:
        return 0
    return setback.at_ms + min(BACKOFF_MS_MAX, BACKOFF_MS << (setback.failures - 1))


def slots_of(supply: Supply) -> Iterator[str]:
    """The names that its nodes may get, in order."""
    stem = "".join(c if c.isalnum() else "-" for c in supply.name.lower())
    return (f"{stem}-{number}" for number in range(1, 1 << 30))


def kind_of(state: State, supply: Supply) -> Kind:
    """What its nodes have: as one of them reported, else as the policy says. An amount of CPUs or
    memory that nobody has stated is expected to be enough."""
    stated = supply.kind
    for order in orders_of(state, supply.name):
        for node in nodes_brought(state, order.id):
            if order.supply == supply and node.health is not NodeHealth.LOST:
                return full_kind(node)
    known = state.nodes.get(next(slots_of(supply)))
    if known is not None and known.spec.origin == supply.name:
        seen = known.spec.kind
        stated = stated._replace(
            cpu_milli=stated.cpu_milli or seen.cpu_milli,
            memory_mb=stated.memory_mb or seen.memory_mb,
            gpu_model=stated.gpu_model or seen.gpu_model,
            gpu_memory_mb=stated.gpu_memory_mb or seen.gpu_memory_mb,
        )
    return stated._replace(
        cpu_milli=stated.cpu_milli or UNLIMITED, memory_mb=stated.memory_mb or UNLIMITED
    )
