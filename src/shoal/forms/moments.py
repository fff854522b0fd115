"""Points in time as people write them: '2026-11-17 03:00', '03:00', 'in 2h', or ISO 8601."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

from shoal.forms import units
from shoal.forms.failure import BadField

FORMS = "write e.g. 'in 2h', '03:00', '2026-11-17 03:00' or '2026-11-17T03:00+01:00'"
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")


def moment_ms(field: str, value: Any, now: datetime | None = None) -> int:
    """Milliseconds since the epoch. Without a zone, the zone of this machine is meant; a time of
    day alone is the next one."""
    if isinstance(value, datetime):  # as TOML has it
        value = value.isoformat()
    if not isinstance(value, str):
        raise BadField(field, f"must be a time; {FORMS}")
    text, now = value.strip(), now or datetime.now().astimezone()
    if text.lower().startswith("in "):
        try:
            return _ms(now) + units.duration_ms(text[3:])
        except units.BadAmount as error:
            raise BadField(field, str(error)) from None
    if (clock := _CLOCK.fullmatch(text)) is not None:
        return _ms(_next(now, *(int(part or 0) for part in clock.groups())))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadField(field, f"{units.quoted(text)} is not a time; {FORMS}") from None
    try:
        at_ms = _ms(found if found.tzinfo else found.astimezone())
    except (OverflowError, OSError, ValueError):
        at_ms = -1
    if at_ms < 0:
        raise BadField(field, f"{units.quoted(text)} is too far away")
    return at_ms


def _next(now: datetime, hour: int, minute: int, second: int) -> datetime:
    """The next time of day, also if the clocks change until then."""
    local = now.astimezone().replace(tzinfo=None)
    found = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (found if found > local else found + timedelta(days=1)).astimezone()


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
