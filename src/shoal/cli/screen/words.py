"""What views say of a job or a service in words: its state, replicas and bounds."""

from __future__ import annotations

from shoal.model.bound import Bound
from shoal.model.resources import plural
from shoal.model.service import Scale

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


def bound_lines(bound: Bound | None) -> list[str]:
    """The verdict with its first evidence, then what else is known."""
    if bound is None:
        return []
    return [bound.text, *(f"  {text}" for text in bound.evidence[1:])]
