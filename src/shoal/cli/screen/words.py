"""What views say of a job or a service in words: its state, progress, elements and bounds."""

from __future__ import annotations

from shoal.model.array import ArrayCounts
from shoal.model.bound import Bound
from shoal.model.durations import duration_text
from shoal.model.resources import plural
from shoal.model.service import Scale
from shoal.model.views import ProgressView

STATE_WORDS = {
    "succeeded": "has succeeded",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "timed-out": "ran out of time",
}


def replicas_text(scale: Scale) -> str:
    """As in a service file: '1 replica', or '1..8 replicas'."""
    if scale.least == scale.most:
        return plural(scale.most, "replica")
    return f"{scale.least}..{scale.most} replicas"


def state_text(state: str) -> str:
    """A job's state as the rest of a sentence about it."""
    return STATE_WORDS.get(state, f"is {state}")


def progress_text(progress: ProgressView) -> str:
    """'step 120/600, loss 1.9, 4m 0s left; member 2 is slow', as far as known."""
    of = f"/{progress.steps_total}" if progress.steps_total else ""
    words = [f"step {progress.step}{of}"]
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.3g}")
    if progress.left_ms is not None:
        words.append(f"{duration_text(progress.left_ms)} left")
    slow = progress.slow
    if not slow:
        return ", ".join(words)
    who = f"member {slow[0]} is" if len(slow) == 1 else f"{plural(len(slow), 'member')} are"
    return f"{', '.join(words)}; {who} slow"


def summary(counts: ArrayCounts) -> str:
    """For a list: '40/100 done, 8 running, 2 failed'."""
    parts = [f"{counts.ended}/{counts.elements} done"]
    missed = counts.failed + counts.timed_out
    for number, state in (
        (counts.running, "running"),
        (counts.waiting, "waiting"),
        (missed, "failed"),
        (counts.cancelled, "cancelled"),
    ):
        if number:
            parts.append(f"{number} {state}")
    return ", ".join(parts)


def bound_lines(bound: Bound | None) -> list[str]:
    """The verdict with its first evidence, then what else is known."""
    if bound is None:
        return []
    return [bound.text, *(f"  {text}" for text in bound.evidence[1:])]
