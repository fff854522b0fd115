"""What happened to an array, as a sentence."""

from __future__ import annotations

from typing import assert_never

from shoal.model.array import ArrayCounts
from shoal.model.events import ArrayCancelled, ArrayFinished, ArrayRetried, ArraySubmitted
from shoal.model.resources import plural
from shoal.model.sweep import Sweep


def about_array(
    event: ArraySubmitted | ArrayCancelled | ArrayRetried | ArrayFinished,
) -> str:
    match event:
        case ArraySubmitted():
            name = f" as '{event.spec.name}'" if event.spec.name else ""
            many = sweep_text(event.spec.sweep) if event.spec.sweep is not None else ""
            return f"was submitted{name}: an array of {many}"
        case ArrayCancelled():
            return f"is being cancelled: {event.why}"
        case ArrayRetried():
            one = "" if event.index is None else f" (index {event.index})"
            return f"goes on: {event.why}{one}"
        case ArrayFinished():
            return f"ended, {event.outcome.value}: {event.why}"
        case _:
            assert_never(event)


def sweep_text(sweep: Sweep) -> str:
    """'100 elements, at most 8 at a time'."""
    text = plural(sweep.count, "element")
    if sweep.variables:
        text += f" over {', '.join(sweep.variables)}"
    return f"{text}, at most {sweep.at_most} at a time" if sweep.at_most else text


def summary(counts: ArrayCounts) -> str:
    """For a list: '40/100 done, 8 running, 2 failed'."""
    parts = [f"{counts.ended}/{counts.elements} done"]
    missed = counts.failed + counts.timed_out
    for number, what in (
        (counts.running, "running"),
        (counts.waiting, "waiting"),
        (missed, "failed"),
        (counts.cancelled, "cancelled"),
    ):
        if number:
            parts.append(f"{number} {what}")
    return ", ".join(parts)
