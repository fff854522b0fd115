"""The invariants of arrays, in code that shares nothing with what it verifies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shoal.model.job import Job, Phase
from shoal.model.sweep import Sweep

if TYPE_CHECKING:
    from shoal.core.state.state import State


def arrays_problem(state: State) -> str:
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
        problem = array_problem(array, live[array_id])
        if problem:
            return problem
        unfolded = state.unfolded[array_id]
        fresh = sum(j.phase is Phase.WAITING and j.placed_ms is None for j in live[array_id])
        if sorted(unfolded.jobs) != sorted(job.id for job in live[array_id]):
            return f"the live elements of {array_id} do not match the jobs"
        if unfolded.fresh != fresh:
            return f"{array_id} has {fresh} elements that were never placed, not {unfolded.fresh}"
    return ""


def array_problem(array: Job, live: list[Job]) -> str:
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
