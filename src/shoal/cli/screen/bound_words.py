"""What limits a job's steps, as lines of text."""

from __future__ import annotations

from shoal.model.bound import Bound


def bound_lines(bound: Bound | None) -> list[str]:
    """The verdict with its first evidence, then what else is known."""
    if bound is None:
        return []
    return [bound.text, *(f"  {text}" for text in bound.evidence[1:])]
