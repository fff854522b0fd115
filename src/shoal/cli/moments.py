"""A time that is still to come, as `--at` and `--in` take it."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Final

from shoal.cli.command import Option
from shoal.forms import units
from shoal.forms.failure import USAGE, Failure

AT = Option("--at", metavar="TIME", help="Local time: 18:30, or 2026-11-20T08:00.")
IN = Option("--in", "in_", metavar="T", help="This much time from now, e.g. 2m or 8h.")
LATEST_MS: Final = 366 * 86_400_000


def ms_from_now(at: str | None, in_: str | None, now: datetime | None = None) -> int | None:
    """How far away that moment is; None if neither was given."""
    if at is not None and in_ is not None:
        raise Failure("--at and --in: give one of them", USAGE)
    if in_ is not None:
        flag, ms = "--in", _duration(in_)
    elif at is not None:
        flag, ms = "--at", _until(at, now or datetime.now().astimezone())
    else:
        return None
    if ms > LATEST_MS:
        raise Failure(f"{flag}: is more than a year away; give an earlier time", USAGE)
    return ms


def _duration(text: str) -> int:
    try:
        return units.duration_ms(text)
    except units.BadAmount as error:
        raise Failure(f"--in: {error}", USAGE) from None


def _until(text: str, now: datetime) -> int:
    word = text.strip()
    try:
        if len(word) == len("18:30"):  # the next time that the clock shows this
            when = _today(time.fromisoformat(word), now)
            if when <= now:
                when = _today(time.fromisoformat(word), now + timedelta(days=1))
        else:
            when = datetime.fromisoformat(word).astimezone(now.tzinfo)
    except (ValueError, OverflowError, OSError):
        fix = "write 18:30, 2026-11-20T08:00, or 2026-11-20T08:00+01:00"
        raise Failure(f"--at: {units.quoted(text)} is not a time; {fix}", USAGE) from None
    if when <= now:
        raise Failure(f"--at: {when:%Y-%m-%d %H:%M} is in the past; give a later time", USAGE)
    return int((when - now).total_seconds() * 1000)


def _today(at: time, now: datetime) -> datetime:
    """In local time, which may change between summer and winter before then."""
    return datetime.combine(now.date(), at).astimezone()
