"""Which links and nodes are weak, beside links of the same kind.

The kind of a link is the two groups that it joins: a link between racks is never compared with one
inside a rack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.core.features.fabric.links import Rows, Table, quantile
from shoal.model.fabric import Tier, Weak

# A link is weak below half of what its kind has, or further below if the kind varies more: by this
# many times the median deviation. Below a tenth it is weak in any case.
WEAK_MILLI = 500
SCATTERS = 5
WEAK_MILLI_MIN = 100
# What a kind has is its upper quartile, so that one ill node of three does not make the measure.
WELL_MILLI = 750
# A latency is an outlier at this many times the usual one, and this much above it.
LATE_TIMES = 4
LATE_US = 300
# A node is weak if at least this share of its links are, or of those within its group.
NODE_MILLI = 600
# The rest must be well: where many links are weak at once, no node is to blame.
REST_MILLI = 333
WEAK_MAX = 64
SAMPLE = 4_096  # links from which the scatter is known

Key = tuple[int, int]


class Judged(NamedTuple):
    weak: tuple[Weak, ...]
    more: int  # weak links beyond those that are named
    tiers: tuple[Tier, ...]  # by how much of their paths two nodes share


class Kind(NamedTuple):
    """The links between two groups, or within one."""

    groups: Key
    depth: int
    rates: list[int]  # sorted
    waits: list[int]
    fair: bool  # no single node has a part in all of them


class Bad(NamedTuple):
    mbs: int
    usual_mbs: int
    why: str


def judge(table: Table, places: Mapping[str, str], known: Sequence[Tier] = ()) -> Judged:
    """`known`: the usual figures of an earlier tour, for kinds that this one cannot judge."""
    rates = table.slower
    groups = _groups(table, places)
    kinds = _kinds(table, rates, groups, places)
    usual = [_usual_at(kinds, depth, known) for depth in range(3)]
    bad: dict[Key, Bad] = {
        key: Bad(0, _usual_between(table, places, usual, key), fault)
        for key, fault in table.faults.items()
    }
    for kind in kinds:
        bad.update(_bad_of(table, rates, groups, kind, usual[kind.depth]))
    blamed = _blamed(rates, groups, bad)
    weak = [_weak_node(table, node, bad, links) for node, links in sorted(blamed.items())]
    single = [
        (one.mbs * 1000 // max(1, one.usual_mbs), key)
        for key, one in bad.items()
        if key[0] not in blamed and key[1] not in blamed
    ]
    for _, key in sorted(single)[: max(0, WEAK_MAX - len(weak))]:
        one = bad[key]
        weak.append(
            Weak(
                node=table.names[key[0]],
                peer=table.names[key[1]],
                mbs=one.mbs,
                usual_mbs=one.usual_mbs,
                why=one.why,
            )
        )
    more = len(blamed) + len(single) - len(weak)
    return Judged(tuple(weak), more, tuple(Tier(mbs, wait) for mbs, wait, _ in usual))


def _groups(table: Table, places: Mapping[str, str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for node, name in enumerate(table.names):
        found.setdefault(places.get(name, f"/{name}"), []).append(node)
    return list(found.values())


def shared(one: str, two: str) -> int:
    """How much of their paths two places share: 2 is the same rack."""
    if not one or not two:
        return 0
    if one == two:
        return 2
    return int(one.split("/")[0] == two.split("/")[0])


def _kinds(
    table: Table, rates: Rows, groups: list[list[int]], places: Mapping[str, str]
) -> list[Kind]:
    paths = [places.get(table.names[group[0]], "") for group in groups]
    found: list[Kind] = []
    for low, one in enumerate(groups):
        for high in range(low, len(groups)):
            two = groups[high]
            if low == high:
                pairs = [(one[:number], node) for number, node in enumerate(one) if number]
                fair = len(one) > 2
            else:
                pairs = [(two, node) for node in one]
                fair = len(one) > 1 and len(two) > 1
            mbs: list[int] = []
            waits: list[int] = []
            for others, node in pairs:
                row, wait = rates[node], table.waits[node]
                mbs += [row[other] for other in others if row[other]]
                waits += [wait[other] for other in others if wait[other]]
            if mbs:
                mbs.sort()
                waits.sort()
                depth = shared(paths[low], paths[high])
                found.append(Kind((low, high), depth, mbs, waits, fair and len(mbs) > 2))
    return found


Usual = tuple[int, int, int]  # MB/s, µs, and how much links scatter, in thousandths


def _usual_at(kinds: list[Kind], depth: int, known: Sequence[Tier]) -> Usual:
    """Of all links whose ends share this much of their paths."""
    here = [kind for kind in kinds if kind.depth == depth]
    fair = [kind for kind in here if kind.fair]
    if not fair:
        if depth < len(known) and known[depth].mbs:
            return known[depth].mbs, known[depth].latency_us, 0
        # Groups of two: their links together are a kind, if there are enough.
        every = [rate for kind in here for rate in kind.rates]
        if len(here) < 3 or not every:
            return 0, 0, 0
        waits = [wait for kind in here for wait in kind.waits]
        return quantile(every, WELL_MILLI), quantile(waits, 1000 - WELL_MILLI), 0
    mbs = quantile([_well(kind.rates, WELL_MILLI) for kind in fair], 500)
    waits = [_well(kind.waits, 1000 - WELL_MILLI) for kind in fair]
    scatter: list[int] = []
    each = max(8, SAMPLE // len(fair))
    for kind in fair:
        usual = _well(kind.rates, WELL_MILLI)
        sample = kind.rates[:: max(1, len(kind.rates) // each)]
        scatter += [abs(usual - one) * 1000 // usual for one in sample if one * 5 >= usual * 3]
    return mbs, quantile(waits, 500), quantile(scatter, 500)


def _well(ordered: list[int], milli: int) -> int:
    return ordered[min(len(ordered) - 1, len(ordered) * milli // 1000)]


def _usual_between(table: Table, places: Mapping[str, str], usual: list[Usual], key: Key) -> int:
    one, two = (places.get(table.names[node], "") for node in key)
    return usual[shared(one, two)][0]


def _bad_of(
    table: Table, rates: Rows, groups: list[list[int]], kind: Kind, usual: Usual
) -> dict[Key, Bad]:
    mbs = _well(kind.rates, WELL_MILLI) if kind.fair else usual[0]
    wait = _well(kind.waits, 1000 - WELL_MILLI) if kind.fair else usual[1]
    limit = mbs * max(WEAK_MILLI_MIN, min(WEAK_MILLI, 1000 - SCATTERS * usual[2]))
    late = max(LATE_TIMES * wait, wait + LATE_US) if wait else kind.waits[-1]
    if kind.rates[0] * 1000 >= limit and kind.waits[-1] <= late:
        return {}
    found: dict[Key, Bad] = {}
    low, high = (groups[number] for number in kind.groups)
    for one in low:
        for two in high:
            rate = rates[one][two]
            if not rate or (kind.groups[0] == kind.groups[1] and one >= two):
                continue
            key = (min(one, two), max(one, two))
            if rate * 1000 < limit:
                found[key] = Bad(rate, mbs, _slow(table, key, limit))
            elif table.waits[one][two] > late:
                why = f"latency of {table.waits[one][two]:,} µs, where {wait:,} µs is usual"
                found[key] = Bad(rate, mbs, why)
    return found


def _slow(table: Table, key: Key, limit: int) -> str:
    """Says so if only one direction is slow."""
    one, two = key
    forth, back = table.rates[one][two], table.rates[two][one]
    names = table.names
    if forth * 1000 < limit <= back * 1000:
        return f"slow from {names[one]} to {names[two]} only: {back:,} MB/s back"
    if back * 1000 < limit <= forth * 1000:
        return f"slow from {names[two]} to {names[one]} only: {forth:,} MB/s back"
    return "slow in both directions"


def _blamed(rates: Rows, groups: list[list[int]], bad: Mapping[Key, Bad]) -> dict[int, list[Key]]:
    """The worst node first; its links then speak neither for nor against others."""
    ill: dict[int, dict[int, Key]] = {}
    for key in bad:
        ill.setdefault(key[0], {})[key[1]] = key
        ill.setdefault(key[1], {})[key[0]] = key
    met: dict[int, set[int]] = {}
    near = {node: set(group) for group in groups for node in group}
    for node, others in ill.items():
        met[node] = {other for other, rate in enumerate(rates[node]) if rate} | set(others)

    def share(node: int) -> int:
        """Of its links to nodes that are not blamed, and of those within its group."""
        found = 0
        for candidates in (met[node], met[node] & near[node]):
            left = [other for other in candidates if other not in blamed]
            if len(left) > 1:
                hit = sum(other in ill[node] for other in left)
                found = max(found, hit * 1000 // len(left))
        return found

    blamed: dict[int, list[Key]] = {}
    while ill:
        rank = [(share(node), len(ill[node]), -node) for node in ill if node not in blamed]
        if not rank or max(rank)[0] < NODE_MILLI:
            break
        node = -max(rank)[2]
        blamed[node] = [key for other, key in ill[node].items() if other not in blamed]
    nodes = [node for node, row in enumerate(rates) if any(row) or node in ill]
    if 2 * len(blamed) > len(nodes) or not _rest_is_well(rates, nodes, bad, blamed):
        return {}
    return blamed


def _rest_is_well(
    rates: Rows, nodes: list[int], bad: Mapping[Key, Bad], blamed: Mapping[int, object]
) -> bool:
    left = [node for node in nodes if node not in blamed]
    hit = sum(one not in blamed and two not in blamed for one, two in bad)
    links = sum(sum(1 for other in left if rates[node][other]) for node in left) // 2 if hit else 1
    if not hit:
        return any(rates[one][two] for one in left[:3] for two in left if one != two)
    return hit * 1000 <= links * REST_MILLI


def _weak_node(table: Table, node: int, bad: Mapping[Key, Bad], links: list[Key]) -> Weak:
    faults = sum(key in table.faults for key in links)
    slow = [bad[key] for key in links if key not in table.faults]
    met = sum(map(bool, table.rates[node])) + sum(node in key for key in table.faults)
    mbs = quantile([one.mbs for one in slow], 500)
    usual = quantile([bad[key].usual_mbs for key in links], 500)
    parts = []
    if slow:
        name = table.names[node]
        sends = sum(f"from {name} to" in one.why for one in slow)
        takes = sum(f"to {name} only" in one.why for one in slow)
        late = sum(one.why.startswith("latency") for one in slow)
        what = "slow"
        for count, word in (
            (sends, "slow when it sends"),
            (takes, "slow when it receives"),
            (late, "late"),
        ):
            what = word if 2 * count > len(slow) else what
        parts.append(f"{len(slow)} of its {met} links are {what}")
    if faults:
        parts.append(f"{faults} of its {met} links failed ({bad[_fault(table, links)].why})")
    return Weak(node=table.names[node], mbs=mbs, usual_mbs=usual, why=" and ".join(parts)[:300])


def _fault(table: Table, links: list[Key]) -> Key:
    return next(key for key in links if key in table.faults)
