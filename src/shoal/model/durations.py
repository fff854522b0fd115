"""Formats milliseconds as text for people; the only place that does."""

from __future__ import annotations

from itertools import pairwise

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

UNITS = (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS))


def duration_text(ms: int) -> str:
    """The two largest units: '350ms', '4.2s', '3m 20s', '2h', '2d 4h'."""
    if ms < SECOND_MS:
        return f"{max(ms, 0)}ms"
    if ms < 10 * SECOND_MS:
        tenths = ms // 100 % 10
        return f"{ms // SECOND_MS}.{tenths}s" if tenths else f"{ms // SECOND_MS}s"
    for (unit, size), (smaller, part) in pairwise(UNITS):
        if ms >= size:
            whole, rest = divmod(ms, size)
            return f"{whole}{unit} {rest // part}{smaller}" if rest >= part else f"{whole}{unit}"
    return f"{ms // SECOND_MS}s"


def about(ms: int) -> str:
    """One unit, for estimates: 'a moment', '40s', '12m', '3h', '2d'."""
    if ms < 2 * SECOND_MS:
        return "a moment"
    unit, size = next((unit, size) for unit, size in UNITS if ms >= 2 * size or size == SECOND_MS)
    return f"{(ms + size // 2) // size}{unit}"


def span_text(early_ms: int, late_ms: int) -> str:
    """Time from now: 'any moment', 'within 20s', 'in about 10m', 'in 3m to 23h'."""
    if late_ms < 2 * SECOND_MS:
        return "any moment"
    early, late = about(early_ms), about(late_ms)
    if early_ms < 2 * SECOND_MS:
        return f"within {late}"
    return f"in about {late}" if early == late else f"in {early} to {late}"


# Points in time as text in UTC, without a clock or a time zone.


def date_of(days: int) -> tuple[int, int, int]:
    """Year, month and day of a number of days since 1970-01-01. Years begin in March here, so that
    the leap day is the last of a year."""
    days += 719_468  # since 0000-03-01
    era, day = divmod(days, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    late = month >= 10  # January or February
    return year + era * 400 + late, month - 9 if late else month + 3, day + 1


def rfc3339(at_ms: int) -> str:
    """'2026-11-17T03:00:00Z'; a part of a second is left out."""
    days, rest = divmod(at_ms, DAY_MS)
    year, month, day = date_of(days)
    hour, minute, second = rest // HOUR_MS, rest // MINUTE_MS % 60, rest // SECOND_MS % 60
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"


def moment_text(at_ms: int) -> str:
    """'2026-11-17 03:00 UTC', with seconds if there are any."""
    date, _, time = rfc3339(at_ms).rstrip("Z").partition("T")
    return f"{date} {time.removesuffix(':00')} UTC"
