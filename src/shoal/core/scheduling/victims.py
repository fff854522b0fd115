"""Jobs that give up their room for others: stopped, shrunk or put to sleep."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.sleeping import cost_ms, host_mb
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.saving import unsaved_ms
from shoal.core.state.state import State
from shoal.model.job import Job, Phase, SleepCause
from shoal.model.resources import Slice

VICTIMS_MAX = 256  # beyond this many, a job waits instead


class Victim(NamedTuple):
    """A job, and which of its slices it would give up: all, or some of those beyond its least
    size. `claimed`: it is being resized anyway, so it need only claim less of what it holds."""

    job: Job
    given_up: tuple[Slice, ...]
    shrinks: bool
    lost_ms: int
    claimed: bool = False
    sleeps: SleepCause | None = None  # it is put to sleep, not stopped


class AllBut:
    """Every node but these."""

    def __init__(self, nodes: set[int]) -> None:
        self._nodes = nodes

    def __contains__(self, index: object) -> bool:
        return index not in self._nodes


def scope(state: State, job: Job, now_ms: int) -> tuple[Gang, Container[int]]:
    """The gang that wants room, and the nodes where that is of no use to it."""
    if job.phase is Phase.ASLEEP:
        return gang_of(job), AllBut({state.nodes[m.slice.node].index for m in job.members})
    return gang_of(job), kept_from(state, job, now_ms)


def of_use(state: State, victim: Job, gang: Gang, avoid: Container[int]) -> bool:
    for member in victim.members:
        node = state.nodes[member.slice.node]
        if (
            gang.demand.suits(state.rooms[node.index].kind)
            and node.schedulable
            and node.index not in avoid
        ):
            return True
    return False


def victim_of(job: Job, now_ms: int, *, whole: bool = False) -> Victim:
    """An elastic gang only has to shrink, unless `whole` is set."""
    shrinks = len(job.members) > job.spec.members and not whole
    least = job.spec.members if shrinks else 0
    given_up = tuple(member.slice for member in job.members[least:])
    return Victim(job, given_up, shrinks, unsaved_ms(job, now_ms))


def asleep_of(state: State, job: Job, cause: SleepCause) -> Victim:
    """The victim that is put to sleep: it gives up all but its memory, and needs more of that."""
    given_up = tuple(
        Slice(
            member.slice.node,
            member.slice.gpus,
            member.slice.cpu_milli,
            -host_mb(state, job, number),
            member.slice.gpu_milli,
        )
        for number, member in enumerate(job.members)
    )
    return Victim(job, given_up, False, cost_ms(state, job), sleeps=cause)
