"""Where the time of a job's last steps went, by member: the newest counts less earlier ones.

Each member has its own window, so nothing waits for the others. It begins after the first steps,
which compile and fill caches, and again after a step in which the job slept. This is heard: it is
changed in place, never logged, and a beat costs O(1).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.model.health import HealthRule
from shoal.model.progress import Beat, Spent, spent_of

# A window is at least as long as this, and about twice as long at most.
WINDOW_STEPS = 25
WINDOW_MS = 10_000
# With long steps, fewer of them are enough.
LONG_STEPS = 8
LONG_MS = 300_000


class Recent(msgspec.Struct):
    """`old` and `middle` are two earlier counts; the window is from `old` to `newest`."""

    old: Spent
    middle: Spent
    newest: Spent
    middle_ms: int
    naps: int  # that the job has had
    from_steps: int  # the window begins when the process has done this many


def hear(
    recent: dict[int, Recent],
    member: int,
    beat: Beat,
    now_ms: int,
    rule: HealthRule,
    *,
    naps: int = 0,
) -> None:
    said, known = spent_of(beat), recent.get(member)
    if known is None or said.steps < known.newest.steps:  # a new process
        recent[member] = Recent(said, said, said, now_ms, naps, rule.warm_steps)
        return
    known.newest = said
    if known.naps != naps:  # the step that is under way has the nap in it
        known.naps, known.from_steps = naps, said.steps + 1
    if known.old.steps < known.from_steps:
        known.old = known.middle = said
        known.middle_ms = now_ms
        return
    steps, long_ms = said.steps - known.middle.steps, now_ms - known.middle_ms
    enough = steps >= WINDOW_STEPS and long_ms >= WINDOW_MS
    if enough or (steps >= LONG_STEPS and long_ms >= LONG_MS):
        known.old, known.middle, known.middle_ms = known.middle, said, now_ms


def window(recent: Mapping[int, Recent]) -> dict[int, Spent]:
    """Of each member that has made steps in its window."""
    return {
        number: one.newest.since(one.old)
        for number, one in recent.items()
        if one.newest.steps > one.old.steps
    }
