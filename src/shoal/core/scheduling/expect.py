"""When running jobs are expected to end: by the user's word, else by what was learned."""

from __future__ import annotations

from shoal.core.state import State
from shoal.model.job import Job

# A job that has outlived what was expected of it is expected to go on for this part of its age.
OVERTIME_PART = 4


def run_ms(state: State, job: Job, percent: int) -> int | None:
    """How long the job runs in all, such that so many of a hundred like it are done by then.
    None if nobody knows. A time limit is an upper bound of whatever is expected."""
    spec = job.spec
    expected = spec.estimate_ms or state.estimates.expect(job, percent)
    if expected is None:
        return spec.time_limit_ms or None
    return min(expected, spec.time_limit_ms) if spec.time_limit_ms else expected


def left_ms(state: State, job: Job, now_ms: int, percent: int) -> int | None:
    """How long it will go on from now."""
    total = run_ms(state, job, percent)
    if total is None:
        return None
    ran_ms = job.attained_ms + (now_ms - job.running_ms if job.running_ms is not None else 0)
    if ran_ms < total:
        return total - ran_ms
    left = max(1, ran_ms // OVERTIME_PART)
    if job.spec.time_limit_ms and job.running_ms is not None:
        left = max(1, min(left, job.running_ms + job.spec.time_limit_ms - now_ms))
    return left
