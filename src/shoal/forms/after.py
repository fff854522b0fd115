"""How `after` and `begin` are read: which jobs to wait for, and until when."""

from __future__ import annotations

import re
from typing import Any

from shoal.forms import units
from shoal.forms.failure import BadField
from shoal.forms.readers import wrong

AFTER_MAX = 256
AFTER_PATTERN = r"j[1-9][0-9]{0,17}(\.[0-9]{1,9})?(:(ok|any|fail))?"
FORMS = "write j7, j7:any or j7:fail"


def texts(field: str, value: Any) -> tuple[str, ...]:
    """One name, or a list of names; commas separate names, too."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise wrong(field, value, f"a job or a list of jobs; {FORMS}")
    if len(found) > AFTER_MAX:
        raise BadField(field, f"names {len(found)} jobs; {AFTER_MAX} is the most")
    return tuple(one.strip() for text in found for one in text.split(","))


def after(field: str, value: Any) -> tuple[str, ...]:
    found = texts(field, value)
    for text in found:
        if not re.fullmatch(AFTER_PATTERN, text):
            raise BadField(field, f"{units.quoted(text)} does not name a job; {FORMS}")
    return found


def begin(field: str, value: Any) -> int:
    from shoal.forms.moments import moment_ms  # help pages do without it

    return moment_ms(field, value)
