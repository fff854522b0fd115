"""What a job waits for that is not the cluster: other jobs, or the time it was given."""

from __future__ import annotations

from shoal.core.answers.arrays import progress_text
from shoal.core.scheduling.backfill import TYPICAL
from shoal.core.state.expect import left_ms
from shoal.core.state.state import State
from shoal.model.after import WORDS, conditions
from shoal.model.durations import about, duration_text, moment_text
from shoal.model.job import Job, Phase
from shoal.model.reason import job_part
from shoal.model.resources import plural


def awaited(state: State, job: Job, now_ms: int) -> str:
    """The first job that it waits for and that job's state; of the others, the number."""
    first = job.awaits[0]
    words = [WORDS[one.when] for one in conditions(job.spec.after) if one.job == first]
    other = state.live(first)
    name, now = job_part(job.spec.tenant, first), ""
    if other is not None:
        name, now = other.label, _state_of(state, other, now_ms)
    more = len(job.awaits) - 1
    rest = f"; and for {plural(more, 'other job')}" if more else ""
    return f"waits for {name} to {words[0]}{now}{rest}"


def _state_of(state: State, other: Job, now_ms: int) -> str:
    text = f"; {other.mention} is {other.phase.value}"
    if other.elements is not None:
        return f"; {other.mention}: {progress_text(state, other)}"
    if other.phase is Phase.RUNNING:
        left = left_ms(state, other, now_ms, TYPICAL)
        return text if left is None else f"{text} and will probably end in about {about(left)}"
    if other.phase is Phase.WAITING and other.awaits:
        return f"{text} for {job_part(other.spec.tenant, other.awaits[0])}"
    return text


def begins(job: Job, now_ms: int) -> str:
    left = duration_text(job.not_before_ms - now_ms)
    return f"may begin at {moment_text(job.not_before_ms)}, in {left}, as it was asked to"
