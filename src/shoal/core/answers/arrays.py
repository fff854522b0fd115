"""How far an array is, and why it does not go on; nothing here decides."""

from __future__ import annotations

from shoal.core.state.apply_array import parts_of
from shoal.core.state.state import State
from shoal.model.array import ArrayCounts, counts_of, counts_text
from shoal.model.job import Job, Phase


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
