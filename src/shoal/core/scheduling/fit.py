"""Where a gang fits: all of its members or none, close together, on nodes the policy prefers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from shoal.core.books.grouping import cost
from shoal.core.state.queue import Gang
from shoal.core.state.room import Domain, FreeIndex, Level
from shoal.core.state.state import Node, Score, State
from shoal.model.job import Within
from shoal.model.policy import Places
from shoal.model.resources import WHOLE_GPU_MILLI, Demand, Kind, Slice, plural

# A gang over several nodes goes to the tightest rack (block) that holds it. At most this many are
# tried, or all of them if it has to stay within one.
DOMAINS_TRIED_MAX = 16
# Up to this many nodes with room are counted by rack (block); above it, the tightest are tried.
SPARSE_MAX = 128
EQUALS_TRIED_MAX = 8  # of nodes with the same room, to find one whose free GPUs are joined well
NAMED_MAX = 8  # values of a label in the reason for a placement
NO_CONTAINERS = "no node can run images: install podman, docker or apptainer"


class GangFit(NamedTuple):
    """Pairs of (node index, members placed there), the rule that chose them, and what was left out
    of it because it is in doubt."""

    nodes: list[tuple[int, int]]
    rule: str
    off: str = ""


def fit(
    state: State, gang: Gang, avoid: Collection[int] = (), kept: Iterable[Slice] = ()
) -> GangFit | None:
    """The whole gang or None. On one node if one holds it, else in one rack, else in one block,
    else anywhere, within the limit that the gang sets. `kept`: what other members of it hold."""
    demand = gang.demand
    whole = demand.gpus if demand.gpu_milli == WHOLE_GPU_MILLI else 0
    if gang.members * whole > state.cluster.gpus:
        return None
    if gang.together:
        return _with_one_value(state, gang, avoid)
    if gang.spread and not gang.bound:
        plan = _evenly(state, gang, avoid, kept)
        if plan is not None:
            return plan
    return _nearby(state, gang, avoid)


def _nearby(state: State, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    score = state.functions.placement(state.policy.placement)
    if not gang.per_node or gang.per_node == gang.members:
        plan = _on_one_node(state, state.cluster, gang, score, avoid)
        if plan is not None:
            return plan
    if gang.required and gang.within is Within.NODE:
        return None
    if gang.members > 1 and room_for(state.cluster, gang, gang.members) == gang.members:
        sparse = _sparse(state, gang)
        for depth, name in ((2, "rack"), (1, "block")):
            plan = _in_one_domain(state, gang, depth, name, avoid, sparse)
            if plan is not None or (gang.required and gang.within.value == name):
                return plan
        return _over_many(state, state.cluster, gang, avoid, "the emptiest nodes")
    return None


def narrowed(gang: Gang, key: str, value: str) -> Gang:
    """The same gang, on nodes with this value of the label only."""
    demand = gang.demand._replace(where=(*gang.demand.where, f"{key}={value}"))
    return gang._replace(demand=demand, spread="" if key == gang.spread else gang.spread)


def _with_one_value(state: State, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    """On nodes with one value of the label: the one whose nodes hold it with the least to spare."""
    key = gang.together
    rooms = _room_by_value(state, gang, key, avoid)
    for room, value in sorted((room, value) for value, room in rooms.items()):
        if room >= gang.members:
            plan = fit(state, narrowed(gang, key, value)._replace(together=""), avoid)
            if plan is not None:
                return plan._replace(rule=f"{plan.rule}, all with {key}={value}")
    return None


def _evenly(
    state: State, gang: Gang, avoid: Collection[int], kept: Iterable[Slice]
) -> GangFit | None:
    """As evenly as possible over the values of the label. None if the nodes that have the label
    cannot hold it."""
    key, unit = gang.spread, gang.per_node or 1
    rooms = _room_by_value(state, gang, key, avoid)
    if sum(rooms.values()) < gang.members:
        return None
    there = Counter(state.nodes[slice_.node].labels.get(key) for slice_ in kept)
    line = [(there[value], -room, value) for value, room in rooms.items()]
    heapq.heapify(line)  # the value with the fewest members first, then the one with the most room
    counts: dict[str, int] = {}
    missing = gang.members
    while missing and line:
        members, room, value = heapq.heappop(line)
        if -room >= unit:
            counts[value] = counts.get(value, 0) + unit
            missing -= unit
            heapq.heappush(line, (members + unit, room + unit, value))
    nodes: list[tuple[int, int]] = []
    for value, count in sorted(counts.items()):
        plan = _nearby(state, narrowed(gang, key, value)._replace(members=count), avoid)
        if plan is None:
            return None
        nodes += plan.nodes
    over = ", ".join(f"{count} in {value}" for value, count in sorted(counts.items())[:NAMED_MAX])
    return GangFit(nodes, f"spread over {key}: {over}") if not missing else None


def _room_by_value(state: State, gang: Gang, key: str, avoid: Collection[int]) -> dict[str, int]:
    """How many members the nodes with each value of the label hold now."""
    rooms: dict[str, int] = {}
    for kind, index in _suitable(state.cluster, gang.demand):
        value = _value_of(kind, key)
        if value is None:
            continue
        for level in index.fitting(gang.demand, gang.demand.share_milli(kind)):
            each = min(members_here(gang, kind, level), gang.members)
            nodes = index.nodes[level]
            count = sum(node not in avoid for node in nodes) if avoid else len(nodes)
            rooms[value] = rooms.get(value, 0) + each * count
    return rooms


def values_of(state: State, key: str) -> list[str]:
    """The values of a label that some job spreads over, on open nodes."""
    values = {_value_of(kind, key) for kind, index in state.cluster.free.items() if index.levels}
    return sorted(value for value in values if value is not None)


def _value_of(kind: Kind, key: str) -> str | None:
    start = f"{key}="
    return next((word[len(start) :] for word in kind.labels if word.startswith(start)), None)


def slices(state: State, plan: GangFit, demand: Demand) -> tuple[Slice, ...]:
    """The plan in concrete GPUs."""
    return tuple(
        Slice(state.order[index].id, gpus, demand.cpu_milli, demand.memory_mb, share)
        for index, count in plan.nodes
        for gpus, share in state.rooms[index].pick(demand, count)
    )


def room_for(domain: Domain, gang: Gang, limit: int) -> int:
    """How many members of the gang fit into the domain now, counted up to `limit`."""
    total = 0
    for kind, index in _suitable(domain, gang.demand):
        for level in index.fitting(gang.demand, gang.demand.share_milli(kind)):
            each = members_here(gang, kind, level)
            total += each * len(index.nodes[level])
            if total >= limit:
                return limit
    return total


def _suitable(domain: Domain, demand: Demand) -> Iterator[tuple[Kind, FreeIndex]]:
    """Kinds with a node that may have enough GPUs. Most kinds of a full cluster have none, and
    there are many kinds if jobs ask about many labels."""
    gpus = demand.gpus if demand.gpu_milli == WHOLE_GPU_MILLI else 0
    for kind, index in domain.free.items():
        if index.levels and index.levels[-1][0] >= gpus and demand.suits(kind):
            yield kind, index


def members_here(gang: Gang, kind: Kind, level: Level) -> int:
    """How many members a node of this kind on this level takes."""
    if gang.whole_nodes and not level.unused(kind):
        return 0
    count = level.holds(gang.demand, gang.demand.share_milli(kind))
    if gang.per_node:
        return gang.per_node if count >= gang.per_node else 0
    return count


def _on_one_node(
    state: State, domain: Domain, gang: Gang, score: Score, avoid: Collection[int]
) -> GangFit | None:
    """The node that the policy's placement scores best; ties go by join order."""
    demand, members = gang.demand, gang.members
    best: tuple[tuple[float, ...], int] | None = None
    equals: list[int] = []
    for kind, index in _suitable(domain, demand):
        share = demand.share_milli(kind)
        for level in index.fitting(demand, share, members):
            if gang.whole_nodes and not level.unused(kind):
                continue
            node = _first(index.nodes[level], avoid)
            if node is None:
                continue
            found = (score(state, kind, level, level.minus(demand, share, members)), node)
            if best is None or found < best:
                best, equals = found, index.nodes[level]
    if best is None:
        return None
    in_turn = _joined(state, equals, demand, members)
    node = best[1] if in_turn is equals else _first(in_turn, avoid)
    assert node is not None
    placement = state.policy.placement
    rule = "best fit" if placement == "shoal" else f"chosen by {placement}"
    return GangFit([(node, members)], rule)


