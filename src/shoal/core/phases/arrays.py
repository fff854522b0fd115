"""Requests about arrays: submit, cancel and retry them, or single elements."""

from __future__ import annotations

from shoal.core.features.caps import share_left, too_large, too_many
from shoal.core.phases.ending import cancel
from shoal.core.state.apply_array import parts_of
from shoal.core.state.round import Round
from shoal.core.state.sizes import bytes_of
from shoal.core.state.state import State
from shoal.model.array import ARRAYS_MAX
from shoal.model.events import ArrayRetried
from shoal.model.ids import array_of, in_order
from shoal.model.job import Job, Phase
from shoal.model.report import Accepted, Answer, Cancel, Full, Refused, Retry
from shoal.model.resources import plural


def too_many_arrays(state: State, tenant: str) -> Refused | None:
    own = sum(array.spec.tenant == tenant for array in state.arrays.values())
    if share_left(ARRAYS_MAX, len(state.arrays), own) > 0:
        return None
    text = f"the cluster takes at most {ARRAYS_MAX:,} arrays at a time"
    return Refused("array", f"{text}; try again when some have ended", full=Full.CLUSTER)


def cancel_array(round_: Round, array: Job, request: Cancel) -> Answer:
    """All of it: what has not begun never will."""
    if array.phase is Phase.STOPPING:
        return Accepted(array.id, "it is already being cancelled")
    cancel(round_, array, f"cancelled by {request.who}")
    return Accepted(array.id)


def no_live_job(state: State, job_id: str) -> Refused:
    """`missing`: it may have ended. An element that has not begun is none of the missing."""
    array = state.arrays.get(array_of(job_id))
    if array is not None:
        sweep, _ = parts_of(array)
        if sweep.position_of(in_order(job_id)[1]) is None:
            return Refused("job", f"{array.id} has no element {in_order(job_id)[1]}")
        if state.pending(job_id):
            return Refused("job", f"{job_id} has not begun; cancel all of {array.id}, or wait")
    return Refused("job", f"there is no live job {job_id}", missing=True)


def retry(round_: Round, request: Retry) -> Answer:
    state = round_.state
    array_id = array_of(request.job) or request.job
    live = state.arrays.get(array_id)
    array = live or request.record
    if array is None or array.elements is None:
        what = f"there is no array {array_id}; other jobs run again with: shoal requeue"
        return Refused("job", what, missing=array is None)
    sweep, elements = parts_of(array)
    count, index = sum(one.count for one in elements.missed), None
    if array_id != request.job:
        index = in_order(request.job)[1]
        position = sweep.position_of(index)
        if position is None:
            return Refused("job", f"{array_id} has no element {index}")
        count = sum(position in one for one in elements.missed)
    if not count:
        return Refused("job", _nothing_missed(state, array, request.job))
    if live is None:
        tenant = array.spec.tenant
        problem = (
            too_many_arrays(state, tenant)
            or too_many(state.tally, state.accounts, tenant, 1, waiting=1)
            or too_large(state.sizes, tenant, bytes_of(array.spec))
        )
        if problem is not None:
            return problem
    why = f"{plural(count, 'element')} retried by {request.who}"
    round_.emit(
        ArrayRetried(
            at_ms=round_.now_ms,
            job=array_id,
            index=index,
            why=why,
            record=None if live is not None else array,
        )
    )
    return Accepted(request.job, f"{plural(count, 'element')} will run again")


def _nothing_missed(state: State, array: Job, asked: str) -> str:
    if asked == array.id:
        return f"no element of {asked} has failed or was cancelled"
    job = state.jobs.get(asked)
    if job is not None:
        return f"{asked} is {job.phase.value}; run it again with: shoal requeue {asked}"
    if state.pending(asked):
        return f"{asked} has not begun"
    return f"{asked} has succeeded, so there is nothing to retry"
