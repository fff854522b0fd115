"""Cron expressions with time zones: when a schedule is due next.

An expression has five fields (minute, hour, day of the month, month, day of the week), or six with
seconds first. Two things happen to local times when clocks change:

- A time that does not exist, because clocks are set forward, is due when the gap ends.
- A time that exists twice, because clocks are set back, is due the first time only. With `*` or
  `*/n` for the hour the schedule means a pace and not a time of day, so it is due both times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shoal.core.state.state import State
from shoal.model.schedule import COUNTED_MAX, Due, ScheduleSpec

DAY_S = 86_400
EPOCH = date(1970, 1, 1).toordinal()
YEARS = 41  # a weekday on February 29 comes back within 40 years
TEXT_MAX = 200
MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(?:(\*)|([0-9a-z]{1,3})(?:-([0-9a-z]{1,3}))?)(?:/([0-9]{1,2}))?")
# How far to look back for the newest due time: each step has few due times more than the last.
_BACK_S = (60, 3_600, DAY_S, 31 * DAY_S, 366 * DAY_S, YEARS * 366 * DAY_S)


class BadCron(ValueError):
    """The message names the part that is wrong and what would work."""


class Field(NamedTuple):
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()


FIELDS = (
    Field("second", 0, 59),
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of the month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of the week", 0, 7, WEEKDAYS),
)


class Cron(NamedTuple):
    """Each field's values, sorted. `paced`: the hour is `*` or `*/n`."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]  # 0 is Sunday
    paced: bool
    either: bool  # both kinds of days are restricted: one of them is enough

    def is_day(self, day: date) -> bool:
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (in_month or in_week) if self.either else (in_month and in_week)


@lru_cache(maxsize=4096)
def parse(text: str) -> Cron:
    """Refuses what can never be due."""
    plain = MACROS.get(text.strip().lower(), text)
    parts = plain.lower().split()
    if len(text) > TEXT_MAX or len(parts) not in (5, 6):
        hint = "write five, e.g. '0 3 * * *' for 03:00 every day"
        raise BadCron(f"{text[:40]!r} has {len(parts)} fields; {hint}")
    if len(parts) == 5:
        parts = ["0", *parts]
    values = [_values(field, part) for field, part in zip(FIELDS, parts, strict=True)]
    weekdays = tuple(sorted({day % 7 for day in values[5]}))
    either = not parts[3].startswith("*") and not parts[5].startswith("*")
    second, minute, hour, days, months, _ = values
    paced = parts[2].startswith("*")
    cron = Cron(second, minute, hour, days, months, weekdays, paced, either)
    if next(_days_from(cron, date(2000, 1, 1)), None) is None:
        raise BadCron(f"{text!r} is never due: no such day exists")
    return cron


def _values(field: Field, text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            fix = f"use numbers from {field.least} to {field.most}, '*', '1-5', '*/2' or '1,3'"
            raise BadCron(f"the {field.name} {part[:20]!r} cannot be read; {fix}")
        star, first, last, step = match.groups()
        low = field.least if star else _value(field, first)
        high = _value(field, last) if last else field.most if star or step else low
        if high < low:
            raise BadCron(f"the {field.name} {part!r} is backwards; write {last}-{first}")
        if step is not None and not int(step):
            raise BadCron(f"the {field.name} {part!r} has a step of 0; write e.g. '*/2'")
        found.update(range(low, high + 1, int(step or 1)))
    return tuple(sorted(found))


def _value(field: Field, text: str) -> int:
    if text in field.words:
        return field.words.index(text) + field.least
    if not text.isdecimal() or not field.least <= int(text) <= field.most:
        limits = f"from {field.least} to {field.most}"
        raise BadCron(f"the {field.name} is {limits}, not {text!r}")
    return int(text)


def zone_of(name: str) -> tzinfo:
    """Empty is UTC."""
    if not name or name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadCron(f"there is no time zone {name[:64]!r}; write e.g. Europe/Berlin") from None


def due_after(cron: Cron, zone: tzinfo, at_ms: int) -> int | None:
    """The first due time that is later than `at_ms`; None: not within 40 years."""
    now = at_ms // 1000 + 1
    end = now + YEARS * 366 * DAY_S
    while now < end:
        offset, change = _offset(zone, now), _change(zone, now)
        wall = now + offset
        found = _first(cron, wall)
        if found is None:
            return None
        until = change if change is not None else now + DAY_S
        if found < until + offset:
            instant = now + found - wall
            if cron.paced or not _repeated(zone, instant):
                return instant * 1000
            now = instant + 1
            continue
        if change is not None:
            skipped = _first(cron, change + offset)
            if skipped is not None and skipped < change + _offset(zone, change):
                return change * 1000  # it is due in the gap, which ends here
            now = change
            continue
        # Nothing within a day. Clocks change by less than a day, so what is further away is
        # looked at again from two days before it.
        now = max(until, now + found - wall - 2 * DAY_S)
    return None


def due_before(cron: Cron, zone: tzinfo, at_ms: int) -> int | None:
    """The newest due time that is not later than `at_ms`; None: not within 40 years."""
    for back_s in _BACK_S:
        found, due = None, due_after(cron, zone, at_ms - back_s * 1000)
        while due is not None and due <= at_ms:
            found, due = due, due_after(cron, zone, due)
        if found is not None:
            return found
    return None


def due_times(cron: Cron, zone: tzinfo, after_ms: int, count: int) -> list[int]:
    """The next ones, `count` at most."""
    found: list[int] = []
    due = due_after(cron, zone, after_ms)
    while due is not None and len(found) < count:
        found.append(due)
        due = due_after(cron, zone, due)
    return found


def _first(cron: Cron, wall: int) -> int | None:
    """The first matching local time at or after this one, both in seconds as if it were UTC."""
    day = date.fromordinal(EPOCH + wall // DAY_S)
    time = wall % DAY_S
    for found in _days_from(cron, day):
        left = time if found == day else 0
        second = _time_from(cron, left)
        if second is not None:
            return (found.toordinal() - EPOCH) * DAY_S + second
    return None


def _days_from(cron: Cron, day: date) -> Iterator[date]:
    for year in range(day.year, min(day.year + YEARS, 9999)):
        for month in cron.months:
            if (year, month) < (day.year, day.month):
                continue
            found = max(day, date(year, month, 1))
            while found.month == month:
                if cron.is_day(found):
                    yield found
                found += timedelta(days=1)


def _time_from(cron: Cron, left: int) -> int | None:
    """The first time of day at or after `left`, in seconds."""
    for hour in cron.hours:
        if hour < left // 3600:
            continue
        for minute in cron.minutes:
            base = hour * 3600 + minute * 60
            if base + 59 < left:
                continue
            for second in cron.seconds:
                if base + second >= left:
                    return base + second
    return None


def _offset(zone: tzinfo, second: int) -> int:
    shift = datetime.fromtimestamp(second, zone).utcoffset()
    return int(shift.total_seconds()) if shift is not None else 0


def _repeated(zone: tzinfo, second: int) -> bool:
    """The local time of this instant was there before."""
    return datetime.fromtimestamp(second, zone).fold == 1


def _change(zone: tzinfo, second: int) -> int | None:
    """The instant within the next day at which clocks change."""
    before, low, high = _offset(zone, second), second, second + DAY_S
    if _offset(zone, high) == before:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset(zone, middle) == before else (low, middle)
    return high


# Which schedules are due, and when next: the part of the tick that needs time zones.


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
