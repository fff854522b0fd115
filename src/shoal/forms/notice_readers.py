"""How labels of jobs and wishes for notices are read. Help pages load this module, too."""

from __future__ import annotations

import re
from typing import Any

from shoal.forms import units
from shoal.forms.failure import BadField
from shoal.forms.readers import kind, text

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
WISH_FORMS = (
    "write WHERE or WHAT=WHERE, e.g. failed=https://..., ended,waiting:1h=slack:@NAME or "
    "mail:me@example.com; see: shoal notify --help"
)


def labels(field: str, value: Any) -> dict[str, str]:
    """`{run: a}`, or texts such as run=a."""
    if isinstance(value, dict):
        pairs = [(str(key), _plain(field, key, one)) for key, one in value.items()]
    else:
        given = value if isinstance(value, list | tuple) else [value]
        split = (text(field, one).strip().partition("=") for one in given)
        pairs = [(key, one if equals else "\n") for key, equals, one in split]
    for key, one in pairs:
        if not re.fullmatch(_KEY, key) or not re.fullmatch(_VALUE, one):
            shown = units.quoted(f"{key}={one}".rstrip("=\n"))
            raise BadField(field, f"{shown} cannot be read; write key=value, e.g. run=a")
    return dict(pairs)


def _plain(field: str, key: Any, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadField(field, f"{units.quoted(str(key))} is {kind(value)}; put it in quotes")
    return str(value)


def wishes(field: str, value: Any) -> tuple[str, ...]:
    """The text itself is not repeated in an error: a URL may be a secret."""
    from shoal.model.notice import OF_JOBS, WISH_CHARACTERS_MAX, wanted_of

    given = value if isinstance(value, list | tuple) else [value]
    found = [text(field, one).strip() for one in given]
    for one in found:
        try:
            wanted = wanted_of(one)
        except ValueError:
            raise BadField(field, f"cannot be read; {WISH_FORMS}") from None
        if len(one) > WISH_CHARACTERS_MAX:
            raise BadField(field, f"is longer than {WISH_CHARACTERS_MAX} characters")
        for what in wanted.on:
            if what not in OF_JOBS:
                fix = f"a rule can send it: shoal notify add {what}=WHERE"
                raise BadField(field, f"{what} is not about one job; {fix}")
    return tuple(dict.fromkeys(found))
