"""When a waiting job starts, beside why it waits: both from one look, so that neither denies the
other."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.answers.why import Waits, explain, reason_of
from shoal.core.scheduling.predict import predict
from shoal.core.state.state import State
from shoal.model.durations import span_text
from shoal.model.job import Job, Phase
from shoal.model.policy import Policy

# No running job ends these waits, so no time is named; the reason says what does.
NO_TIME = frozenset((Waits.BUDGET, Waits.NO_NODES, Waits.CLOSED))


class Outlook(NamedTuple):
    """`start` is a sentence about when, empty where `why` says all there is to say. It will
    probably start between the two moments; None: no time is told."""

    why: str
    start: str = ""
    early_ms: int | None = None
    late_ms: int | None = None


def outlook(state: State, job: Job, policy: Policy, now_ms: int) -> Outlook:
    why = explain(state, job, policy, now_ms)
    if job.phase is not Phase.WAITING:
        return Outlook(why)
    reason = reason_of(state, job, policy, now_ms)
    if reason is not None and reason.kind in NO_TIME:
        return Outlook(why)
    expected = predict(state, job, now_ms)
    if expected is not None:
        early_ms, late_ms = expected
        when = span_text(early_ms - now_ms, late_ms - now_ms)
        return Outlook(why, f"it will probably start {when}", early_ms, late_ms)
    if reason is not None and reason.kind is Waits.RETRY:
        return Outlook(why)
    return Outlook(
        why, "no start can be foretold: jobs ahead of it have no --time-limit, --estimate or past"
    )
