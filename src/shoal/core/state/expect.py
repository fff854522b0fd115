"""When running jobs are expected to end: by the user's estimate, else by what was learned."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job


def run_ms(state: State, job: Job, percent: int, ran_ms: int = 0) -> int | None:
    """The total run time by which `percent` of the jobs like it that ran for `ran_ms` are done.
    None if unknown. A time limit is an upper bound."""
    spec = job.spec
    expected: int | None = spec.estimate_ms
    if not expected or expected <= ran_ms:
        expected = state.estimates.expect(job, percent, ran_ms)
    if expected is None:
        return spec.time_limit_ms or None
    return min(expected, spec.time_limit_ms) if spec.time_limit_ms else expected


def left_ms(state: State, job: Job, now_ms: int, percent: int) -> int | None:
    """How much longer it will run."""
    so_far_ms = ran_ms(job, now_ms)
    total = run_ms(state, job, percent, so_far_ms)
    return None if total is None else max(1, total - so_far_ms)


def soonest_ms(state: State, job: Job, now_ms: int, percent: int) -> int | None:
    """`left_ms` is not less than this, which takes less time to know; None if it is."""
    so_far_ms, spec = ran_ms(job, now_ms), job.spec
    expected: int | None = spec.estimate_ms
    if not expected or expected <= so_far_ms:
        estimates = state.estimates
        known = not estimates.silent
        expected = estimates.soonest(estimates.key_for(job), percent, so_far_ms) if known else None
    if spec.time_limit_ms and (expected is None or expected > spec.time_limit_ms):
        expected = spec.time_limit_ms
    return None if expected is None else max(1, expected - so_far_ms)


def ran_ms(job: Job, now_ms: int) -> int:
    """How long it has run: in this attempt, and in the saved parts of earlier ones."""
    if job.running_ms is None or not job.active:
        return job.attained_ms
    until_ms = now_ms if job.dozed_ms is None else job.dozed_ms
    return job.attained_ms + until_ms - job.running_ms
