"""Move a willing job so that a waiting gang fits, if that costs less than the gang's wait."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.backfill import opening_of
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import gpus_of
from shoal.core.scheduling.preempt import WithoutVictims
from shoal.core.scheduling.victims import Victim, victim_of
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.room import UNLIMITED
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase, StopCause
from shoal.model.policy import Preempt
from shoal.model.resources import Slice

TRIES_MAX = 8  # the cheapest to move first
COMPARED_MAX = 1024  # jobs that could move; in a very large cluster, those that started first


# Looking for a job to move is slow. A gang that could not be helped is tried again after this.
MOVES_EVERY_MS = 60_000


def defragment(round_: Round, job: Job) -> bool:
    """Both get a claim: the waiting gang on the room that the move frees, and the moved job on its
    new place, so that it cannot lose it by moving."""
    state, now_ms = round_.state, round_.now_ms
    if not state.preemptible or state.policy.preempt is Preempt.NEVER:
        return False
    gang = gang_of(job)
    if state.cluster.gpus < gang.members * gang.demand.gpus:
        return False  # too little is free in the whole cluster
    spares = kept_from(state, job, now_ms)
    if now_ms - state.agenda.moves_ms.get(job.id, now_ms - MOVES_EVERY_MS) < MOVES_EVERY_MS:
        return False
    state.agenda.moves_ms[job.id] = now_ms
    wait_ms = _wait_ms(round_, job)
    for victim in _willing(state, gang, now_ms):
        cost = (state.policy.move_cost_ms + victim.lost_ms) * gpus_of(victim.job)
        if cost >= wait_ms * gpus_of(job):
            break
        found = _try_move(state, gang, victim, spares, now_ms)
        if found is not None:
            _commit(round_, job, victim, *found, wait_ms=wait_ms)
            return True
    return False


def _wait_ms(round_: Round, job: Job) -> int:
    """How long it would wait: until its promised start, or else until the first opening."""
    state, now_ms = round_.state, round_.now_ms
    held = state.reservations.get(job.id)
    start_ms = held.start_ms if held is not None else None
    if held is None or (start_ms is not None and start_ms <= now_ms):
        opening = opening_of(round_, job)
        start_ms = opening.start_ms if opening is not None else None
    return UNLIMITED if start_ms is None else start_ms - now_ms


def _willing(state: State, gang: Gang, now_ms: int) -> list[Victim]:
    """Jobs that checkpoint, have run for a while, and leave enough GPUs on a node for a member of
    the gang if they move; the cheapest to move first."""
    found = []
    for job_id in state.preemptible:
        job = state.jobs[job_id]
        if job.phase is not Phase.RUNNING or not job.spec.checkpoint_ms or job.running_ms is None:
            continue
        ran_ms, gpus = now_ms - job.running_ms, gpus_of(job)
        if ran_ms >= state.policy.run_ms_min and _helps(state, job, gang):
            found.append((ran_ms % job.spec.checkpoint_ms * gpus, gpus, job.number, job))
            if len(found) == COMPARED_MAX:
                break
    cheapest = heapq.nsmallest(TRIES_MAX, found, key=lambda entry: entry[:3])
    return [
        victim_of(job, now_ms, whole=True)
        for *_, job in cheapest
        if not any(member.over for member in job.members)
    ]


def _helps(state: State, job: Job, gang: Gang) -> bool:
    freed: dict[str, int] = {}
    for member in job.members:
        freed[member.slice.node] = freed.get(member.slice.node, 0) + len(member.slice.gpus)
    return any(
        state.rooms[state.nodes[node].index].level.gpus + gpus >= gang.demand.gpus
        for node, gpus in freed.items()
    )


def _try_move(
    state: State, gang: Gang, victim: Victim, spares: Collection[int], now_ms: int
) -> tuple[tuple[Slice, ...], tuple[Slice, ...]] | None:
    """Where the gang and the moved job would go; None if either does not fit."""
    with WithoutVictims(state) as overlay:
        overlay.give_back(victim)
        plan = fit(state, gang, spares)
        if plan is None:
            return None
        given = slices(state, plan, gang.demand)
        for slice_ in given:
            overlay.change(slice_, -1, exclusive=gang.whole_nodes)
        moved = gang_of(victim.job)._replace(members=len(victim.job.members))
        place = fit(state, moved, too_short(state, victim.job, now_ms))
        new = slices(state, place, moved.demand) if place is not None else None
        for slice_ in given:
            overlay.change(slice_, +1, exclusive=gang.whole_nodes)
        return (given, new) if new is not None else None


def _commit(
    round_: Round,
    job: Job,
    victim: Victim,
    given: tuple[Slice, ...],
    new: tuple[Slice, ...],
    *,
    wait_ms: int,
) -> None:
    moved, now_ms = victim.job, round_.now_ms
    names = ", ".join(sorted({slice_.node for slice_ in new}))
    wait = f"{duration_text(wait_ms)} more" if wait_ms < UNLIMITED else "an unknown time"
    why = f"moves to {names} so that {job.label} fits, which would otherwise wait {wait}"
    round_.emit(
        JobStopping(
            at_ms=now_ms, job=moved.id, attempt=moved.attempt, cause=StopCause.MOVE, why=why
        )
    )
    round_.emit(JobClaimed(at_ms=now_ms, job=moved.id, slices=new, why=why))
    why = f"starts when {moved.label} has moved to {names}"
    round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=given, why=why))
