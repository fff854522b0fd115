"""What events do to orders of nodes; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state.state import State
from shoal.model.events import EventBase, NodesOrdered, OrderChanged, OrderEnded, OrderUnused
from shoal.model.policy import Policy
from shoal.model.supply import Order, OrderPhase, Setback

FAILURES_MAX = 16  # counted: no wait grows any more after so many
WORKED_MS = 600_000  # an order that lasted this long did not fail at once


def _ordered(state: State, event: NodesOrdered) -> None:
    state.orders[event.order] = Order(
        id=event.order,
        supply=event.supply,
        nodes=event.nodes,
        at_ms=event.at_ms,
        since_ms=event.at_ms,
        why=event.why,
    )
    state.next_order = max(state.next_order, int(event.order[1:]) + 1)


def _changed(state: State, event: OrderChanged) -> None:
    order = state.orders[event.order]
    if event.phase is not order.phase:
        order.since_ms = event.at_ms
    order.phase, order.reason, order.handle = event.phase, event.reason, event.handle
    order.release = event.release or order.release
    order.failed = event.failed or order.failed


def _unused(state: State, event: OrderUnused) -> None:
    state.orders[event.order].unused_ms = event.since_ms


def _ended(state: State, event: OrderEnded) -> None:
    order = state.orders.pop(event.order)
    before = state.setbacks.pop(event.supply, None)
    if not event.failed:
        return
    worked = order.phase is OrderPhase.RUNNING and event.at_ms - order.since_ms > WORKED_MS
    failures = 1 if before is None or worked else min(FAILURES_MAX, before.failures + 1)
    state.setbacks[event.supply] = Setback(failures=failures, at_ms=event.at_ms, why=event.why)


def forget_setbacks(state: State, policy: Policy) -> None:
    """A supply that was changed is tried at once."""
    before = {supply.name: supply for supply in state.policy.supply}
    same = {supply.name for supply in policy.supply if before.get(supply.name) == supply}
    state.setbacks = {name: one for name, one in state.setbacks.items() if name in same}


APPLY_SUPPLY: dict[type[EventBase], Callable[[State, Any], None]] = {
    NodesOrdered: _ordered,
    OrderChanged: _changed,
    OrderUnused: _unused,
    OrderEnded: _ended,
}
