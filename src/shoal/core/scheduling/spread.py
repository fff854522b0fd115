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


class Crowded(Collection[int]):
    """Nodes to avoid: more crowded than this, or avoided anyway. Asked about one node at a time,
    because a large cluster has many and the first that is not avoided is usually near."""

    def __init__(self, crowds: Crowds, most: Crowd, avoid: Collection[int]) -> None:
        self._crowds = crowds
        self._avoid = avoid
        self._nodes = {index for index, crowd in crowds.nodes.items() if crowd > most}
        self._racks = {rack for rack, crowd in crowds.racks.items() if crowd > most}

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        if index in self._nodes or index in self._avoid:
            return True
        if index in self._crowds.nodes:
            return False
        return _rack(self._crowds.state, index) in self._racks

    def __iter__(self) -> Iterator[int]:
        return (index for index in range(len(self._crowds.state.order)) if index in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True


class Crowds:
    """The replicas of a service: on the nodes that have some, and in their racks."""

    def __init__(self, state: State, job: Job) -> None:
        self.state = state
        service = state.services.get(job.spec.service)
        nodes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())  # staying, leaving
        racks: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for other_id in state.replicas.get(job.spec.service, ()):
            other = state.jobs[other_id]
            if service is None or not other.active:
                continue
            leaves = other.spec.version != service.version or other_id in service.draining
            on = sorted({state.nodes[member.slice.node].index for member in other.members})
            nodes[leaves].update(on)
            racks[leaves].update(list(dict.fromkeys(_rack(state, index) for index in on)))
        racks[0].pop("", None)
        racks[1].pop("", None)
        self.racks = {
            rack: Crowd(0, racks[0][rack], 0, racks[1][rack])
            for rack in sorted({*racks[0], *racks[1]})
        }
        self.nodes = {
            index: Crowd(nodes[0][index], racks[0][rack], nodes[1][index], racks[1][rack])
            for index in sorted({*nodes[0], *nodes[1]})
            for rack in (_rack(state, index),)
        }

    def degrees(self) -> list[Crowd]:
        """From the emptiest nodes to the most crowded, without degrees that no open node has."""
        found = {*self.nodes.values(), *self.racks.values()}
        domains = self.state.divisions[RACK].domains
        in_racks = sum(domains[rack].nodes for rack in self.racks if rack in domains)
        if in_racks < self.state.cluster.nodes:
            found.add(Crowd())
        return sorted(found)


def spread(
    state: State, job: Job, gang: Gang, avoid: Collection[int], plain: GangFit
) -> GangFit | None:
    """A node with as few replicas of the same service as possible, then a rack with as few, and
    among those the one that the policy prefers; first of all in the value of its `spread` label
    with the fewest. None if the job is not a replica, or is the first. A gang stays as near
    together as in `plain`, the place where it would go without regard to the others."""
    if not job.spec.service:
        return None
    here = Crowds(state, job)
    if not here.nodes:
        return None
    for gang_, where in (*_by_value(state, gang, here), (gang, "")):
        plan = _least_crowded(state, gang_, here, avoid) or (
            fit(state, gang_, avoid) if where else None
        )
        if plan is not None and (gang.members == 1 or apart(state, plan) <= apart(state, plain)):
            return plan._replace(
                rule=f"{plan.rule} among the {where}nodes with the fewest replicas"
            )
    return None


def _rack(state: State, index: int) -> str:
    """Its rack, or the block of a node without racks. Empty: the node is a rack of its own."""
    domains = state.rooms[index].domains
    return domains[RACK] if len(domains) > RACK else domains[BLOCK] if domains else ""


def _by_value(state: State, gang: Gang, here: Crowds) -> Iterator[tuple[Gang, str]]:
    """The gang on the nodes of each value of its label, the one with the fewest replicas first."""
    key = gang.spread
    if not key:
        return
    counts = dict.fromkeys(values_of(state, key), 0)
    for index, crowd in here.nodes.items():
        value = state.order[index].labels.get(key)
        if value in counts:
            counts[value] += crowd.staying + crowd.leaving
    for value in sorted(counts, key=lambda value: (counts[value], value)):
        yield narrowed(gang, key, value), f"{key}={value} "


def _least_crowded(
    state: State, gang: Gang, here: Crowds, avoid: Collection[int]
) -> GangFit | None:
    """On the emptiest nodes first, then with those of the next degree, but not with the most
    crowded: nothing is gained by avoiding none."""
    for most in here.degrees()[:-1][:TRIES_MAX]:
        plan = fit(state, gang, Crowded(here, most, avoid))
        if plan is not None:
            return plan
    return None


def apart(state: State, plan: GangFit) -> tuple[int, int, int]:
    """How far a gang would be apart: its blocks, racks and nodes."""
    places = [(index, state.rooms[index].domains) for index, _ in plan.nodes]
    blocks = {domains[BLOCK] if domains else str(index) for index, domains in places}
    racks = {_rack(state, index) or str(index) for index, _ in places}
    return len(blocks), len(racks), len(places)
