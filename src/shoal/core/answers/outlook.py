"""When a waiting job starts and why it waits, from one look at the state, so that they agree."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.answers.why import Waits, explain, reason_of
from shoal.core.scheduling.predict import predict
from shoal.core.state.state import State
from shoal.model.durations import duration_text, span_text
from shoal.model.job import Job, Phase
from shoal.model.policy import Policy

# No running job ends these waits, so no time is given; the reason says what ends them.
NO_TIME = frozenset(
    (
        *(Waits.BUDGET, Waits.NO_NODES, Waits.CLOSED, Waits.LABELS, Waits.SUPPLY, Waits.AFTER),
        Waits.NEIGHBOR,
    )
)


UNKNOWN = "its start cannot be predicted: jobs ahead have no --time-limit, --estimate or history"
ROOM_MS = 2_000  # a retry that finds room within this time starts when it is due


class Outlook(NamedTuple):
    """`start` is a sentence about when, empty if `why` says enough. The job will probably start
    between the two moments; None if no time is given."""

    why: str
    start: str = ""
    early_ms: int | None = None
    late_ms: int | None = None


def outlook(state: State, job: Job, policy: Policy, now_ms: int) -> Outlook:
    why = explain(state, job, policy, now_ms)
    if job.phase is not Phase.WAITING or job.elements is not None:
        return Outlook(why)
    reason = reason_of(state, job, policy, now_ms)
    if reason is not None and reason.kind in NO_TIME:
        return Outlook(why)
    expected = predict(state, job, now_ms)
    if expected is not None:
        early_ms, late_ms, stops = expected
        if stops is not None:
            at = duration_text(max(0, stops.at_ms - now_ms))
            why = f"{why}; {stops}, in {at} at the earliest"
        when = span_text(early_ms - now_ms, late_ms - now_ms)
        start = f"it will probably start {when}"
        if reason is not None and reason.kind is Waits.RETRY:
            start = _after_retry(job, early_ms, late_ms, now_ms)
        return Outlook(why, start, early_ms, late_ms)
    if reason is not None and reason.kind in (Waits.RETRY, Waits.BEGIN):
        return Outlook(why)
    return Outlook(why, UNKNOWN)


def _after_retry(job: Job, early_ms: int, late_ms: int, now_ms: int) -> str:
    """One sentence for both: when it may start, and when there is room."""
    due = duration_text(job.not_before_ms - now_ms)
    if late_ms - job.not_before_ms < ROOM_MS:
        return f"it will probably start when its retry is due, in {due}"
    when = span_text(early_ms - now_ms, late_ms - now_ms)
    return f"its retry is due in {due}, but it will probably start {when}, when there is room"
