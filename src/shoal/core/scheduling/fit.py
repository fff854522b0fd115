"""Where a gang fits: all of its members or none."""

from __future__ import annotations

from itertools import islice

from shoal.core.state import UNLIMITED, Room, State
from shoal.model.resources import Demand, Slice


def fit(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    """Pairs of (node index, members placed there), or None if the gang does not fit now.

    The tightest single node that holds the whole gang wins, so that large holes stay whole;
    if there is none, the emptiest nodes first, so that the gang touches as few as possible.
    """
    if _bound(state, members, demand) < members:
        return None
    return _on_one_node(state, members, demand) or _over_many(state, members, demand)


def slices(state: State, plan: list[tuple[int, int]], demand: Demand) -> tuple[Slice, ...]:
    """The plan in concrete GPUs: the lowest free ones of each node."""
    result = []
    for index, count in plan:
        gpus = iter(free_gpus(state.rooms[index]))
        for _ in range(count):
            mine = tuple(islice(gpus, demand.gpus))
            result.append(Slice(state.order[index].id, mine, demand.cpu_milli, demand.memory_mb))
    return tuple(result)


def free_gpus(room: Room) -> list[int]:
    bits, found = room.gpu_bits, []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _bound(state: State, members: int, demand: Demand) -> int:
    """At most this many members fit (counted up to `members`), without looking at any node."""
    gpus, cpu_milli, _ = demand
    bound = 0
    for level in state.free.at_least(gpus, cpu_milli):
        by_gpus = level.gpus // gpus if gpus else UNLIMITED
        by_cpus = level.cpu_milli // cpu_milli if cpu_milli else UNLIMITED
        bound += len(state.free.nodes[level]) * min(by_gpus, by_cpus)
        if bound >= members:
            break
    return bound


def _on_one_node(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    rooms = state.rooms
    for level in state.free.at_least(members * demand.gpus, members * demand.cpu_milli):
        for index in state.free.nodes[level]:
            if rooms[index].holds(demand) >= members:
                return [(index, members)]
    return None


def _over_many(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    plan: list[tuple[int, int]] = []
    missing = members
    rooms = state.rooms
    for level in reversed(state.free.at_least(demand.gpus, demand.cpu_milli)):
        for index in state.free.nodes[level]:
            count = min(missing, rooms[index].holds(demand))
            if count:
                plan.append((index, count))
                missing -= count
                if not missing:
                    return plan
    return None
