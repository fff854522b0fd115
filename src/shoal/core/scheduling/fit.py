"""Where a gang fits: all of its members or none."""

from __future__ import annotations

from itertools import islice

from shoal.core.state import Room, State
from shoal.model.resources import Demand, Slice


def fit(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    """Pairs of (node index, members placed there), or None if the gang does not fit now.

    The tightest single node that holds the whole gang wins, so that large holes stay whole;
    if there is none, the emptiest nodes first, so that the gang touches as few as possible.
    """
    if _hopeless_by_gpus(state, members, demand):
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


def _hopeless_by_gpus(state: State, members: int, demand: Demand) -> bool:
    """A bound from bucket sizes alone, without looking at any node."""
    if not demand.gpus:
        return False
    bound = 0
    for gpus in range(demand.gpus, len(state.free.buckets)):
        bound += len(state.free.buckets[gpus]) * (gpus // demand.gpus)
        if bound >= members:
            return False
    return True


def _on_one_node(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    rooms = state.rooms
    for bucket in state.free.buckets[members * demand.gpus :]:
        for index in bucket:
            if rooms[index].holds(demand) >= members:
                return [(index, members)]
    return None


def _over_many(state: State, members: int, demand: Demand) -> list[tuple[int, int]] | None:
    plan: list[tuple[int, int]] = []
    missing = members
    rooms = state.rooms
    for bucket in reversed(state.free.buckets[demand.gpus :]):
        for index in bucket:
            count = min(missing, rooms[index].holds(demand))
            if count:
                plan.append((index, count))
                missing -= count
                if not missing:
                    return plan
    return None
