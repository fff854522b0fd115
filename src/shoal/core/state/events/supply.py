"""What happens to orders of nodes."""

from __future__ import annotations

from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.identity import order_key_id
from shoal.model.phrases import because
from shoal.model.policy import Policy
from shoal.model.resources import plural
from shoal.model.supply import Order, OrderPhase, Setback, Supply

FAILURES_MAX = 16  # counted: no wait grows any more after so many
WORKED_MS = 600_000  # an order that lasted this long did not fail at once


class OrderEvent(EventBase, frozen=True, kw_only=True):
    order: str
    why: str = ""

    @property
    def subject(self) -> str:
        return f"order {self.order}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_all


class NodesOrdered(OrderEvent, frozen=True, kw_only=True):
    """The supply is asked for one lot of nodes, which get these names."""

    supply: Supply
    nodes: tuple[str, ...]

    def apply(self, state: State) -> None:
        state.orders[self.order] = Order(
            id=self.order,
            supply=self.supply,
            nodes=self.nodes,
            at_ms=self.at_ms,
            since_ms=self.at_ms,
            why=self.why,
        )
        state.next_order = max(state.next_order, int(self.order[1:]) + 1)

    def phrase(self) -> str:
        return f"asks {self.supply.name} for {plural(len(self.nodes), 'node')}{because(self.why)}"


class OrderChanged(OrderEvent, frozen=True, kw_only=True):
    """The supplier reports another phase or reason; or, with `release`, the order is given back for
    this reason. `failed`: because it brought no node."""

    phase: OrderPhase
    reason: str = ""
    handle: str = ""
    release: str = ""
    failed: bool = False

    def apply(self, state: State) -> None:
        order = state.orders[self.order]
        if self.phase is not order.phase:
            order.since_ms = self.at_ms
        order.phase, order.reason, order.handle = self.phase, self.reason, self.handle
        order.release = self.release or order.release
        order.failed = self.failed or order.failed

    def phrase(self) -> str:
        if self.release:
            return f"is being released{because(self.release)}"
        return f"is {self.phase.value} at its supplier{because(self.reason)}"


class OrderUnused(OrderEvent, frozen=True, kw_only=True):
    """No job uses or awaits its nodes since then; None: one does. Placing a job there, and waking
    one, says so, too."""

    since_ms: int | None

    def apply(self, state: State) -> None:
        state.orders[self.order].unused_ms = self.since_ms

    def phrase(self) -> str:
        return "is not used" if self.since_ms is not None else "is in use or needed again"


class OrderEnded(OrderEvent, frozen=True, kw_only=True):
    """Nothing is left of the order, and its join token is void. `failed`: the supply is asked again
    only after a while."""

    supply: str
    failed: bool = False

    def apply(self, state: State) -> None:
        order = state.orders.pop(self.order)
        state.identity.keys.pop(order_key_id(self.order), None)
        before = state.setbacks.pop(self.supply, None)
        if not self.failed:
            return
        worked = order.phase is OrderPhase.RUNNING and self.at_ms - order.since_ms > WORKED_MS
        failures = 1 if before is None or worked else min(FAILURES_MAX, before.failures + 1)
        state.setbacks[self.supply] = Setback(failures=failures, at_ms=self.at_ms, why=self.why)

    def phrase(self) -> str:
        return f"of {self.supply} {'failed' if self.failed else 'ended'}{because(self.why)}"


def forget_setbacks(state: State, policy: Policy) -> None:
    """A supply that was changed is tried at once."""
    before = {supply.name: supply for supply in state.policy.supply}
    same = {supply.name for supply in policy.supply if before.get(supply.name) == supply}
    state.setbacks = {name: one for name, one in state.setbacks.items() if name in same}
