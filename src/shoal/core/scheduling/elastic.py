"""Elastic gangs: as large as there is room for when they start, larger when no job waits."""

from __future__ import annotations

from collections.abc import Collection

from shoal.core.scheduling.again import spares_beside
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import GangFit, fit, room_for, slices
from shoal.core.scheduling.weak_links import doubtful
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.gpu_caps import room_under_caps
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.round import Round
from shoal.core.state.saving import unsaved_ms
from shoal.core.state.state import State
from shoal.model.job import Job, Phase, StopCause
from shoal.model.resources import Kind, Slice

LATE_LOOK_MS = 1_000
# Growing may lose an eighth of the time between two checkpoints, or one second: it is not worth
# waiting to save less than the restart itself takes.
UNSAVED_PART = 8
UNSAVED_MS = 1_000


def widest(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    """As many members as fit, up to its most; None if only the least do. It is not made larger by
    a weak link or a suspect node, unless its least needs one."""
    if not job.spec.elastic:
        return None
    doubts, lost = doubtful(state, gang)
    if doubts and fit(state, gang, {*avoid, *doubts}) is not None:
        avoid = {*avoid, *doubts}
    else:
        lost = 0
    room = room_for(state.cluster, gang, job.spec.members_max + lost) - lost
    room = min(room, gang.members + _allowed(state, job, gang, gang.gpu_milli))
    for members in (room, (gang.members + room) // 2):
        if members > gang.members:
            plan = fit(state, gang._replace(members=members), avoid)
            if plan is not None:
                return plan
    return None


def _allowed(state: State, job: Job, gang: Gang, taken_milli: int = 0) -> int:
    """How many more members caps on GPUs allow, beside what it takes anyway."""
    room = room_under_caps(state, job.spec.tenant)
    if room is None or not gang.gpu_milli:
        return job.spec.members_max
    return max(0, room - taken_milli) * gang.members // gang.gpu_milli


def grow(round_: Round) -> None:
    """While no job waits, one elastic gang restarts with idle room added. A claim keeps what it
    has, so growing cannot lose its place."""
    state, now_ms = round_.state, round_.now_ms
    for job_id in state.elastic:
        job = state.jobs[job_id]
        if state.accounts.held_by(job.spec.tenant):
            continue
        if job.phase is not Phase.RUNNING or not _worth_a_restart(round_, job):
            continue
        gang = gang_of(job)
        short = too_short(state, job, now_ms)
        if any(state.nodes[member.slice.node].index in short for member in job.members):
            continue  # it has to leave soon
        held = tuple(member.slice for member in job.members)
        doubts, lost = doubtful(state, gang, held)
        spares = spares_beside(state, job, now_ms) | short | doubts
        most = job.spec.members_max - len(job.members)
        more = max(0, room_for(state.cluster, gang, most + lost) - lost)
        more = min(more, _allowed(state, job, gang))
        if not all(gang.demand.suits(_kind_under(state, slice_)) for slice_ in held):
            continue  # a node's labels have changed: the gang could not start there again
        plan = fit(state, gang._replace(members=more), spares, held) if more else None
        while plan is None and spares and more > 1:
            more //= 2  # the spares are not for growing
            plan = fit(state, gang._replace(members=more), spares, held)
        if plan is None:
            continue
        wanted = held + slices(state, plan, gang.demand)
        why = f"grows from {len(held)} to {len(wanted)} members: no job waits for this room"
        round_.emit(
            JobStopping(
                at_ms=now_ms, job=job.id, attempt=job.attempt, cause=StopCause.RESIZE, why=why
            )
        )
        round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=wanted, why=why))
        return


def _kind_under(state: State, slice_: Slice) -> Kind:
    return state.rooms[state.nodes[slice_.node].index].kind


def _worth_a_restart(round_: Round, job: Job) -> bool:
    """It saves its work, has run for a while at this size, and has not reached its most. A gang
    tied to a rack or to a number of members per node may not fit the free room."""
    if (
        gang_of(job).bound
        or job.spec.members_per_node
        or not job.spec.checkpoint_ms
        or job.running_ms is None
        or len(job.members) >= job.spec.members_max
        or any(member.over for member in job.members)
    ):
        return False
    ripe_ms = job.running_ms + round_.policy.run_ms_min
    # No job needs the growth, so it waits until little work would be done twice.
    unsaved = unsaved_ms(job, round_.now_ms)
    if unsaved > max(job.spec.checkpoint_ms // UNSAVED_PART, UNSAVED_MS):
        # One that is late with its checkpoint is looked at again now and then, not at once.
        save_ms = max(LATE_LOOK_MS, job.spec.checkpoint_ms - unsaved)
        ripe_ms = max(ripe_ms, round_.now_ms + save_ms)
    if round_.now_ms < ripe_ms:
        round_.look_again(ripe_ms)
    return round_.now_ms >= ripe_ms
