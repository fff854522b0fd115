"""What events do to arrays and to the elements of arrays; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.state.records import Unfolded
from shoal.core.state.state import State
from shoal.model.array import ELEMENT_NUMBERS, Bits, Elements
from shoal.model.events import (
    ArrayCancelled,
    ArrayFinished,
    ArrayRetried,
    ArraySubmitted,
    EventBase,
    JobFinished,
    JobSubmitted,
)
from shoal.model.ids import number_of
from shoal.model.job import Job, Phase
from shoal.model.sweep import Sweep


def parts_of(array: Job) -> tuple[Sweep, Elements]:
    """Every array has both."""
    assert array.spec.sweep is not None, array.id
    assert array.elements is not None, array.id
    return array.spec.sweep, array.elements


def add_array(state: State, array: Job) -> None:
    state.arrays[array.id] = array
    state.unfolded[array.id] = Unfolded()
    state.accounts.meet(array.spec.tenant)
    state.tally.array(state.accounts, array, 1)
    state.sizes.job(array)
    if array.key:
        state.keys[array.key] = array.id
    for other in array.awaits:
        state.dependents.setdefault(other, {})[array.id] = None
    if array.spec.workflow:
        state.flows.setdefault(array.spec.workflow, {})[array.id] = None


def drop_from(index: dict[str, dict[str, None]], key: str, job_id: str) -> None:
    of_key = index[key]
    del of_key[job_id]
    if not of_key:
        del index[key]


def release_array(state: State, array: Job, other: str, at_ms: int) -> None:
    """It no longer waits for this job; without any to wait for, its elements may begin."""
    drop_from(state.dependents, other, array.id)
    array.awaits = tuple(one for one in array.awaits if one != other)
    if not array.awaits:
        array.released_ms = at_ms


def _array_submitted(state: State, event: ArraySubmitted) -> None:
    number = number_of(event.job)
    state.next_job = max(state.next_job, number + 1)
    assert event.spec.sweep is not None, event.job
    array = Job(
        id=event.job,
        number=number * ELEMENT_NUMBERS,
        spec=event.spec,
        key=event.key,
        submitted_ms=event.at_ms,
        awaits=event.awaits,
        elements=Elements(pending=Bits.full(event.spec.sweep.count)),
    )
    add_array(state, array)


def new_job(state: State, event: JobSubmitted) -> Job:
    """An element stands in the queue where its array was submitted. One that has run before goes on
    counting its attempts, because the name of a member is used only once."""
    job = Job(
        id=event.job,
        number=number_of(event.job) * ELEMENT_NUMBERS,
        spec=event.spec,
        key=event.key,
        submitted_ms=event.at_ms,
        awaits=event.awaits,
        not_before_ms=event.spec.begin_ms if event.spec.begin_ms > event.at_ms else 0,
    )
    if event.spec.array:
        array = state.arrays[event.spec.array]
        sweep, elements = parts_of(array)
        position = sweep.position_of(event.spec.index)
        assert position is not None, event.job
        job.number = array.number + 1 + position
        if position in elements.ran:
            job.attempt = elements.base
        elements.pending.discard(position)
    return job


def element_added(state: State, job: Job) -> None:
    unfolded = state.unfolded[job.spec.array]
    unfolded.jobs[job.id] = None
    unfolded.fresh += is_fresh(job)


def element_dropped(state: State, job: Job) -> None:
    del state.unfolded[job.spec.array].jobs[job.id]


def is_fresh(job: Job) -> bool:
    return job.phase is Phase.WAITING and job.placed_ms is None


def element_placed(state: State, job: Job) -> None:
    """Called before that is noted in the job."""
    state.unfolded[job.spec.array].fresh -= is_fresh(job)


def element_runs(state: State, job: Job, at_ms: int) -> None:
    array = state.arrays[job.spec.array]
    if array.phase is Phase.WAITING:
        array.phase = Phase.RUNNING
    if array.running_ms is None:
        array.running_ms = at_ms


def element_ended(state: State, job: Job, event: JobFinished) -> None:
    """Called before that is noted in the job."""
    state.unfolded[job.spec.array].fresh -= is_fresh(job)
    sweep, elements = parts_of(state.arrays[job.spec.array])
    position = sweep.position_of(job.spec.index)
    assert position is not None, job.id
    elements.ended(event.outcome.value).add(position)
    if job.attempt:
        elements.ran.add(position)
    elements.attempts = max(elements.attempts, job.attempt)


def _array_cancelled(state: State, event: ArrayCancelled) -> None:
    array = state.arrays[event.job]
    _, elements = parts_of(array)
    elements.cancelled.take_in(elements.pending)
    elements.pending = Bits()
    array.why = event.why
    array.phase = Phase.STOPPING


def _array_retried(state: State, event: ArrayRetried) -> None:
    if event.record is not None:
        add_array(state, _revived(event.record))
    array = state.arrays[event.job]
    sweep, elements = parts_of(array)
    if event.index is None:
        for missed in elements.missed:
            elements.pending.take_in(missed)
        elements.failed, elements.timed_out, elements.cancelled = Bits(), Bits(), Bits()
    else:
        position = sweep.position_of(event.index)
        assert position is not None, event.index
        for missed in elements.missed:
            missed.discard(position)
        elements.pending.add(position)
    elements.base = elements.attempts
    array.why = event.why
    if array.phase is Phase.STOPPING:
        array.phase = Phase.WAITING


def _revived(record: Job) -> Job:
    """A copy: an event does not change."""
    _, elements = parts_of(record)
    copy = msgspec.json.decode(msgspec.json.encode(elements), type=Elements)
    return msgspec.structs.replace(
        record, elements=copy, phase=Phase.WAITING, outcome=None, code=None, finished_ms=None
    )


def _array_finished(state: State, event: ArrayFinished) -> None:
    array = state.arrays.pop(event.job)
    del state.unfolded[event.job]
    state.agenda.windows.pop(event.job, None)
    state.tally.array(state.accounts, array, -1)
    state.sizes.gone(array)
    if array.key:
        del state.keys[array.key]
    for other in array.awaits:
        drop_from(state.dependents, other, array.id)
    if array.spec.workflow:
        drop_from(state.flows, array.spec.workflow, array.id)
    array.phase = Phase.FINISHED
    array.outcome, array.code, array.why = event.outcome, event.code, event.why
    array.finished_ms = event.at_ms


APPLY_ARRAY: dict[type[EventBase], Callable[[State, Any], None]] = {
    ArraySubmitted: _array_submitted,
    ArrayCancelled: _array_cancelled,
    ArrayRetried: _array_retried,
    ArrayFinished: _array_finished,
}
