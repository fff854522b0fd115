"""What happens to orders of nodes."""

from __future__ import annotations

from shoal.model.eventbase import EventBase, Reader
from shoal.model.phrases import because
from shoal.model.resources import plural
from shoal.model.supply import OrderPhase, Supply


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

    def phrase(self) -> str:
        if self.release:
            return f"is given back{because(self.release)}"
        return f"is {self.phase.value} at its supplier{because(self.reason)}"


class OrderUnused(OrderEvent, frozen=True, kw_only=True):
    """No job uses or awaits its nodes since then; None: one does. Placing a job there, and waking
    one, says so, too."""

    since_ms: int | None

    def phrase(self) -> str:
        return "is not used" if self.since_ms is not None else "is used or awaited again"


class OrderEnded(OrderEvent, frozen=True, kw_only=True):
    """Nothing is left of the order. `failed`: the supply is asked again only after a while."""

    supply: str
    failed: bool = False

    def phrase(self) -> str:
        return f"of {self.supply} {'failed' if self.failed else 'ended'}{because(self.why)}"
