"""Arrays: elements become jobs shortly before they can run, and an array ends with its last one."""

from __future__ import annotations

import msgspec

from shoal.core.features.caps import bytes_left, room_for
from shoal.core.phases.ending import CANCELLED_CODE
from shoal.core.state.apply_array import parts_of
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.array import counts_of, counts_text
from shoal.model.events import ArrayFinished, JobSubmitted
from shoal.model.job import Job, JobSpec, Outcome
from shoal.model.sweep import ARRAY_COUNT, ARRAY_INDEX, ARRAY_JOB, INDEX, filled

# So many elements wait at least, so that the scheduler has a choice. The window doubles whenever
# all of them were placed in one step, up to as many as a step can place and more.
WINDOW_MIN, WINDOW_MAX = 16, 512
TIMED_OUT_CODE = 124


def unfold(round_: Round) -> None:
    for array in list(round_.state.arrays.values()):
        _, elements = parts_of(array)
        if elements.pending.count:
            for _ in range(_room(round_.state, array)):
                _unfold_first(round_, array)
                if not bytes_left(round_.state.sizes, array.spec.tenant):
                    break
        elif not round_.state.unfolded[array.id].jobs:
            _finish(round_, array)


def look_for_more(round_: Round) -> None:
    """After a schedule: where all elements that waited were placed, there may be room for more."""
    state = round_.state
    for array in state.arrays.values():
        _, elements = parts_of(array)
        if not elements.pending.count and not state.unfolded[array.id].jobs:
            round_.more = True  # it was cancelled since
        if elements.pending.count and not state.unfolded[array.id].fresh and _room(state, array):
            window = state.agenda.windows.get(array.id, WINDOW_MIN)
            state.agenda.windows[array.id] = min(2 * window, WINDOW_MAX)
            round_.more = True


def _room(state: State, array: Job) -> int:
    """How many more elements may become jobs now."""
    sweep, elements = parts_of(array)
    if array.awaits:
        return 0
    unfolded = state.unfolded[array.id]
    room = state.agenda.windows.get(array.id, WINDOW_MIN) - unfolded.fresh
    if sweep.at_most:
        room = min(room, sweep.at_most - len(unfolded.jobs))
    room = min(room, elements.pending.count)
    if room <= 0:
        return 0
    first = not unfolded.jobs  # the array counts as one job anyway
    if not first and not bytes_left(state.sizes, array.spec.tenant):
        return 0
    return min(room, room_for(state.tally, state.accounts, array.spec.tenant, counted=first))


def _unfold_first(round_: Round, array: Job) -> None:
    sweep, elements = parts_of(array)
    position = next(iter(elements.pending))
    spec = element_spec(array.id, array.spec, position)
    job_id = f"{array.id}.{sweep.index_at(position)}"
    round_.emit(JobSubmitted(at_ms=round_.now_ms, job=job_id, spec=spec))


def element_spec(array: str, template: JobSpec, position: int) -> JobSpec:
    """The job that an element is: the template with its variables filled in."""
    sweep = template.sweep
    assert sweep is not None, array
    index = sweep.index_at(position)
    values = sweep.values_at(position)
    shoal = {ARRAY_JOB: array, ARRAY_INDEX: str(index), ARRAY_COUNT: str(sweep.count)}
    fill = {**values, INDEX: str(index)}
    return msgspec.structs.replace(
        template,
        command=tuple(filled(word, fill) for word in template.command),
        env={**template.env, **values, **shoal},
        sweep=None,
        after=(),
        workflow="",
        schedule="",
        scheduled_ms=0,
        array=array,
        index=index,
    )


def _finish(round_: Round, array: Job) -> None:
    sweep, elements = parts_of(array)
    counts = counts_of(sweep, elements, 0, 0)
    outcome, code = Outcome.SUCCEEDED, 0
    if counts.failed or counts.timed_out:
        outcome = Outcome.FAILED if counts.failed else Outcome.TIMED_OUT
        code = 1 if counts.failed else TIMED_OUT_CODE
    elif counts.cancelled:
        outcome, code = Outcome.CANCELLED, CANCELLED_CODE
    why = counts_text(counts) + (f": {counts.missed}" if counts.missed else "")
    round_.emit(
        ArrayFinished(at_ms=round_.now_ms, job=array.id, outcome=outcome, code=code, why=why)
    )
