"""The network between nodes: what they are asked to measure, what they measured, what follows."""

from __future__ import annotations

from typing import Annotated

import msgspec

# A tour of n nodes takes n rounds, and each node hears of all others.
TOUR_NODES_MAX = 1_024
NOTE_MAX = 300
Size = Annotated[int, msgspec.Meta(ge=0)]


class Host(msgspec.Struct, frozen=True, array_like=True):
    """A node on a tour, and where it listens during the tour."""

    node: str
    address: str
    port: int


class Tour(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Meet each other host once, in rounds: in every round a host meets one other at most. All
    hosts get the same list and differ in `own`, so they agree on the rounds without a word."""

    hosts: Annotated[tuple[Host, ...], msgspec.Meta(max_length=TOUR_NODES_MAX)]
    own: int  # the place of this node in `hosts`
    key: str = ""  # hosts prove to each other that they know it
    pair_ms: int = 250  # how long a pair measures in each direction
    start_ms: int = 30_000  # for so long a host that has not started is waited for
    limit_ms: int = 60_000  # the whole tour; what is not measured by then stays unknown
    collectives: bool = False  # then also all-reduce and others, with torch, over all hosts
    gpus: int = 0  # of this node, for collectives; 0: on CPUs


class Pair(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one host measured with another. Rates are MB/s; `back` is towards this host. Latencies
    are one way, the median and the least of many. `fault` says why the two could not meet; then
    the figures are 0."""

    peer: str
    latency_us: Size = 0
    mbs: Size = 0
    back_mbs: Size = 0
    fault: str = ""
    least_us: Size = 0


class Collective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size of one collective: the bandwidths as nccl-tests defines them, in MB/s."""

    name: str  # all-reduce, all-gather, all-to-all
    size_bytes: Size
    ranks: Size
    took_us: Size
    algorithm_mbs: Size
    bus_mbs: Size
    backend: str = ""  # nccl or gloo


class Weak(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A link, or (`peer` empty) all links of a node, below what is usual; or one that failed."""

    node: str
    peer: str = ""
    mbs: Size = 0
    usual_mbs: Size = 0
    why: str = ""


class Tier(msgspec.Struct, frozen=True, array_like=True):
    """What is usual between nodes that are equally near; 0: not known."""

    mbs: Size = 0
    latency_us: Size = 0


class Fabric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the last tours showed. `places` is each measured node's path in the topology that was
    found, outermost first, as in `NodeSpec.place`."""

    id: str = ""
    at_ms: int = 0
    places: dict[str, str] = {}
    usual_mbs: Size = 0  # between nodes of the same group; the median
    usual_latency_us: Size = 0
    weak: tuple[Weak, ...] = ()
    # Between nodes that share nothing of their paths, the block, and the rack.
    tiers: tuple[Tier, ...] = ()


class CheckNetwork(msgspec.Struct, frozen=True):
    """Measure the network between these nodes, or between all that are ready; the answer's id is
    the tour's. One tour runs at a time."""

    nodes: tuple[str, ...] = ()
    collectives: bool = False
    who: str = "a user"
