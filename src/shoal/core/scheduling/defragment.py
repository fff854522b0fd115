"""Moving a willing job so that a waiting gang fits, where that costs less than the gang's wait."""

from __future__ import annotations

from collections.abc import Collection

from shoal.core.queue import Gang, gang_of
from shoal.core.room import UNLIMITED
from shoal.core.round import Round
from shoal.core.scheduling.again import spares_kept_from
from shoal.core.scheduling.backfill import TYPICAL, first_opening
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import gpus_of
from shoal.core.scheduling.preempt import Overlay, Victim, victim_of
from shoal.core.state import State
from shoal.model.events import JobClaimed, JobStopping
from shoal.model.job import Job, Phase, StopCause
from shoal.model.policy import Preempt
from shoal.model.resources import Slice

TRIES_MAX = 8  # the cheapest to move first


def defragment(round_: Round, job: Job) -> bool:
    """Both get a claim: the waiting gang on the room that the move frees, the moved job on its
    new place, so that moving cannot lose it one."""
    state, now_ms = round_.state, round_.now_ms
    if not state.preemptible or state.policy.preempt is Preempt.NEVER:
        return False
    gang = gang_of(job)
    if state.cluster.gpus < gang.members * gang.demand.gpus:
        return False  # there is too little room, however it lies
    spares = spares_kept_from(state, job)
    opening = first_opening(state, gang, now_ms, TYPICAL, spares)
    wait_ms = opening.start_ms - now_ms if opening is not None else UNLIMITED
    for victim in _willing(state, now_ms)[:TRIES_MAX]:
        cost = (state.policy.move_cost_ms + victim.lost_ms) * gpus_of(victim.job)
        if cost >= wait_ms * gpus_of(job):
            break
        found = _try_move(state, gang, victim, spares)
        if found is not None:
            _commit(round_, job, victim, *found, wait_ms=wait_ms)
            return True
    return False


def _willing(state: State, now_ms: int) -> list[Victim]:
    """Jobs that checkpoint and have run for a while, the cheapest to move first."""
    found = []
    for job_id in state.preemptible:
        job = state.jobs[job_id]
        if (
            job.phase is Phase.RUNNING
            and job.spec.checkpoint_ms
            and job.running_ms is not None
            and now_ms - job.running_ms >= state.policy.run_ms_min
            and not any(member.over for member in job.members)
        ):
            victim = victim_of(job, now_ms, whole=True)
            found.append((victim.lost_ms * gpus_of(job), gpus_of(job), job.number, victim))
    return [victim for *_, victim in sorted(found, key=lambda entry: entry[:3])]


def _try_move(
    state: State, gang: Gang, victim: Victim, spares: Collection[int]
) -> tuple[tuple[Slice, ...], tuple[Slice, ...]] | None:
    """Where the gang and the moved job would go; None if one of them finds no place."""
    with Overlay(state) as overlay:
        overlay.give_back(victim)
        plan = fit(state, gang, spares)
        if plan is None:
            return None
        given = slices(state, plan, gang.demand)
        for slice_ in given:
            state.change(slice_, -1, exclusive=gang.whole_nodes)
        moved = gang_of(victim.job)._replace(members=len(victim.job.members))
        place = fit(state, moved)
        new = slices(state, place, moved.demand) if place is not None else None
        for slice_ in given:
            state.change(slice_, +1, exclusive=gang.whole_nodes)
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
    wait = f"{wait_ms / 1000:.0f} s more" if wait_ms < UNLIMITED else "nobody knows how long"
    why = f"moves to {names} so that {job.label} fits, which would wait {wait}"
    round_.emit(
        JobStopping(
            at_ms=now_ms, job=moved.id, attempt=moved.attempt, cause=StopCause.MOVE, why=why
        )
    )
    round_.emit(JobClaimed(at_ms=now_ms, job=moved.id, slices=new, why=why))
    why = f"starts when {moved.label} has moved to {names}"
    round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=given, why=why))