def _joined(state: State, nodes: list[int], demand: Demand, members: int) -> list[int]:
    """Nodes with the same room, in join order. If they differ in which of their GPUs are free and
    say how those are joined, the best of the first few come first: those that have whole groups
    for it, or scattered GPUs if that is all it needs."""
    gpus, room = demand.gpus * members, state.rooms[nodes[0]]
    if room.groups is None or not gpus or demand.gpu_milli != WHOLE_GPU_MILLI:
        return nodes
    if len(nodes) == 1 or room.level.gpus == room.kind.gpus:
        return nodes

    def worth(node: int) -> tuple[bool, tuple[int, ...]]:
        groups = state.rooms[node].groups
        return groups is None, cost(groups, state.rooms[node].free, gpus) if groups else ()

    return sorted(nodes[:EQUALS_TRIED_MAX], key=worth) + nodes[EQUALS_TRIED_MAX:]


def _first(nodes: list[int], avoid: Collection[int]) -> int | None:
    if not avoid:
        return nodes[0]
    return next((node for node in nodes if node not in avoid), None)


def _sparse(state: State, gang: Gang) -> list[tuple[int, int]] | None:
    """The nodes with room and how many members each holds; None if there are too many to count."""
    found: list[tuple[int, int]] = []
    for kind, index in _suitable(state.cluster, gang.demand):
        for level in index.fitting(gang.demand, gang.demand.share_milli(kind)):
            each = members_here(gang, kind, level)
            nodes = index.nodes[level]
            if each and len(found) + len(nodes) > SPARSE_MAX:
                return None
            if each:
                found += [(node, each) for node in nodes]
    return found


