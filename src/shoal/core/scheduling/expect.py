"""When running jobs are expected to end: by the user's estimate, else by what was learned."""

from __future__ import annotations

from shoal.core.scheduling.order import ran_ms as has_run_ms
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
    ran_ms = has_run_ms(job, now_ms)
    total = run_ms(state, job, percent, ran_ms)
    return None if total is None else max(1, total - ran_ms)
