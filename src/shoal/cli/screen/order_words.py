"""What happened to an order of nodes, as a sentence."""

from __future__ import annotations

from typing import assert_never

from shoal.model.events import NodesOrdered, OrderChanged, OrderEnded, OrderUnused
from shoal.model.resources import plural


def about_order(event: NodesOrdered | OrderChanged | OrderEnded | OrderUnused) -> str:
    match event:
        case NodesOrdered():
            many = plural(len(event.nodes), "node")
            return f"asks {event.supply.name} for {many}{_because(event.why)}"
        case OrderChanged():
            if event.release:
                return f"is given back{_because(event.release)}"
            return f"is {event.phase.value} at its supplier{_because(event.reason)}"
        case OrderEnded():
            return f"of {event.supply} {'failed' if event.failed else 'ended'}{_because(event.why)}"
        case OrderUnused():
            return "is not used" if event.since_ms is not None else "is used or awaited again"
        case _:
            assert_never(event)


def _because(why: str) -> str:
    return f": {why}" if why else ""
