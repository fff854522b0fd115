"""Points in time as text in UTC, without a clock or a time zone."""

from __future__ import annotations

from shoal.model.durations import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS


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
