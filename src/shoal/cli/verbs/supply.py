"""`shoal supply`: where nodes come from, and what was ordered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import verb

if TYPE_CHECKING:
    from shoal.model.supply import OrderView, SuppliesView, SupplyView


@verb()
def supply(json: bool, home: Path) -> None:
    """Show where nodes come from, and what was ordered.

    The policy names supplies: kinds of nodes that Slurm, Kubernetes or Ray
    brings when jobs wait for them. NODES is how many have joined, COMING how
    many were asked for, MOST how many there may be. Each order is shown with
    the supplier's own name for it (a Slurm job id, a pod) and what it waits for.

    Examples:
      shoal supply
      shoal supply --json | jq '.orders[] | select(.phase == "pending")'
      shoal policy set elastic.yaml
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.supply()
    if json:
        show.as_json(view)
        return
    if not view.supplies:
        show.note("the policy has no supply; see: shoal policy show, and docs/supply.md")
        return
    _print_supplies(view)
    if view.orders:
        show.line("")
        titles = ("ORDER", "SUPPLY", "PHASE", "JOINED", "AGE", "HANDLE", "REASON")
        show.table(
            [show.Column(title, wraps=title in ("STATE", "REASON")) for title in titles],
            [_order_row(order, view.now_ms) for order in view.orders],
        )


def _print_supplies(view: SuppliesView) -> None:
    from shoal.cli.screen import show

    priced = any(one.price for one in view.supplies)
    money = [f"{view.currency or 'COST'}/H"] if priced else []
    titles = ["SUPPLY", "ENGINE", "NODES", "COMING", "MOST", *money, "EACH", "STATE"]
    show.table(
        [show.Column(title, wraps=title in ("STATE", "REASON")) for title in titles],
        [_supply_row(one, priced=priced) for one in view.supplies],
    )


def _supply_row(one: SupplyView, *, priced: bool) -> list[str]:
    from shoal.forms.supply import price_text

    least = f"{one.least}-" if one.least else ""
    cost = price_text(one.cost) + (f" of {price_text(one.ceiling)}" if one.ceiling else "")
    return [
        one.name,
        one.engine,
        str(one.nodes),
        str(one.coming),
        f"{least}{one.most}",
        *([cost] if priced else []),
        one.kind,
        one.state,
    ]


def _order_row(order: OrderView, now_ms: int) -> list[str]:
    from shoal.forms.units import duration_text

    nodes = f"{len(order.joined)} of {len(order.nodes)}"
    return [
        order.id,
        order.supply,
        order.phase,
        nodes,
        duration_text(now_ms - order.at_ms),
        order.handle or "-",
        order.reason or order.why,
    ]
