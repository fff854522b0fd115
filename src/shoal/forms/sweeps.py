"""Reads what makes a job an array: `array`, `grid` and `list`."""

from __future__ import annotations

import re
from typing import Any

from shoal.forms import units
from shoal.forms.failure import BadField
from shoal.forms.readers import environment, kind, wrong

# As in model/sweep.py, which a help page must not load.
ELEMENTS_MAX, INDEX_MAX, RANGES_MAX = 1_000_000, 999_999_999, 256
FORMS = "write e.g. 0-99, 0-9:3, 1,5-7, and %8 behind it for 8 at a time"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?::([0-9]{1,18}))?)?")


def array(field: str, value: Any) -> tuple[list[list[int]], int]:
    """The ranges of indices, each as first, last and step; and how many at a time (0: any). Only
    %8 is for a sweep, whose variables say which elements there are."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong(field, value, f"a range of indices; {FORMS}")
    words, percent, most = str(value).replace(" ", "").partition("%")
    parts = words.split(",") if words or not percent else []
    if len(parts) > RANGES_MAX:
        raise BadField(field, f"has {len(parts)} ranges; the most is {RANGES_MAX}")
    ranges = [_range(field, part, str(value)) for part in parts]
    if not percent:
        return ranges, 0
    if not re.fullmatch(r"[0-9]{1,9}", most) or not 1 <= int(most) <= ELEMENTS_MAX:
        raise BadField(
            field, f"{units.quoted(str(value))} does not say how many at a time; {FORMS}"
        )
    return ranges, int(most)


def _range(field: str, part: str, value: str) -> list[int]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise BadField(field, f"{units.quoted(value)} is not a range of indices; {FORMS}")
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if last < first:
        raise BadField(field, f"{first}-{last} is backwards; write {last}-{first}")
    if last > INDEX_MAX:
        raise BadField(field, f"{last} is too large; the largest index is {INDEX_MAX:,}")
    if not step:
        raise BadField(field, "a step of 0 never ends; write 1 or more")
    return [first, last, min(step, INDEX_MAX)]


def grid(field: str, value: Any) -> dict[str, list[str]]:
    if isinstance(value, list | tuple):
        pairs = [_values(field, text) for text in value]
        value = dict(pairs)
        if len(value) < len(pairs):
            raise _twice(field, [name for name, _ in pairs])
    if not isinstance(value, dict) or not value:
        raise wrong(field, value, "variables with lists of values, e.g. {lr: [0.1, 0.01]}")
    found = {}
    for name, values in value.items():
        if not isinstance(values, list | tuple):
            fix = "write a list of values, e.g. [0.1, 0.01]"
            raise BadField(field, f"{units.quoted(str(name))} is {kind(values)}; {fix}")
        texts = [_value(one) for one in values]
        found[str(name)] = [environment(field, {name: text})[str(name)] for text in texts]
    return found


def rows(field: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list | tuple) or not value:
        raise wrong(field, value, "a list of variables with values, e.g. [{lr: 0.1}, {lr: 0.01}]")
    found = []
    for number, row in enumerate(value):
        if isinstance(row, str):
            row = _row(field, row)
        if not isinstance(row, dict):
            raise BadField(field, f"row {number} is {kind(row)}; write e.g. {{lr: 0.1}}")
        found.append(environment(field, {name: _value(one) for name, one in row.items()}))
    return found


def _values(field: str, text: Any) -> tuple[str, list[str]]:
    """'lr=0.1,0.01', as a flag has it."""
    name, equals, values = str(text).partition("=")
    if not equals or not values.strip():
        raise BadField(field, f"{units.quoted(str(text))} has no values; write e.g. lr=0.1,0.01")
    return name.strip(), [value.strip() for value in values.split(",")]


def _row(field: str, text: str) -> dict[str, str]:
    """'lr=0.1,seed=1', as a flag has it."""
    pairs = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadField(field, f"{units.quoted(text)} is not a row; write e.g. lr=0.1,seed=1")
        pairs.append((name.strip(), value.strip()))
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _twice(field, [name for name, _ in pairs])
    return row


def _twice(field: str, names: list[str]) -> BadField:
    """Without this the last one would win, and a part of the sweep would be missing in silence."""
    name = next(name for name in names if names.count(name) > 1)
    return BadField(field, f"{units.quoted(name)} is given twice; write all its values once")


def _value(value: Any) -> Any:
    """Numbers and switches as they are written in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else value
