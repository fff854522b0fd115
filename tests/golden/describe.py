"""Describes what a version of Shoal stores and sends: the fields of all structs in its log,
snapshots and finished jobs (`stored`), in the files of its home (`files`), and between head and
agents (`wire`).

    python tests/golden/describe.py > tests/golden/homes/VERSION/structs.json

It describes the version that it imports, so that a release can be described from a checkout of it.
"""

from __future__ import annotations

import enum
import importlib
import json
import types
import typing
from typing import Any

import msgspec

ROOTS = {
    "stored": (
        "shoal.core.state.events.log:Event",
        "shoal.core.state.state:Snapshot",
        "shoal.model.job:Job",
    ),
    "files": (
        "shoal.control.home:ClusterConfig",
        "shoal.client:Address",
        "shoal.control.store.marks:Marks",
        "shoal.control.clock:Anchor",
        "shoal.model.ledger:PriceList",
        "shoal.link.wire:LinkFile",
        "shoal.model.node:NodeSpec",
        "shoal.model.report:MemberExit",
        "shoal.hosts.spec:Receipt",
    ),
    "wire": ("shoal.link.wire:FromAgent", "shoal.link.wire:ToAgent"),
}


def describe() -> dict[str, Any]:
    import shoal

    try:
        number = importlib.import_module("shoal.database.formats").FORMAT
    except ModuleNotFoundError:
        number = 0  # before 0.6.0
    found: dict[str, Any] = {"version": shoal.__version__, "format": number}
    for room, roots in ROOTS.items():
        structs: dict[str, Any] = {}
        for root in roots:
            module, name = root.split(":")
            _walk(getattr(importlib.import_module(module), name), structs)
        found[room] = structs
    return found


def _walk(kind: Any, structs: dict[str, Any]) -> str:
    """The kind in words; every struct and enumeration in it is described once."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _walk(typing.get_args(kind)[0], structs)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted(_walk(part, structs) for part in typing.get_args(kind)))
    if origin is typing.Literal:
        return " | ".join(sorted(repr(value) for value in typing.get_args(kind)))
    if origin is not None:
        parts = [_walk(part, structs) for part in typing.get_args(kind) if part is not Ellipsis]
        return f"{origin.__name__}[{', '.join(parts)}]"
    name = getattr(kind, "__name__", str(kind))
    if name in structs or not isinstance(kind, type):
        return str(name)
    if issubclass(kind, enum.Enum):
        structs[name] = {"values": sorted(str(one.value) for one in kind)}
    elif issubclass(kind, msgspec.Struct):
        one: dict[str, Any] = {"strict": kind.__struct_config__.forbid_unknown_fields}
        structs[name] = one
        tag = kind.__struct_config__.tag
        if tag is not None:
            one["tag"] = tag
        one["fields"] = {
            field.encode_name: {
                "type": _walk(field.type, structs),
                **({"required": True} if field.required else {}),
            }
            for field in msgspec.structs.fields(kind)
        }
    elif hasattr(kind, "__annotations__") and issubclass(kind, tuple):
        hints = typing.get_type_hints(kind, include_extras=True)
        structs[name] = {"items": [_walk(hint, structs) for hint in hints.values()]}
    return str(name)


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1, sort_keys=True))
