"""What was asked for, without what is so by default: an older head may not know those fields."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec


def given(spec: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct that differ from their defaults."""
    found = {}
    for field in _fields(type(spec)):
        value = getattr(spec, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default:
            found[field.encode_name] = value
    return found


@cache  # msgspec evaluates all annotations each time that it is asked, which takes milliseconds
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)
