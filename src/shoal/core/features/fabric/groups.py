"""Which nodes are near each other, found from measured links alone.

Nodes are merged by average linkage, always the two clusters that are nearest to each other. Where
the next merge is much less near than those before, one level of the topology ends. Bandwidth
decides; where it is the same everywhere, latency does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shoal.core.features.fabric.links import Rows, Table, quantile
from shoal.model.fabric import Fabric

# A level ends where the links between clusters have at most this part of those within them. Noise
# of 20 % alone makes two thirds of a link.
APART_MILLI = 650
LEVELS_MAX = 2  # block and rack
# A node whose best link is below this part of what most nodes have shows no wiring of its own.
ALONE_MILLI = 500
ALONE_SHARE_MILLI = 250  # more nodes of that kind are a part of the topology
# A node belongs to the group with the lowest latency if that is at most this part of the next.
CLEARLY_MILLI = 800
NEARNESS = 1_000_000_000  # divided by a latency: a nearness as large as a rate

Clusters = list[list[int]]  # members in order, and the clusters by their first


class Merge(NamedTuple):
    nearness: int
    members: list[int]


def places_of(
    table: Table, before: Mapping[str, str] | None = None, typed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The path of each node that was measured, such as `m1/r2`. Groups keep the names that most of
    their nodes had `before`; `typed` are the places that people gave."""
    before = before or {}
    near = table.faster
    nodes = [node for node in range(len(near)) if any(near[node])]
    if not nodes:
        return {}
    alone = _alone(near, nodes) | _fallen(table, near, nodes, before)
    tree = _levels(table, near, [node for node in nodes if node not in alone], alone)
    priors = (before, typed or {})
    for node in alone:
        _attach(table, near, tree, node, priors)
    return _named(table, tree, before)


def joined_places(table: Table, before: Fabric, about: str = "") -> dict[str, str]:
    """Of nodes that have no place yet and met some that have one: the group that they are nearest
    to. One that is as near to no group as its members are to each other is in none. The node that
    the tour is `about` may have got its place while its links were ill."""
    found: dict[str, str] = {}
    within = before.tiers[-1].mbs if before.tiers else 0
    for node, name in enumerate(table.names):
        if name in before.places and name != about:
            continue
        rates: dict[str, list[int]] = {}
        for other, rate in enumerate(table.faster[node]):
            place = before.places.get(table.names[other])
            if rate and place and table.names[other] != about:
                rates.setdefault(place, []).append(rate)
        best = max(((quantile(some, 500), place) for place, some in rates.items()), default=(0, ""))
        if best[0] and best[0] * 1000 > within * APART_MILLI:
            found[name] = best[1]
    return found


def _alone(near: Rows, nodes: list[int]) -> dict[int, None]:
    """Nodes without one link that is as fast as those of others: they are ill, or the only one of
    their group."""
    best = {node: max(near[node]) for node in nodes}
    bound = quantile(list(best.values()), 500) * ALONE_MILLI
    found = {node: None for node in nodes if best[node] * 1000 < bound}
    return found if len(found) * 1000 <= len(nodes) * ALONE_SHARE_MILLI else {}


def _fallen(
    table: Table, near: Rows, nodes: list[int], before: Mapping[str, str]
) -> dict[int, None]:
    """Nodes that were in a group, of which most are as near to each other as groups are, while they
    themselves have no fast link to anybody: they are ill, and show no wiring. Among few nodes they
    are too large a part to be found by `_alone`."""
    groups: dict[str, list[int]] = {}
    for node in nodes:
        groups.setdefault(before.get(table.names[node], ""), []).append(node)
    groups.pop("", None)
    found: dict[int, None] = {}
    for group in groups.values():
        within = [max((near[one][two] for two in group if two != one), default=0) for one in group]
        bound = quantile(within, 500) * ALONE_MILLI
        ill = [node for node in group if max(near[node]) * 1000 < bound]
        if 2 * len(ill) < len(group):
            found |= dict.fromkeys(ill)
    return found


def _levels(table: Table, near: Rows, nodes: list[int], alone: dict[int, None]) -> list[Clusters]:
    """Blocks, each a list of racks. Latency may show more nodes that are `alone`."""
    cuts = _cuts(near, nodes)
    if not cuts:
        waits = _by_latency(table)
        late = _alone(waits, nodes)
        cuts = _cuts(waits, [node for node in nodes if node not in late])
        if cuts and all(_distinct(table, cut) for cut in cuts):
            alone |= late
        else:
            cuts = []
    if not cuts:
        return [[nodes]]
    blocks, racks = cuts[-1], cuts[0]
    if len(cuts) == 1:
        return [[block] for block in blocks]
    return [[rack for rack in racks if rack[0] in set(block)] for block in blocks]