def _in_one_domain(
    state: State,
    gang: Gang,
    depth: int,
    name: str,
    avoid: Collection[int],
    sparse: list[tuple[int, int]] | None,
) -> GangFit | None:
    """The tightest rack or block with room for all of it."""
    division = state.divisions[depth - 1]
    need = gang.members * gang.demand.gpus * (gang.demand.gpu_milli == 1000)
    if sparse is None:
        places = division.with_gpus(need)
        if not gang.required:
            del places[DOMAINS_TRIED_MAX:]
    else:
        room: dict[str, int] = {}
        for node, each in sparse:
            for place in state.rooms[node].domains[depth - 1 : depth]:
                room[place] = room.get(place, 0) + each
        places = [place for place, members in room.items() if members >= gang.members]
        places.sort(key=lambda place: (division.domains[place].gpus, place))
    for place in places:
        measured = "measured " if state.policy.place is Places.MEASURED else ""
        rule = f"the tightest {measured}{name} that holds it, {place}"
        plan = _over_many(state, division.domains[place], gang, avoid, rule)
        if plan is not None:
            return plan
    return None


def _over_many(
    state: State, domain: Domain, gang: Gang, avoid: Collection[int], rule: str
) -> GangFit | None:
    """The emptiest nodes first, so that the gang uses as few as possible. A gang without GPUs takes
    the fullest first, so that it does not strand the GPUs of empty nodes."""
    if room_for(domain, gang, gang.members) < gang.members:
        return None
    plan: list[tuple[int, int]] = []
    missing = gang.members
    for kind, index, level in _levels_emptiest_first(domain, gang.demand):
        each = members_here(gang, kind, level)
        if not each:
            continue
        for node in _joined(state, index.nodes[level], gang.demand, min(missing, each)):
            if avoid and node in avoid:
                continue
            count = min(missing, each)
            if gang.per_node and count < gang.per_node:
                return None  # its size is not a multiple of its members per node
            plan.append((node, count))
            missing -= count
            if not missing:
                return GangFit(plan, rule)
    return None


