"""Index upkeep for arrays and their elements; a part of `apply`."""

from __future__ import annotations

from shoal.core.state.records import Unfolded
from shoal.core.state.state import State
from shoal.model.array import Elements
from shoal.model.job import Job, Outcome, Phase
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
    state.sizes.job(array, state.caches.specs.measure(array.spec))
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


def element_ended(state: State, job: Job, outcome: Outcome) -> None:
    """Called before that is noted in the job."""
    state.unfolded[job.spec.array].fresh -= is_fresh(job)
    sweep, elements = parts_of(state.arrays[job.spec.array])
    position = sweep.position_of(job.spec.index)
    assert position is not None, job.id
    elements.ended(outcome.value).add(position)
    if job.attempt:
        elements.ran.add(position)
    elements.attempts = max(elements.attempts, job.attempt)
