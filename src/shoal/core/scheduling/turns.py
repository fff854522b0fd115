"""Turns: jobs that sleep for others which wait, because each has had the GPUs for long enough.

A turn is so long that falling asleep and waking take the policy's share of the time at most. Among
tenants, a job takes the place of another only if its tenant stands no worse by the accounts; among
jobs of one tenant, they go in the order in which they last ran or began to wait. The first in line
that needs more room than is due now has the next turns: jobs behind it do not take them one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import islice

from shoal.core.scheduling.keep import line_key
from shoal.core.scheduling.sleepers import cap_of
from shoal.core.scheduling.sleeping import turn_ms, why_not
from shoal.core.scheduling.victims import VICTIMS_MAX, Victim, asleep_of, of_use, scope
from shoal.core.state.queue import Gang
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import Job, Phase, SleepCause

LOOKED_MAX = 2048  # running jobs, the longest awake first


def turns_of(round_: Round, job: Job, known: list[Victim]) -> tuple[list[Victim], list[Victim]]:
    """Jobs that could sleep for this one, the longest awake first: those that have had their turn,
    and those that have not. `known`: victims anyway."""
    state, now_ms = round_.state, round_.now_ms
    first = _first(round_, job)
    already = {victim.job.id for victim in known}
    over: list[Victim] = []
    later: list[Victim] = []
    for over_ms, other in _lenders(state, job, now_ms, already):
        if first is not None and of_use(state, other, *first):
            continue
        if not _may_take(state, job, other, now_ms):
            round_.look_again(max(over_ms, now_ms + turn_ms(state, other)))
        elif over_ms > now_ms:
            round_.look_again(over_ms)
            later.append(asleep_of(state, other, SleepCause.TURN))
        else:
            over.append(asleep_of(state, other, SleepCause.TURN))
        if len(over) + len(later) >= VICTIMS_MAX:
            break
    return over, later


def turns_due(state: State, job: Job, now_ms: int) -> list[tuple[int, Victim]]:
    """Jobs that can sleep for this one, each with the moment when it has had its turn; as far as
    their tenants stand as they do now."""
    return [
        (max(now_ms, over_ms), asleep_of(state, other, SleepCause.TURN))
        for over_ms, other in islice(_lenders(state, job, now_ms, ()), VICTIMS_MAX)
        if _may_take(state, job, other, now_ms)
    ]


def _lenders(
    state: State, job: Job, now_ms: int, already: Container[str]
) -> Iterator[tuple[int, Job]]:
    gang, avoid = scope(state, job, now_ms)
    for other in _awake(state, job):
        if other.id in already or other.phase is not Phase.RUNNING or other.awake_ms is None:
            continue
        if of_use(state, other, gang, avoid) and not why_not(state, other):
            yield other.awake_ms + turn_ms(state, other), other


def _awake(state: State, job: Job) -> Iterable[Job]:
    if job.phase is Phase.ASLEEP:  # only those on its nodes are in its way
        here = {
            other.id: other
            for node in dict.fromkeys(member.slice.node for member in job.members)
            for other in state.placed[node].values()
        }
        return sorted(here.values(), key=lambda other: (other.awake_ms or 0, other.number))
    return [state.jobs[job_id] for job_id in islice(state.awake, LOOKED_MAX)]


def _may_take(state: State, job: Job, other: Job, now_ms: int) -> bool:
    if other.spec.priority != job.spec.priority:
        return other.spec.priority < job.spec.priority
    if other.spec.tenant == job.spec.tenant:
        return True
    standing = state.ordering.tenant
    return standing(state, job.spec.tenant, now_ms) <= standing(state, other.spec.tenant, now_ms)


def _first(round_: Round, job: Job) -> tuple[Gang, Container[int]] | None:
    """What the job that has the next turns wants, if that is another and comes before this one."""
    state, now_ms = round_.state, round_.now_ms
    if state.agenda.turn_for is None or state.agenda.turn_for == job.id:
        return None
    first = state.jobs.get(state.agenda.turn_for)
    waits = first is not None and (first.number in state.queue.lane or first.id in state.wakeful)
    if first is None or not waits or first.id in state.claims or cap_of(state, first):
        state.agenda.turn_for = None
        return None
    if line_key(state, job, now_ms) < line_key(state, first, now_ms):
        return None
    return scope(state, first, now_ms)
