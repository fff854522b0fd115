"""What people see of supplies and orders: the answer of `/v1/supply`."""

from __future__ import annotations

import msgspec


class SupplyView(msgspec.Struct, kw_only=True):
    """Prices are in millionths per hour. `state` is a clause: what it does, or why it brings no
    more nodes now."""

    name: str
    engine: str
    kind: str  # what each node has
    nodes: int  # that have joined and are not lost
    coming: int  # that were asked for and have not joined
    leaving: int  # of orders that are being given back
    least: int
    most: int
    price: int
    cost: int  # of all its nodes together
    ceiling: int
    state: str
    failures: int = 0  # in a row
    next_try_ms: int = 0  # after failures; 0: at any time


class OrderView(msgspec.Struct, kw_only=True):
    id: str
    supply: str
    engine: str
    nodes: list[str]
    joined: list[str]
    phase: str  # asked, pending, running, or releasing
    reason: str  # the supplier's own word, or why it is given back
    handle: str  # what to look for at the supplier
    why: str  # why it was placed
    at_ms: int
    price: int  # of all its nodes


class SuppliesView(msgspec.Struct, kw_only=True):
    now_ms: int
    currency: str = ""
    supplies: list[SupplyView]
    orders: list[OrderView]  # oldest first
