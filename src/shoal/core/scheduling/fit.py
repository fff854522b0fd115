"""Where a gang fits: all of its members or none, close together, on nodes the policy prefers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from shoal.core.scheduling.score import PLACEMENTS, Score
from shoal.core.state.queue import Gang
from shoal.core.state.room import Domain, FreeIndex, Level
from shoal.core.state.state import State
from shoal.model.job import Within
from shoal.model.resources import Demand, Kind, Slice, plural

# A gang over several nodes goes to the tightest rack (block) that holds it. At most this many are
# tried, or all of them if it has to stay within one.
DOMAINS_TRIED_MAX = 16
# Up to this many nodes with room are counted by rack (block); above it, the tightest are tried.
SPARSE_MAX = 128
NO_CONTAINERS = "no node can run images: install podman, docker or apptainer"


class GangFit(NamedTuple):
    """Pairs of (node index, members placed there), and the rule that chose them."""

    nodes: list[tuple[int, int]]
    rule: str


def fit(state: State, gang: Gang, avoid: Collection[int] = ()) -> GangFit | None:
    """The whole gang or None. On one node if one holds it, else in one rack, else in one block,
    else anywhere, within the limit that the gang sets."""
    score = PLACEMENTS[state.policy.placement]
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
        return _over_many(state.cluster, gang, avoid, "the emptiest nodes")
    return None


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
    for kind, index in domain.free.items():
        if index.levels and demand.suits(kind):
            yield kind, index


def members_here(gang: Gang, kind: Kind, level: Level) -> int:
    """How many members a node of this kind on this level takes."""
    if gang.whole_nodes and level[:3] != kind[:3]:
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
    for kind, index in _suitable(domain, demand):
        share = demand.share_milli(kind)
        for level in index.fitting(demand, share, members):
            if gang.whole_nodes and level[:3] != kind[:3]:
                continue
            node = _first(index.nodes[level], avoid)
            if node is None:
                continue
            found = (score(state, kind, level, level.minus(demand, share, members)), node)
            if best is None or found < best:
                best = found
    if best is None:
        return None
    placement = state.policy.placement
    rule = "best fit" if placement == "shoal" else f"chosen by {placement}"
    return GangFit([(best[1], members)], rule)


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
        rule = f"the tightest {name} that holds it, {place}"
        plan = _over_many(division.domains[place], gang, avoid, rule)
        if plan is not None:
            return plan
    return None


def _over_many(domain: Domain, gang: Gang, avoid: Collection[int], rule: str) -> GangFit | None:
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
        for node in index.nodes[level]:
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


def shortage(state: State, gang: Gang) -> str:
    """What is missing for the gang now, in numbers; empty if it fits."""
    members = gang.members
    need = f"needs {plural(members, 'member')} with {gang.demand}" + (
        " each" if members > 1 else ""
    )
    if gang.required and gang.within is not Within.ANYWHERE:
        return _shortage_within(state, gang, need)
    room = room_for(state.cluster, gang, members)
    if room >= members:
        return ""
    if room:
        return f"{need}; there is room for {room} now"
    if members == 1:
        return f"no node has {gang.demand} free{_best_node(state, gang)}"
    return f"{need}; no node has room for one{_best_node(state, gang)}"


def _shortage_within(state: State, gang: Gang, need: str) -> str:
    word = gang.within.value
    best: Callable[[Domain], int] = lambda domain: room_for(domain, gang, gang.members)  # noqa: E731
    rooms = [
        members_here(gang, room.kind, room.level)
        for node, room in zip(state.order, state.rooms, strict=True)
        if node.schedulable and gang.demand.suits(room.kind)
    ]
    if gang.within is not Within.NODE:
        depth = 2 if gang.within is Within.RACK else 1
        rooms += [best(domain) for domain in state.divisions[depth - 1].domains.values()]
    most = max(rooms, default=0)
    if most >= gang.members:
        return ""
    return f"{need} in one {word}; the best {word} has room for {most}"


def _best_node(state: State, gang: Gang) -> str:
    levels = [
        level for _, index in _suitable(state.cluster, gang.demand) for level in index.levels[-1:]
    ]
    if not levels:
        can = any(kind.containers and index.levels for kind, index in state.cluster.free.items())
        return f": {NO_CONTAINERS}" if gang.demand.image and not can else ""
    best = max(levels)
    return f": the emptiest has {Demand(best.gpus, best.cpu_milli, best.memory_mb)}"
