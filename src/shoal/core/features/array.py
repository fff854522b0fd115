"""Arrays: requests for them, elements that become jobs, and sweeps that cannot be."""

from __future__ import annotations

from collections import Counter

import msgspec

from shoal.core.features.caps import bytes_left, room_for, share_left, too_large, too_many
from shoal.core.features.halving import halving_problem
from shoal.core.state.apply_array import parts_of
from shoal.core.state.ending import CANCELLED_CODE, cancel
from shoal.core.state.events.arrays import ArrayFinished, ArrayRetried
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.round import Round
from shoal.core.state.sizes import bytes_of
from shoal.core.state.state import State
from shoal.model.array import ARRAYS_MAX, ArrayCounts, counts_of, counts_text
from shoal.model.ids import array_of, in_order
from shoal.model.job import Job, JobSpec, Outcome, Phase
from shoal.model.report import Accepted, Answer, Cancel, Full, Refused, Retry
from shoal.model.resources import plural
from shoal.model.sweep import (
    ARRAY_COUNT,
    ARRAY_INDEX,
    ARRAY_JOB,
    ELEMENTS_MAX,
    INDEX,
    VALUES_MAX,
    VARIABLES_MAX,
    Sweep,
    filled,
    placeholders,
)


def too_many_arrays(state: State, tenant: str) -> Refused | None:
    own = sum(array.spec.tenant == tenant for array in state.arrays.values())
    if share_left(ARRAYS_MAX, len(state.arrays), own) > 0:
        return None
    text = f"the cluster takes at most {ARRAYS_MAX:,} arrays at a time"
    return Refused("array", f"{text}; try again when some have ended", full=Full.CLUSTER)


def cancel_array(round_: Round, array: Job, request: Cancel) -> Answer:
    """All of it: what has not begun never will."""
    if array.phase is Phase.STOPPING:
        return Accepted(array.id, "already being cancelled")
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


def sweep_problem(spec: JobSpec) -> Refused | None:
    sweep = spec.sweep
    assert sweep is not None
    problem = _indices_problem(sweep) or _variables_problem(sweep, spec)
    if problem is not None:
        return problem
    if not sweep.count:
        return Refused("array", "has no element; write e.g. 0-99")
    if sweep.count > ELEMENTS_MAX:
        return Refused("array", f"has {sweep.count:,} elements; the maximum is {ELEMENTS_MAX:,}")
    return halving_problem(spec) or _placeholder_problem(sweep, spec)


def _indices_problem(sweep: Sweep) -> Refused | None:
    if sweep.ranges and sweep.variables:
        fix = "leave the indices out, and write e.g. array: '%8' for 8 at a time"
        return Refused("array", f"and a sweep both say which elements there are; {fix}")
    last = -1
    for one in sweep.ranges:
        if one.last < one.first:
            return Refused("array", f"{one.first}-{one.last} is backwards")
        if one.first <= last:
            what = "is named twice" if one.first == last else f"comes after {last}"
            return Refused("array", f"{one.first} {what}; write the indices in rising order")
        last = one.last
    return None


def _variables_problem(sweep: Sweep, spec: JobSpec) -> Refused | None:
    if sweep.grid and sweep.rows:
        return Refused("grid", "and list exclude each other; leave one out")
    field = "grid" if sweep.grid else "list"
    if len(sweep.variables) > VARIABLES_MAX:
        return Refused(field, f"has more than {VARIABLES_MAX} variables")
    for name, values in sweep.grid.items():
        if not 0 < len(values) <= VALUES_MAX:
            return Refused(field, f"{name} needs 1 to {VALUES_MAX:,} values")
    if sweep.rows and not sweep.variables:
        return Refused(field, "row 0 has no variable; write e.g. {lr: 0.1}")
    for number, row in enumerate(sweep.rows):
        if row.keys() != sweep.rows[0].keys():
            odd = sorted(row.keys() ^ sweep.rows[0].keys())[0]
            lacking = "lacks" if odd not in row else "alone has"
            return Refused(field, f"row {number} {lacking} {odd}; give all rows the same variables")
    for name in sweep.variables:
        if name == INDEX:
            return Refused(field, "index is the index of an element; choose another name")
        if name in spec.env:
            return Refused(field, f"{name} is in env, too; leave one out")
    texts = [text for values in sweep.grid.values() for text in values]
    texts += [text for row in sweep.rows for text in row.values()]
    if any("\0" in text for text in texts):
        return Refused(field, "contains a NUL byte; remove it")
    return None


def _placeholder_problem(sweep: Sweep, spec: JobSpec) -> Refused | None:
    """Without variables, braces are the command's own, except for {index}."""
    known = (*sweep.variables, INDEX)
    for word in spec.command if sweep.variables else ():
        for name in placeholders(word):
            if name not in known:
                has = f"the sweep has {', '.join(known)}"
                return Refused(
                    "command",
                    f"{{{name}}} is not a variable; {has} (write {{{{{name}}}}} for the "
                    "text itself)",
                )
    return None


