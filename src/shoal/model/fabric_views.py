"""What people see of the network between nodes."""

from __future__ import annotations

import msgspec

from shoal.model.fabric import Collective, Weak


class LinkView(msgspec.Struct, frozen=True, array_like=True):
    """Between two nodes; MB/s there and back. `fault`: why there are no figures."""

    a: str
    b: str
    latency_us: int = 0
    mbs: int = 0
    back_mbs: int = 0
    fault: str = ""


class FabricView(msgspec.Struct, kw_only=True):
    """A tour, under way while `ended_ms` is None; links are shown when it has ended. Without an
    id: the network was never measured."""

    id: str
    nodes: list[str] = []
    answered: int = 0
    heard_from: list[str] = []  # the nodes that answered
    busy: list[str] = []  # jobs ran there meanwhile
    begun_ms: int = 0
    until_ms: int = 0  # it ends by then at the latest
    ended_ms: int | None = None
    links: list[LinkView] = []
    collectives: list[Collective] = []
    weak: list[Weak] = []
    outliers: list[str] = []  # `weak` in words
    places: dict[str, str] = {}
    usual_mbs: int = 0
    usual_latency_us: int = 0
    notes: list[str] = []
    errors: list[str] = []  # of nodes whose probe failed
    running: str = ""  # the tour that is under way, in an answer about the last one


class NetworkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    nodes: list[str] = []
    collectives: bool = False
