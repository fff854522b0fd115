"""The network between nodes: what they are asked to measure, what they measured, what follows."""

from __future__ import annotations

from typing import Annotated

import msgspec

# A tour of n nodes takes n rounds, and each node hears of all others.
TOUR_NODES_MAX = 1_024
NOTE_MAX = 300
SLOTS_MAX = 64
SLOT_MS = 5_000  # in which pairs of halves meet: one direction, then the other
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
    # Halves against halves: instead of the rounds, whom this host meets in each slot (-1: nobody),
    # and when the first of them begins.
    slots: Annotated[tuple[int, ...], msgspec.Meta(max_length=SLOTS_MAX)] = ()
    at_ms: int = 0


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Pairs of hosts across the middle of a group. The first `alone` of them measure one at a time,
    from slot `first` on, and all of them in slot `together`."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    first: int = 0
    alone: int = 0
    together: int = 0


class Pair(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one host measured with another. Rates are MB/s; `back` is toward this host. Latencies
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
    halves: bool = False  # instead of all links, what is carried between halves of the nodes


# Rates and sizes in words: 940 MB/s, 12.5 GB/s, 64 KiB.


KILO = 1000


def rate_text(mbs: float) -> str:
    """Decimal, as disks and networks are sold."""
    return f"{amount_text(mbs)}/s"


def amount_text(mb: float) -> str:
    """At most three figures, from megabytes."""
    for unit in ("MB", "GB", "TB"):
        if mb < KILO or unit == "TB":
            break
        mb /= KILO
    figures = f"{mb:.0f}" if mb >= 100 or mb == int(mb) else f"{mb:.1f}" if mb >= 1 else f"{mb:.2g}"
    return f"{figures} {unit}"


def size_text(size_bytes: int) -> str:
    """Binary, as messages are sized."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


# What people see of the network between nodes.


class LinkView(msgspec.Struct, frozen=True, array_like=True):
    """Between two nodes; MB/s there and back. `fault`: why there are no figures."""

    a: str
    b: str
    latency_us: int = 0
    mbs: int = 0
    back_mbs: int = 0
    fault: str = ""


class HalvesView(msgspec.Struct, kw_only=True):
    """A cut: what its pairs carry at the same moment, in the direction that is further below the
    plan, which is what they carry one at a time."""

    name: str
    one: list[str] = []
    other: list[str] = []
    mbs: int = 0
    plan_mbs: int = 0
    problem: str = ""


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
    verdict: str = ""  # the whole in one sentence
    halves: list[HalvesView] = []
    running: str = ""  # the tour that is under way, in an answer about the last one


class NetworkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    nodes: list[str] = []
    collectives: bool = False
    halves: bool = False