def _by_latency(table: Table) -> Rows:
    return [[NEARNESS // wait if wait else 0 for wait in row] for row in table.waits]


def _cuts(near: Rows, nodes: list[int]) -> list[Clusters]:
    """The levels that stand out, the innermost first."""
    merges = _merged(near, nodes)
    steps: list[tuple[int, int]] = []  # how much less near the next merge is, and the bound
    last = 0
    for nearness in sorted((merge.nearness for merge in merges), reverse=True):
        if last and nearness * 1000 <= last * APART_MILLI:
            steps.append((nearness * 1000 // last, last))
        last = nearness
    found: list[Clusters] = []
    for _, bound in sorted(steps):
        clusters = _cut(near, nodes, merges, bound)
        grouped = sum(len(cluster) for cluster in clusters if len(cluster) > 1)
        # Where most nodes are alone, there is no such level.
        if 2 * grouped >= len(nodes) and len(clusters) > 1 and clusters not in found:
            found.append(clusters)
        if len(found) == LEVELS_MAX:
            break
    return sorted(found, key=len, reverse=True)


def _cut(near: Rows, nodes: list[int], merges: list[Merge], bound: int) -> Clusters:
    root = {node: node for node in nodes}
    for merge in sorted(merges, key=lambda merge: len(merge.members)):
        if merge.nearness >= bound:
            first = min(merge.members)
            for node in merge.members:
                root[node] = first
    sizes = Counter(root.values())
    for node in nodes:
        # In a small group, one ill link is half of a node's links. The others show where it is.
        if sizes[root[node]] == 1:
            close = Counter(
                root[other]
                for other in nodes
                if near[node][other] * 1000 >= bound * CLEARLY_MILLI and sizes[root[other]] > 1
            )
            root[node] = min(close, key=lambda one: (-close[one], one), default=node)
    clusters: dict[int, list[int]] = {}
    for node in nodes:
        clusters.setdefault(root[node], []).append(node)
    return sorted(clusters.values())


def _merged(near: Rows, nodes: list[int]) -> list[Merge]:
    """Average linkage by a chain of nearest neighbors: quadratic in the nodes, and each of its
    operations is one on a whole row."""
    rows = [[near[a][b] for b in nodes] for a in nodes]
    members = [[node] for node in nodes]
    living = dict.fromkeys(range(len(nodes)))
    merges: list[Merge] = []
    chain: list[int] = []
    while len(living) > 1:
        if not chain:
            chain.append(next(iter(living)))
        tip = chain[-1]
        nearness = max(rows[tip])
        if len(chain) > 1 and rows[tip][chain[-2]] == nearness:
            other = chain[-2]
        else:
            other = rows[tip].index(nearness) if nearness else -1
        if other < 0:  # nothing is known between it and the rest
            living.pop(tip)
            chain.pop()
        elif len(chain) > 1 and other == chain[-2]:
            chain.pop()
            chain.pop()
            low, high = min(tip, other), max(tip, other)
            _join(rows, living, low, high, len(members[low]), len(members[high]))
            members[low] += members[high]
            merges.append(Merge(nearness, list(members[low])))
        else:
            chain.append(other)
    return merges


def _join(rows: Rows, living: dict[int, None], low: int, high: int, one: int, two: int) -> None:
    """Where only one of the two was measured with a third, that counts for both."""
    living.pop(high)
    total = one + two
    joined = [
        (a * one + b * two) // total or 1 if a and b else a or b
        for a, b in zip(rows[low], rows[high], strict=True)
    ]
    joined[low] = joined[high] = 0
    rows[low] = joined
    for other in living:
        rows[other][low] = joined[other]
        rows[other][high] = 0


def _distinct(table: Table, clusters: Clusters) -> bool:
    """Latencies vary with what else runs. Groups count only if nearly all links within them are
    faster than nearly all links between them."""
    group = {node: number for number, cluster in enumerate(clusters) for node in cluster}
    within: list[int] = []
    between: list[int] = []
    for one in group:
        row = table.waits[one]
        for two in group:
            if one < two and row[two]:
                (within if group[one] == group[two] else between).append(row[two])
    return quantile(within, 900) * 1000 < quantile(between, 100) * CLEARLY_MILLI


def _attach(
    table: Table,
    near: Rows,
    tree: list[Clusters],
    node: int,
    priors: tuple[Mapping[str, str], Mapping[str, str]],
) -> None:
    """A node whose bandwidth shows no group: its latency may, or where it was, or where people say
    it is. Otherwise it is in a group of its own if it is as far away as groups are."""
    racks = [rack for block in tree for rack in block]
    if (rack := _by_wait(table, racks, node)) is not None:
        rack.append(node)
        return
    names = table.names
    for prior in priors:
        own = prior.get(names[node], "")
        counts = [sum(prior.get(names[other]) == own for other in rack) for rack in racks]
        if own and any(counts):
            racks[counts.index(max(counts))].append(node)
            return
        if (
            own
            and prior is priors[0]
            and any(names[one] in prior for rack in racks for one in rack)
        ):
            tree.append([[node]])  # the others of its group are not here
            return
    typed = priors[1]
    elsewhere = typed.get(names[node]) and not any(
        typed.get(names[other], "") == typed[names[node]] for rack in racks for other in rack
    )
    rates = [
        quantile([near[node][other] for other in rack if near[node][other]], 500) for rack in racks
    ]
    if elsewhere or (len(racks) > 1 and max(rates) >= _between(near, racks) * ALONE_MILLI // 1000):
        tree.append([[node]])
        return
    racks[rates.index(max(rates))].append(node)


def _by_wait(table: Table, racks: Clusters, node: int) -> list[int] | None:
    if len(racks) == 1:
        return None
    waits = []
    for number, rack in enumerate(racks):
        known = [wait for other in rack if (wait := table.waits[node][other])]
        if known:
            waits.append((quantile(known, 500), number))
    waits.sort()
    clearly = len(waits) > 1 and waits[0][0] * 1000 <= waits[1][0] * CLEARLY_MILLI
    return racks[waits[0][1]] if clearly else None


def _between(near: Rows, racks: Clusters) -> int:
    """The usual rate between groups."""
    firsts = [rack[0] for rack in racks]
    return quantile([near[a][b] for a in firsts for b in firsts if a < b and near[a][b]], 500)


def _named(table: Table, tree: list[Clusters], before: Mapping[str, str]) -> dict[str, str]:
    """Names of nodes that this tour did not meet stay taken."""
    paths = {name: tuple(place.split("/")) for name, place in before.items()}
    found: dict[str, str] = {}
    members = [sorted(node for rack in block for node in rack) for block in tree]
    taken = {path[0] for path in paths.values()}
    blocks = _keep_names(_had(table, members, paths, 0), "m", members, taken)
    for block, name in zip(tree, blocks, strict=True):
        racks = [sorted(rack) for rack in block]
        # The names of racks are kept within a block that keeps its own.
        inside = {one: path for one, path in paths.items() if path[0] == name and len(path) > 1}
        taken = {path[1] for path in inside.values()}
        names = _keep_names(_had(table, racks, inside, 1), "r", racks, taken)
        for rack, own in zip(racks, names, strict=True):
            found |= {table.names[node]: f"{name}/{own}" for node in rack}
    return dict(sorted(found.items()))


def _had(
    table: Table, groups: Clusters, paths: Mapping[str, tuple[str, ...]], depth: int
) -> list[Counter[str]]:
    """How many members of each group had which name."""
    return [
        Counter(path[depth] for node in group if (path := paths.get(table.names[node])))
        for group in groups
    ]


def _keep_names(
    counts: list[Counter[str]], letter: str, members: Clusters, taken: set[str]
) -> list[str]:
    """The name that most members had, for the group with the most of them; then new ones."""
    names = [""] * len(counts)
    wishes = sorted(
        (-count, members[number], name, number)
        for number, counted in enumerate(counts)
        for name, count in counted.items()
    )
    used: set[str] = set()
    for _, _, name, number in wishes:
        if not names[number] and name not in used:
            names[number] = name
            used.add(name)
    fresh = (f"{letter}{number}" for number in range(1, len(names) + len(taken) + 1))
    for number in sorted(range(len(names)), key=lambda number: members[number]):
        if not names[number]:
            names[number] = next(name for name in fresh if name not in taken)
    return names
