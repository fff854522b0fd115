"""Replicas of a service go to different nodes, then racks, so that a lost one takes few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from shoal.core.scheduling.fit import GangFit, fit, narrowed, values_of
from shoal.core.state.queue import Gang
from shoal.core.state.state import State
from shoal.model.job import Job

TRIES_MAX = 16  # beyond this many degrees of crowding it hardly matters where one more goes
BLOCK, RACK = 0, 1  # in a node's domains


class Crowd(NamedTuple):
    """The replicas on a node and in its rack; less is better. During a roll-out those that leave
    count less than those that stay, or the new version would end where there was room for it."""

    staying: int = 0
    staying_in_rack: int = 0
    leaving: int = 0
    leaving_in_rack: int = 0


def spread(
    state: State, job: Job, gang: Gang, avoid: Collection[int], plain: GangFit
) -> GangFit | None:
    """A node with as few replicas of the same service as possible, then a rack with as few, and
    among those the one that the policy prefers; first of all in the value of its `spread` label
    with the fewest. None if the job is not a replica, or is the first. A gang stays as near
    together as in `plain`, the place where it would go without regard to the others."""
    here = _crowds(state, job)
    if not here:
        return None
    on = Counter({index: crowd.staying + crowd.leaving for index, crowd in here.items()})
    for gang_, where in (*_by_value(state, gang, on), (gang, "")):
        plan = _least_crowded(state, gang_, here, avoid) or (
            fit(state, gang_, avoid) if where else None
        )
        if plan is not None and (gang.members == 1 or apart(state, plan) <= apart(state, plain)):
            return plan._replace(
                rule=f"{plan.rule} among the {where}nodes with the fewest replicas"
            )
    return None


def _crowds(state: State, job: Job) -> dict[int, Crowd]:
    """Nodes with replicas of its service, and all open nodes in their racks, by index."""
    service = state.services.get(job.spec.service)
    nodes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())  # staying, leaving
    racks: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for other_id in state.replicas.get(job.spec.service, ()):
        other = state.jobs[other_id]
        if service is None or not other.active:
            continue
        leaves = other.spec.version != service.version or other_id in service.draining
        on = {state.nodes[member.slice.node].index for member in other.members}
        nodes[leaves].update(sorted(on))
        racks[leaves].update(sorted({rack for index in on if (rack := _rack(state, index))}))
    found = {
        index: Crowd(nodes[0][index], racks[0][rack], nodes[1][index], racks[1][rack])
        for index in sorted({*nodes[0], *nodes[1]})
        for rack in (_rack(state, index),)
    }
    for rack in sorted({*racks[0], *racks[1]}):
        for index in _open_nodes(state, rack):
            found.setdefault(index, Crowd(0, racks[0][rack], 0, racks[1][rack]))
    return found


def _rack(state: State, index: int) -> str:
    """Its rack, or the block of a node without racks. Empty: the node is a rack of its own."""
    return next(reversed(state.rooms[index].domains[: RACK + 1]), "")


def _open_nodes(state: State, rack: str) -> Iterator[int]:
    domain = state.divisions[RACK if "/" in rack else BLOCK].domains.get(rack)
    for free in domain.free.values() if domain is not None else ():
        for nodes in free.nodes.values():
            yield from nodes


def _by_value(state: State, gang: Gang, on: Counter[int]) -> Iterator[tuple[Gang, str]]:
    """The gang on the nodes of each value of its label, the one with the fewest replicas first."""
    key = gang.spread
    if not key:
        return
    counts = dict.fromkeys(values_of(state, key), 0)
    for index, replicas in on.items():
        value = state.order[index].labels.get(key)
        if value in counts:
            counts[value] += replicas
    for value in sorted(counts, key=lambda value: (counts[value], value)):
        yield narrowed(gang, key, value), f"{key}={value} "


def _least_crowded(
    state: State, gang: Gang, here: dict[int, Crowd], avoid: Collection[int]
) -> GangFit | None:
    """On empty nodes first, then with those of the next degree, but not with the most crowded:
    nothing is gained by avoiding none."""
    for most in sorted({Crowd(), *here.values()})[:-1][:TRIES_MAX]:
        crowded = {index for index, crowd in here.items() if crowd > most}
        plan = fit(state, gang, crowded.union(avoid))
        if plan is not None:
            return plan
    return None


def apart(state: State, plan: GangFit) -> tuple[int, int, int]:
    """How far a gang would be apart: its blocks, racks and nodes."""
    places = [(index, state.rooms[index].domains) for index, _ in plan.nodes]
    blocks = {domains[BLOCK] if domains else str(index) for index, domains in places}
    racks = {_rack(state, index) or str(index) for index, _ in places}
    return len(blocks), len(racks), len(places)
