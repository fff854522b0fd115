"""What happens to orders of nodes."""

from __future__ import annotations

from shoal.model.eventbase import EventBase
from shoal.model.supply import OrderPhase, Supply


class OrderEvent(EventBase, frozen=True, kw_only=True):
    order: str
    why: str = ""


class NodesOrdered(OrderEvent, frozen=True, kw_only=True):
    """The supply is asked for one lot of nodes, which get these names."""

    supply: Supply
    nodes: tuple[str, ...]


class OrderChanged(OrderEvent, frozen=True, kw_only=True):
    """The supplier reports another phase or reason; or, with `release`, the order is given back for
    this reason. `failed`: because it brought no node."""

    phase: OrderPhase
    reason: str = ""
    handle: str = ""
    release: str = ""
    failed: bool = False


class OrderUnused(OrderEvent, frozen=True, kw_only=True):
    """No job uses or awaits its nodes since then; None: one does. Placing a job there, and waking
    one, says so, too."""

    since_ms: int | None


class OrderEnded(OrderEvent, frozen=True, kw_only=True):
    """Nothing is left of the order. `failed`: the supply is asked again only after a while."""

    supply: str
    failed: bool = False
