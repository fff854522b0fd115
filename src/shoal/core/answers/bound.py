"""What limits a job's steps: compute, network, storage, input, or members that differ.

A gang steps together, so a member that is early waits in a collective for one that is late. Two
figures separate that from the transfer itself. Over a window, the member that waits least is the
one the others wait for. Within one member, the quickest of every few steps shows how long a
collective takes when no peer is late (`transfer_us`). The least of both over the gang is the
network's part; the rest of the waiting is imbalance (ADR 73).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.core.books.numbers import lower_median
from shoal.model.bound import Bound, BoundKind, Shares
from shoal.model.fabric import Fabric
from shoal.model.progress import Spent

STEPS_MIN = 8  # fewer show nothing
# Something other than the job's own work is named if it takes a quarter of a step or more.
LOSS_MILLI = 250
# Processes waited for storage during at least this share of the waiting for data.
STALLED_MILLI = 500
SHARE_SHOWN_MILLI = 20  # smaller shares are not listed
GPU_BUSY_MILLI = 700  # below this, compute-bound GPUs are said to be idle for a part of the time


class PerStep(NamedTuple):
    """Microseconds of a member in one of its steps."""

    compute: int
    wait: int
    transfer: int
    data: int
    save: int
    stalled: bool  # its waiting for data was waiting for storage

    @property
    def own(self) -> int:
        return self.compute + self.data + self.save


class Gang(NamedTuple):
    """Means over the members, in microseconds of a step."""

    members: Mapping[int, PerStep]
    steps: int
    whole: int
    compute: int
    network: int
    imbalance: int
    input: int
    storage: int
    gain: int  # what a step would save if its last member were as quick as most
    last: int  # the member that the others wait for


def judge(
    spent: Mapping[int, Spent],
    nodes: Sequence[str],
    *,
    busy_milli: int | None = None,
    fabric: Fabric | None = None,
    whole: bool = False,
) -> Bound | None:
    """`nodes` are those of the members. `busy_milli`: how busy the job's GPUs are, if that is
    known. `fabric`: what tours have measured of the network. `whole`: the counts are of a whole
    attempt. None: too few steps."""
    gang = divided(spent)
    if gang is None or gang.steps < STEPS_MIN:
        return None
    shares = shares_of(gang)
    kind = _kind(gang, shares)
    span = f"all {gang.steps} steps" if whole else f"last {gang.steps} steps"
    head = _head(kind, gang, nodes, span)
    evidence = [*_evidence(kind, gang, shares, nodes), *_gpus(kind, busy_milli)]
    if kind is BoundKind.NETWORK and fabric is not None:
        evidence += _links(fabric, set(nodes))
    return Bound(
        kind=kind,
        shares=shares,
        step_us=gang.whole,
        steps=gang.steps,
        text="; ".join([head, *evidence[:1]]),
        evidence=evidence,
    )


def divided(spent: Mapping[int, Spent]) -> Gang | None:
    """One pass, because a gang may have thousands of members and lists show many gangs."""
    members: dict[int, PerStep] = {}
    compute = waits = data = save = stalled = 0
    network = least = steps = -1  # -1: not known yet
    last = 0
    own: list[int] = []
    for number, one in spent.items():
        if one.steps <= 0:
            continue
        each = _per_step(one)
        own_us = each.compute + each.data + each.save
        if own_us + each.wait <= 0:
            continue
        members[number] = each
        own.append(own_us)
        compute, waits = compute + each.compute, waits + each.wait
        data, save = data + each.data, save + each.save
        stalled += each.data if each.stalled else 0
        steps = one.steps if steps < 0 else min(steps, one.steps)
        transfer = min(each.wait, each.transfer or each.wait)
        network = transfer if network < 0 else min(network, transfer)
        if least < 0 or (each.wait, number) < (least, last):
            least, last = each.wait, number
    if not members:
        return None
    count = len(members)
    return Gang(
        members=members,
        steps=steps,
        whole=(compute + waits + data + save) // count,
        compute=compute // count,
        network=network,
        imbalance=waits // count - network,
        input=(data - stalled) // count,
        storage=(save + stalled) // count,
        gain=members[last].own - lower_median(own) if count > 1 else 0,
        last=last,
    )


def shares_of(gang: Gang) -> Shares:
    network, imbalance, input_, storage = (
        us * 1000 // gang.whole for us in (gang.network, gang.imbalance, gang.input, gang.storage)
    )
    return Shares(
        compute_milli=1000 - network - imbalance - input_ - storage,
        network_milli=network,
        imbalance_milli=imbalance,
        input_milli=input_,
        storage_milli=storage,
    )


def _per_step(one: Spent) -> PerStep:
    return PerStep(
        one.compute_us // one.steps,
        one.wait_us // one.steps,
        one.transfer_us // one.steps,
        one.data_us // one.steps,
        one.save_us // one.steps,
        0 < one.data_us * STALLED_MILLI <= one.stall_us * 1000,
    )


def _kind(gang: Gang, shares: Shares) -> BoundKind:
    """The largest loss, if it is worth naming. A slow member costs the gang more than the mean of
    the waits, because its own time is in there, too."""
    losses = (
        (shares.network_milli, BoundKind.NETWORK),
        (shares.storage_milli, BoundKind.STORAGE),
        (shares.input_milli, BoundKind.INPUT),
        (max(shares.imbalance_milli, gang.gain * 1000 // gang.whole), BoundKind.IMBALANCE),
    )
    milli, kind = max(losses, key=lambda one: one[0])
    return kind if milli >= LOSS_MILLI or milli > shares.compute_milli else BoundKind.COMPUTE


def _head(kind: BoundKind, gang: Gang, nodes: Sequence[str], span: str) -> str:
    def part(us: int) -> str:
        return f"{us * 100 // gang.whole} % of each step"

    def figures(us: int) -> str:
        return f"({_ms(us)} of {_ms(gang.whole)} ms, {span})"

    match kind:
        case BoundKind.NETWORK:
            us, text = gang.network, "network-bound: {} is spent in collectives {}"
        case BoundKind.STORAGE:
            us, text = gang.storage, "storage-bound: {} is spent waiting for storage {}"
        case BoundKind.INPUT:
            us, text = gang.input, "input-bound: {} is spent waiting for data {}"
        case BoundKind.IMBALANCE if _steady(gang):
            who = member_text(gang.last, nodes)
            us, text = max(gang.imbalance, gang.gain), f"uneven: {who} costs the others {{}} {{}}"
        case BoundKind.IMBALANCE:
            us, text = gang.imbalance, "uneven: {} is spent waiting for the last member {}"
        case BoundKind.COMPUTE:
            us, text = gang.compute, "compute-bound: {} is the job's own work {}"
    return text.format(part(us), figures(us))


def _evidence(kind: BoundKind, gang: Gang, shares: Shares, nodes: Sequence[str]) -> list[str]:
    rest = _rest(kind, shares)
    last = gang.members[gang.last]
    match kind:
        case BoundKind.NETWORK if last.wait >= 2 * gang.network:
            found = [f"even in the quickest steps, a collective takes {_ms(gang.network)} ms"]
        case BoundKind.NETWORK:
            found = [
                f"{member_text(gang.last, nodes)} waits least, and it waits {_ms(last.wait)} ms: "
                "the network is the cause rather than a slow member"
            ]
        case BoundKind.STORAGE:
            found = _storage(gang)
        case BoundKind.IMBALANCE if _steady(gang):
            found = [_slow(gang, last)]
        case BoundKind.IMBALANCE:
            found = ["the last one differs from step to step, so no single member is the cause"]
        case _:
            found = []
    return [*found, rest] if rest else found


def _steady(gang: Gang) -> bool:
    """Is it mostly one member that the others wait for?"""
    waits = sum(one.wait for one in gang.members.values()) // len(gang.members)
    return 2 * (waits - gang.members[gang.last].wait) >= gang.imbalance


def _slow(gang: Gang, last: PerStep) -> str:
    """What the last member does for longer than the others."""
    others = [one for number, one in gang.members.items() if number != gang.last]
    _, mine, theirs, words = max(
        (one[0] - one[1], *one)
        for one in (
            (last.compute, lower_median(one.compute for one in others), "of its own work"),
            (last.data, lower_median(one.data for one in others), "of waiting for data"),
            (last.save, lower_median(one.save for one in others), "of saving"),
        )
    )
    return f"a step has {_ms(mine)} ms {words} there and {_ms(theirs)} ms on most others"


def _storage(gang: Gang) -> list[str]:
    save = sum(one.save for one in gang.members.values()) // len(gang.members)
    data, found = gang.storage - save, []
    if save:
        found.append(f"saves block it for {_ms(save)} ms of each step on average")
    if data > 0:
        found.append(
            f"for {_ms(data)} ms of each step it waits for data while its processes wait for disks"
        )
    return found if save >= data else found[::-1]


def _rest(kind: BoundKind, shares: Shares) -> str:
    """The other shares, largest first."""
    parts = (
        (shares.compute_milli, "its own work", BoundKind.COMPUTE),
        (shares.network_milli, "collectives", BoundKind.NETWORK),
        (shares.imbalance_milli, "waiting for late members", BoundKind.IMBALANCE),
        (shares.input_milli, "waiting for data", BoundKind.INPUT),
        (shares.storage_milli, "storage", BoundKind.STORAGE),
    )
    shown = sorted(
        (one for one in parts if one[2] is not kind and one[0] >= SHARE_SHOWN_MILLI),
        key=lambda one: -one[0],
    )
    return ", ".join(f"{milli // 10} % {words}" for milli, words, _ in shown)


def _gpus(kind: BoundKind, busy_milli: int | None) -> list[str]:
    if busy_milli is None:
        return []
    busy = f"its GPUs are busy {busy_milli // 10} % of the time"
    if kind is BoundKind.COMPUTE and busy_milli < GPU_BUSY_MILLI:
        return [f"{busy}, so a part of its own work is on CPUs"]
    return [busy]


def _links(fabric: Fabric, nodes: set[str]) -> list[str]:
    """Weak links between the job's nodes, or what links usually reach."""
    for weak in fabric.weak:
        if weak.node in nodes and (not weak.peer or weak.peer in nodes) and weak.mbs:
            link = f"between {weak.node} and {weak.peer}" if weak.peer else f"of {weak.node}"
            usual = f", where {weak.usual_mbs} MB/s are usual" if weak.usual_mbs else ""
            return [f"a tour measured only {weak.mbs} MB/s on the link {link}{usual}"]
    if len(nodes) < 2 or not fabric.usual_mbs or not nodes <= fabric.places.keys():
        return []
    return [
        f"a tour measured {fabric.usual_mbs} MB/s on usual links, and none of its links as weak"
    ]


def busiest(busy: Iterable[int | None]) -> int | None:
    """The mean over the GPUs that report it."""
    known = [one for one in busy if one is not None]
    return sum(known) // len(known) if known else None


def member_text(member: int, nodes: Sequence[str]) -> str:
    return f"member {member} on {nodes[member]}" if member < len(nodes) else f"member {member}"


def _ms(us: int) -> str:
    return f"{us / 1000:.0f}" if us >= 10_000 else f"{us / 1000:.1f}"