def _levels_emptiest_first(domain: Domain, demand: Demand) -> list[tuple[Kind, FreeIndex, Level]]:
    found = [
        (kind, index, level)
        for kind, index in _suitable(domain, demand)
        for level in index.fitting(demand, demand.share_milli(kind))
    ]
    found.sort(key=lambda entry: entry[2], reverse=bool(demand.gpus))
    return found


def area_of(state: State, node: Node, gang: Gang) -> str:
    """The node's part of the cluster, for a gang that has to stay within one. A node without a
    place is its own rack and block."""
    area = node.labels.get(gang.together, "") if gang.together else ""
    if gang.required and gang.within is not Within.ANYWHERE:
        depth = {Within.BLOCK: 1, Within.RACK: 2}.get(gang.within, 0)
        domains = state.rooms[node.index].domains
        return f"{area}|{domains[depth - 1] if 0 < depth <= len(domains) else '/' + node.id}"
    return area


def shortage(state: State, gang: Gang) -> str:
    """What is missing for the gang now, in numbers; empty if it fits."""
    members = gang.members
    on = f" on nodes with {' and '.join(gang.demand.where)}" if gang.demand.where else ""
    each = " each" if members > 1 else ""
    need = f"needs {plural(members, 'member')} with {gang.demand}{each}{on}"
    if gang.bound:
        return _shortage_within(state, gang, need)
    room = room_for(state.cluster, gang, members)
    if room >= members:
        return ""
    if room:
        return f"{need}; there is room for {room} now"
    if members == 1:
        return f"no node{on[9:]} has {gang.demand} free{_best_node(state, gang)}"
    return f"{need}; no node has room for one{_best_node(state, gang)}"


def _shortage_within(state: State, gang: Gang, need: str) -> str:
    word = gang.within.value
    if gang.together:
        word = gang.together + (f" and {word}" if gang._replace(together="").bound else "")
    rooms: dict[str, int] = {}
    for node, room in zip(state.order, state.rooms, strict=True):
        if node.schedulable and gang.demand.suits(room.kind):
            area = area_of(state, node, gang)
            rooms[area] = rooms.get(area, 0) + members_here(gang, room.kind, room.level)
    most = max(rooms.values(), default=0)
    if most >= gang.members:
        return ""
    return f"{need} in one {word}; the best {word} has room for {most}"


def _best_node(state: State, gang: Gang) -> str:
    levels = [
        level
        for kind, index in state.cluster.free.items()
        if gang.demand.suits(kind)
        for level in index.levels[-1:]
    ]
    if not levels:
        can = any(kind.containers and index.levels for kind, index in state.cluster.free.items())
        return f": {NO_CONTAINERS}" if gang.demand.image and not can else ""
    return f": the emptiest has {_free_text(max(levels), gang.demand)}"


def _free_text(free: Level, demand: Demand) -> str:
    """What is short comes first, also if there is none of it."""
    shared = demand.gpu_milli != WHOLE_GPU_MILLI
    gpu_milli = free.gpu_milli if shared else free.gpus * WHOLE_GPU_MILLI
    wanted = demand.gpus * (demand.gpu_milli or WHOLE_GPU_MILLI)
    parts = [
        (gpu_milli >= wanted, _amount(gpu_milli, "GPU")),
        (free.cpu_milli >= demand.cpu_milli, _amount(free.cpu_milli, "CPU")),
        (free.memory_mb >= demand.memory_mb, f"{free.memory_mb} MB"),
    ]
    parts = parts if demand.gpus or free.gpus else parts[1:]
    return ", ".join(text for _, text in sorted(parts, key=lambda part: part[0]))


def _amount(milli: int, unit: str) -> str:
    return f"{milli / 1000:g} {unit}{'' if milli == 1000 else 's'}"
