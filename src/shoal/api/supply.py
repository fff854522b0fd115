"""The API of supplies: what brings nodes, what was ordered, and what became of it."""

from __future__ import annotations

from shoal.api.handling import handles
from shoal.calls.cluster import ClusterCalls
from shoal.control.loop import ControlLoop
from shoal.core.features.supply.orders import state_text
from shoal.core.state.state import State
from shoal.core.state.supplied import cost_of, next_try_ms, nodes_brought, orders_of
from shoal.ledger.live import LiveLedger
from shoal.model.node import NodeHealth
from shoal.model.reason import render
from shoal.model.supply import Order, OrderPhase, OrderView, SuppliesView, Supply, SupplyView


class Supplies:
    @handles(ClusterCalls.supply)
    def listing(self, loop: ControlLoop, live_ledger: LiveLedger | None) -> SuppliesView:
        state, now_ms = loop.state, loop.clock.now_ms()
        named = {one.name: one for one in loop.policy.supply}
        for order in state.orders.values():
            named.setdefault(order.supply.name, order.supply)
        return SuppliesView(
            now_ms=now_ms,
            currency=live_ledger.prices.currency if live_ledger is not None else "",
            supplies=[supply_view(state, one, now_ms) for one in named.values()],
            orders=[order_view(state, order) for order in state.orders.values()],
        )


def supply_view(state: State, one: Supply, now_ms: int) -> SupplyView:
    joined = coming = leaving = 0
    for order in orders_of(state, one.name):
        there = len(_joined(state, order))
        if order.release:
            leaving += len(order.nodes)
        else:
            joined += there
            coming += max(0, len(order.nodes) - len(state.brought.get(order.id, ())))
    setback = state.setbacks.get(one.name)
    again_ms = next_try_ms(state, one.name)
    return SupplyView(
        name=one.name,
        engine=one.engine,
        kind=str(one.kind),
        nodes=joined,
        coming=coming,
        leaving=leaving,
        least=one.least,
        most=one.most,
        price=one.price,
        cost=cost_of(state, one.name),
        ceiling=one.ceiling,
        state=state_text(state, one, now_ms),
        failures=setback.failures if setback is not None else 0,
        next_try_ms=again_ms if again_ms > now_ms else 0,
    )


def order_view(state: State, order: Order) -> OrderView:
    phase = "asked" if order.phase is OrderPhase.UNKNOWN else order.phase.value
    return OrderView(
        id=order.id,
        supply=order.supply.name,
        engine=order.supply.engine,
        nodes=list(order.nodes),
        joined=_joined(state, order),
        phase="releasing" if order.release else phase,
        reason=render(order.release or order.reason),
        handle=order.handle,
        why=render(order.why),
        at_ms=order.at_ms,
        price=order.supply.price * len(order.nodes),
    )


def _joined(state: State, order: Order) -> list[str]:
    return [n.id for n in nodes_brought(state, order.id) if n.health is not NodeHealth.LOST]
