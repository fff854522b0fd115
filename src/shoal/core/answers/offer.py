"""When a job would start if it were submitted now: what a neighbor that asks is told."""

from __future__ import annotations

from shoal.core.answers.outlook import NO_TIME, UNKNOWN
from shoal.core.answers.trial import Trials, submitted, tried
from shoal.core.answers.why import barrier
from shoal.core.phases.admit import job_problem, no_room
from shoal.core.scheduling.predict import predict
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import JobSpec
from shoal.model.offers import Offer


def offer(state: State, spec: JobSpec, scope: str, now_ms: int) -> Offer:
    """`scope`: whose word it is. `why` is for the sender's eyes only once it is rendered."""
    round_ = Round(state, state.policy, now_ms)  # nothing is emitted
    problem = job_problem(round_, spec, scope) or no_room(state, (spec,))
    if problem is not None:
        return Offer(why=f"{problem.field}: {problem.message}")
    job, begins_ms = submitted(state, spec, now_ms), max(now_ms, spec.begin_ms)
    reason = barrier(state, job, now_ms)
    if reason is not None and reason.kind in NO_TIME:
        return Offer(why=reason.text)
    if reason is None and tried(state, job, now_ms, Trials()) is not None:
        return Offer(start_ms=begins_ms - now_ms, early_ms=begins_ms - now_ms)
    expected = predict(state, job, now_ms)
    if expected is None:
        return Offer(why=f"{reason.text}; {UNKNOWN}" if reason is not None else UNKNOWN)
    early_ms, late_ms = max(expected.early_ms, begins_ms), max(expected.late_ms, begins_ms)
    return Offer(start_ms=late_ms - now_ms, early_ms=early_ms - now_ms)
