"""Of the nodes with room now, those that already hold a job's volumes are preferred (ADR 132).

A job never waits for such a node: what another node lacks, it fetches from its neighbors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from shoal.core.scheduling.fit import GangFit
from shoal.core.state.queue import Gang
from shoal.core.state.room import Room
from shoal.core.state.state import State
from shoal.model.blocks import volume_key
from shoal.model.job import Job
from shoal.model.reason import quoted
from shoal.model.volume import Volume, parse

# A node that fits worse is taken only if that spares a transfer of this size, about a second, and
# if nobody waits for room.
WORTH_BYTES = 64 << 20
HOLDERS_MAX = 1_024  # of a volume are looked at; beyond that, a neighbor that has it is near
NAMED_MAX = 4  # in the reason for a placement


def near_data(state: State, job: Job, gang: Gang, avoid: Collection[int], plan: GangFit) -> GangFit:
    """The same plan on nodes that hold more of the job's volumes, if there are any. One node is
    exchanged for any that holds all of the gang; several, each for one like it in its rack."""
    held = _held(state, job)
    if not held:
        return plan
    if len(plan.nodes) == 1:
        return _on_one_holder(state, gang, avoid, plan, held)
    return _on_like_holders(state, avoid, plan, held)


def holding_text(state: State, job: Job, plan: GangFit) -> str:
    """For instance "; n3 holds 81 % of imagenet"."""
    indexes = [index for index, _ in plan.nodes]
    found = islice(_shares(state, job, indexes), NAMED_MAX)
    text = ", ".join(f"{node} holds {percent} % of {name}" for node, percent, name in found)
    return f"; {text}" if text else ""


def _shares(state: State, job: Job, indexes: list[int]) -> Iterator[tuple[str, int, str]]:
    for volume in _volumes(job):
        holders = state.heard.holders.get(volume_key(job.spec.tenant, volume.source), {})
        for index in indexes if holders else ():
            node = state.order[index].id
            if node in holders:
                holding = holders[node]
                percent = holding.held_bytes * 100 // holding.size_bytes
                yield node, percent, quoted(volume.name)


def _held(state: State, job: Job) -> dict[int, int]:
    """The bytes of all its volumes that each node has."""
    held: dict[int, int] = {}
    for volume in _volumes(job):
        holders = state.heard.holders.get(volume_key(job.spec.tenant, volume.source), {})
        for node, holding in islice(holders.items(), HOLDERS_MAX):
            index = state.nodes[node].index
            held[index] = held.get(index, 0) + holding.held_bytes
    return held


def _volumes(job: Job) -> list[Volume]:
    return [volume for volume in map(parse, job.spec.volumes) if volume.url]


def _on_one_holder(
    state: State, gang: Gang, avoid: Collection[int], plan: GangFit, held: dict[int, int]
) -> GangFit:
    (chosen, members), *_ = plan.nodes
    score = state.functions.placement(state.policy.placement)
    before, here = state.rooms[chosen], held.get(chosen, 0)
    wanted = bool(state.agenda.hopeless)  # a gang waits for room, which must not be broken up
    best: tuple[int, tuple[float, ...], int] | None = None
    for index, bytes_ in held.items():
        room = state.rooms[index]
        alike = room.kind == before.kind and room.level == before.level
        if (
            bytes_ >= here + (1 if alike else WORTH_BYTES)
            and (alike or (not wanted and _takes(room, before, gang, members)))
            and state.order[index].schedulable
            and index not in avoid
        ):
            after = room.level.minus(gang.demand, gang.demand.share_milli(room.kind), members)
            found = (-bytes_, score(state, room.kind, room.level, after), index)
            best = found if best is None else min(best, found)
    return plan if best is None else GangFit([(best[2], members)], "room beside its data")


def _takes(room: Room, before: Room, gang: Gang, members: int) -> bool:
    """Does the node hold all of the gang, and is it no more precious than the one chosen before? A
    job that any GPU would do for does not take a rare one for the sake of its data."""
    kind, like, demand = room.kind, before.kind, gang.demand
    if gang.spread or gang.together:  # the value of a label was chosen
        suits = kind == like
    else:
        suits = (kind.gpu_model, kind.gpus > 0) == (like.gpu_model, like.gpus > 0)
    return (
        suits
        and demand.suits(kind)
        and room.level.holds(demand, demand.share_milli(kind)) >= members
        and (not gang.whole_nodes or room.level.unused(kind))
    )


def _on_like_holders(
    state: State, avoid: Collection[int], plan: GangFit, held: dict[int, int]
) -> GangFit:
    rooms, nodes = state.rooms, list(plan.nodes)
    used = {index for index, _ in nodes}
    spare: dict[tuple[object, ...], list[int]] = {}  # the one that holds the most comes last
    for index in sorted(held, key=lambda index: (held[index], -index)):
        if index not in used and index not in avoid and state.order[index].schedulable:
            room = rooms[index]
            spare.setdefault((room.kind, room.level, room.domains), []).append(index)
    for place in sorted(range(len(nodes)), key=lambda place: held.get(nodes[place][0], 0)):
        index, members = nodes[place]
        line = spare.get((rooms[index].kind, rooms[index].level, rooms[index].domains))
        if line and held[line[-1]] > held.get(index, 0):
            nodes[place] = (line.pop(), members)
    return plan._replace(nodes=nodes)
