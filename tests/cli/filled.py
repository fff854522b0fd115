"""Makes any struct with long values in all its fields, so that tables meet the worst of each."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any, TypeVar

import msgspec

from shoal.calls.lines import Facts

Made = TypeVar("Made")
LONG = 40
MOMENT_MS = 1_790_000_000_000
FEW = 2


def filled(kind: type[Made], **given: Any) -> Made:
    """`given`: fields that need a value of their own."""
    hints = typing.get_type_hints(kind)
    fields = {name: _value(hints[name], name) for name in kind.__struct_fields__ if name in hints}  # type: ignore[attr-defined]
    return kind(**{**fields, **given})


def long_name(name: str, length: int = LONG) -> str:
    return f"{name.replace('_', '-')}-{'long-' * length}"[:length].rstrip("-")


def _value(kind: Any, name: str) -> Any:
    if kind is msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(filled(Facts)))
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _value(next(part for part in parts if part is not type(None)), name)
    if origin is typing.Literal:
        return parts[0]
    if origin is typing.Annotated:
        return _value(parts[0], name)
    if origin is dict:
        return {_value(parts[0], name): _value(parts[1], name)}
    if origin in (list, frozenset, set):
        return origin([_value(parts[0], name) for _ in range(FEW)])
    if origin is tuple:
        inner = parts[:1] * FEW if parts[-1] is Ellipsis else parts
        return tuple(_value(part, name) for part in inner)
    return _simple(kind, name)


def _simple(kind: Any, name: str) -> Any:
    if kind is str:
        words = f"because the {name} is so, which takes some words to say"
        return words if name in ("why", "reason", "state_text", "text") else long_name(name)
    if kind is bool:
        return False
    if kind is int:
        return MOMENT_MS if name.endswith("_ms") else 123456
    if kind is float:
        return 12345.5
    if kind is bytes:
        return b""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind)
    return None