def longest_element(spec: JobSpec) -> JobSpec:
    """As long as an element can get, to see whether every element can start."""
    sweep = spec.sweep
    assert sweep is not None
    values = {name: max(texts, key=_size) for name, texts in sweep.grid.items()}
    for name in sweep.variables if sweep.rows else ():
        values[name] = max((row[name] for row in sweep.rows), key=_size)
    fill = {**values, INDEX: "9" * 9}
    command = tuple(filled(word, fill) for word in spec.command)
    return msgspec.structs.replace(spec, command=command, env={**spec.env, **values}, sweep=None)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def counts(state: State, array: Job) -> ArrayCounts:
    """Of a live array, or of the record of one that has finished."""
    waiting = running = 0
    if array.id in state.arrays:
        for job_id in state.unfolded[array.id].jobs:
            active = state.jobs[job_id].active
            running, waiting = running + active, waiting + (not active)
    return counts_of(*parts_of(array), waiting, running)


def first_waiting(state: State, array: Job) -> Job | None:
    """The element that is next in line, if any waits."""
    jobs = (state.jobs[job_id] for job_id in state.unfolded[array.id].jobs)
    waiting = [job for job in jobs if job.phase is Phase.WAITING]
    return min(waiting, key=lambda job: job.number, default=None)


def progress_text(state: State, array: Job) -> str:
    """What is true of a live array now, and which elements failed so far."""
    seen = counts(state, array)
    text = counts_text(seen)
    if seen.failed or seen.timed_out:
        text += f" ({seen.missed})"
    if array.phase is Phase.STOPPING:
        return f"{array.why}; {text}"
    sweep, _ = parts_of(array)
    if seen.pending and sweep.at_most and seen.running + seen.waiting >= sweep.at_most:
        text += f"; at most {sweep.at_most} at a time"
    return text


# -- what always holds, in code that shares nothing with the code above ----------------------------


def arrays_violation(state: State) -> str:
    """What is wrong with the arrays as a whole; empty: nothing."""
    live: dict[str, list[Job]] = {array_id: [] for array_id in state.arrays}
    for job in state.jobs.values():
        if job.spec.array and job.spec.array not in live:
            return f"{job.id} is an element of an array that does not exist"
        if job.spec.array:
            live[job.spec.array].append(job)
    if [*state.unfolded] != [*state.arrays]:
        return "the elements by array do not match the arrays"
    for array_id, array in state.arrays.items():
        problem = _array_violation(array, live[array_id])
        if problem:
            return problem
        unfolded = state.unfolded[array_id]
        fresh = sum(j.phase is Phase.WAITING and j.placed_ms is None for j in live[array_id])
        if sorted(unfolded.jobs) != sorted(job.id for job in live[array_id]):
            return f"the live elements of {array_id} do not match the jobs"
        if unfolded.fresh != fresh:
            return f"{array_id} has {fresh} elements that were never placed, not {unfolded.fresh}"
    return ""


def _array_violation(array: Job, live: list[Job]) -> str:
    """Each element is pending, live or ended in one way, and none is more than one of these."""
    sweep, elements = array.spec.sweep, array.elements
    if sweep is None or elements is None:
        return f"{array.id} is among the arrays, but is none"
    if array.phase is Phase.FINISHED:
        return f"{array.id} is finished but still in the state"
    seen: Counter[int] = Counter(job.spec.index for job in live)
    sets = (
        elements.pending,
        elements.succeeded,
        elements.failed,
        elements.cancelled,
        elements.timed_out,
    )
    indices = _indices(sweep)
    for one in sets:
        positions = [
            8 * at + bit for at, byte in enumerate(one.data) for bit in range(8) if byte >> bit & 1
        ]
        if len(positions) != one.count or (positions and positions[0] < one.low):
            return f"{array.id}: a set of elements is counted wrongly"
        if positions and positions[-1] >= len(indices):
            return f"{array.id} has an element beyond its last"
        seen.update([indices[position] for position in positions])
    if sorted(seen) != indices or max(seen.values(), default=0) > 1:
        twice = [index for index, count in seen.items() if count > 1]
        return f"{array.id} has {len(seen)} of {len(indices)} elements; {twice[:3]} are there twice"
    if sweep.at_most and len(live) > sweep.at_most:
        return f"{array.id} has {len(live)} live elements; at most {sweep.at_most} are allowed"
    if any(job.id != f"{array.id}.{job.spec.index}" for job in live):
        return f"an element of {array.id} has the name of another"
    return ""


def _indices(sweep: Sweep) -> list[int]:
    if sweep.ranges:
        return [index for one in sweep.ranges for index in range(one.first, one.last + 1, one.step)]
    size = len(sweep.rows) or 1
    for values in sweep.grid.values():
        size *= len(values)
    return list(range(size))
