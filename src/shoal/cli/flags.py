"""The flags of `shoal run` and `shoal serve`, made from the table of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.cli.command import Option, number
from shoal.forms.fields import Field, Table


def flags_of(table: Table) -> list[Option]:
    return [_flag(field) for field in table.values() if field.heading]


def given_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Only the flags that were given. 0 is a value, and False is what --no-pack says."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


def _flag(field: Field) -> Option:
    names, attrs = [field.name, field.flag], dict[str, Any]()
    if field.takes is bool:
        attrs = {"is_flag": True, "default": None}
        names += field.metavar.split()
        if field.default:  # it decides if neither is given
            names[1] += "/--no-" + field.flag.removeprefix("--")
    else:
        *short, metavar = field.metavar.removesuffix("...").split()
        names += short
        kind = number() if field.takes is int else None
        attrs = {"metavar": metavar, "type": kind, "multiple": field.takes is list}
    return Option(*names, help=field.text, heading=field.heading, **attrs)
