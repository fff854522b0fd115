"""Structs without the fields that have their defaults: shorter to store, to send and to read.

A struct can leave its defaults out always or never, and people who read the API want to see them.
So `lean` makes a twin for the encoder. Whoever reads it decodes the struct itself, which fills them
in again. What is stored this way depends on the defaults: none of them may change
(`tests/model/test_lean.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

# Searches in stored records look for these words, so they are there whatever their value is.
ALWAYS = frozenset({"tenant"})

_values = msgspec.structs.astuple


def lean(struct: msgspec.Struct, **instead: Any) -> Any:
    """For an encoder. `instead`: other values for some fields, which need not have their types."""
    twin, places = _twin(type(struct))
    if not instead:
        return twin(*_values(struct))
    values = list(_values(struct))
    for name, value in instead.items():
        values[places[name]] = value
    return twin(*values)


@cache
def _twin(kind: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], dict[str, int]]:
    config = kind.__struct_config__
    twin = msgspec.defstruct(
        kind.__name__,
        [(field.name, Any, _default(field)) for field in msgspec.structs.fields(kind)],
        tag=config.tag,
        tag_field=config.tag_field,
        omit_defaults=True,
    )
    return twin, {name: place for place, name in enumerate(kind.__struct_fields__)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """A value that is there always has no default: UNSET is equal to nothing that is stored."""
    if field.required or field.name in ALWAYS:
        return msgspec.UNSET
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default
