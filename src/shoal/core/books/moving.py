"""Whether a gang should leave a slow node: what that saves against what the restart costs."""

from __future__ import annotations

import msgspec

from shoal.model.durations import duration_text
from shoal.model.health import HealthRule


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """In GPU-milliseconds; for a gang without GPUs, in member-milliseconds."""

    worth: bool
    gain: int
    cost: int
    why: str


def consider(
    *,
    own_us: int,
    gang_us: int,
    step_us: int,
    remaining_ms: int,
    restart_ms: int,
    since_checkpoint_ms: int,
    width: int,
    rule: HealthRule,
) -> Move:
    """`own_us` and `gang_us` are the slow member's and the gang's own time per step, `step_us` the
    whole step as it is now, `remaining_ms` at the present pace, `width` the gang's GPUs."""
    saved_us = min(max(own_us - gang_us, 0), max(step_us, 0))
    gain_ms = remaining_ms * saved_us // step_us if step_us > 0 else 0
    cost_ms = restart_ms + since_checkpoint_ms
    worth = gain_ms * 1000 >= cost_ms * rule.move_margin_milli and gain_ms > 0
    told = (
        f"without the slow node a step takes {_seconds(step_us - saved_us)} instead of "
        f"{_seconds(step_us)}: {duration_text(gain_ms)} of the remaining "
        f"{duration_text(remaining_ms)} saved, against {duration_text(cost_ms)} for the restart "
        f"({duration_text(since_checkpoint_ms)} of it work since the last checkpoint) "
        f"x {width} GPUs"
    )
    verdict = "worth it" if worth else f"less than {rule.move_margin_milli / 1000:g} times the cost"
    return Move(
        worth=worth,
        gain=gain_ms * max(width, 1),
        cost=cost_ms * max(width, 1),
        why=f"{told}; {verdict}",
    )


def remaining_ms(
    *, step: int, steps_total: int, step_us: int, ran_ms: int, expected_ms: int | None
) -> int:
    """By the steps left, else by what such jobs take, else as long as it has run so far."""
    if steps_total > 0:
        return max(steps_total - step, 0) * step_us // 1000
    if expected_ms is not None and expected_ms > ran_ms:
        return expected_ms - ran_ms
    return ran_ms


def _seconds(us: int) -> str:
    return f"{us / 1_000_000:.3g}s"
