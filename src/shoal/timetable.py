"""Which schedules are due, and when next: the part of the tick that needs time zones."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.cron import BadCron, due_after, due_before, parse, zone_of
from shoal.model.schedule import COUNTED_MAX, Due, ScheduleSpec

DUES_MAX = 100  # schedules of one step; the next step takes up the others
NEVER_MS = 253_402_300_799_000  # the end of the year 9999


def next_due(spec: ScheduleSpec, after_ms: int) -> int:
    """Raises BadCron."""
    found = due_after(parse(spec.cron), zone_of(spec.timezone), after_ms)
    if found is None:
        raise BadCron(f"{spec.cron!r} is not due within 40 years")
    return found


def dues_of(state: State, now_ms: int) -> tuple[Due, ...]:
    if not state.dues or state.dues[0][0] > now_ms:
        return ()
    keys = dict.fromkeys(key for due_ms, key in sorted(state.dues) if due_ms <= now_ms)
    found: list[Due] = []
    for key in keys:
        schedule = state.schedules.get(key)
        if schedule is not None and 0 < schedule.next_ms <= now_ms and len(found) < DUES_MAX:
            found.append(_due(schedule.spec, key, schedule.next_ms, now_ms))
    return tuple(found)


def _due(spec: ScheduleSpec, key: str, first_ms: int, now_ms: int) -> Due:
    """A time zone that this machine no longer knows must not stop the controller: UTC stands in."""
    cron = parse(spec.cron)
    try:
        zone = zone_of(spec.timezone)
    except BadCron:
        zone = zone_of("")
    count, before_ms, newest_ms = 1, first_ms, first_ms
    next_ms = due_after(cron, zone, first_ms)
    while next_ms is not None and next_ms <= now_ms and count < COUNTED_MAX:
        count, before_ms, newest_ms = count + 1, newest_ms, next_ms
        next_ms = due_after(cron, zone, next_ms)
    if next_ms is not None and next_ms <= now_ms:  # too many to count
        newest_ms = due_before(cron, zone, now_ms) or newest_ms
        next_ms = due_after(cron, zone, newest_ms)
    return Due(key, count, first_ms, before_ms, newest_ms, next_ms or NEVER_MS)
