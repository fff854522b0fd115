"""Writes the types of the API's answers as TypeScript, from the structs that the handlers return.

The page's code is checked against them by `make types`, which writes the file each time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import inspect

from shoal.api.app import ROUTES
from shoal.api.http import Response
from shoal.api.routing import handlers_of
from shoal.calls.call import WEBSOCKET
from shoal.model.feed import Change, Snapshot

STREAMED = (Snapshot, Change)  # no handler returns them
KINDS_MAX = 40  # a union of more is that of all events, whose fields the page reads by their names


def answers() -> Iterator[tuple[str, Any]]:
    """Each call, such as "GET /v1/jobs/{}", and the type of its answer."""
    for handler in handlers_of(ROUTES):
        call, answer = handler.call, handler.hints.get("return")
        if call is None or call.method == WEBSOCKET:
            continue
        if get_origin(answer) is Response:
            (answer,) = get_args(answer)
        yield f"{call.method} {re.sub(r'{[^}]*}', '{}', call.path)}", answer


class Types:
    """TypeScript's types for msgspec's. A struct is an interface, which is written once."""

    def __init__(self) -> None:
        self.interfaces: dict[str, str] = {}
        self.names: dict[type, str] = {}

    def of(self, info: inspect.Type) -> str:
        match info:
            case inspect.StructType():
                return self.struct(info)
            case inspect.UnionType(types) if len(types) > KINDS_MAX:
                return "{ event: string; at_ms: number; [field: string]: any }"
            case inspect.UnionType(types):
                return " | ".join(dict.fromkeys(self.of(one) for one in types))
            case inspect.NoneType():
                return "null"
            case inspect.BoolType():
                return "boolean"
            case inspect.IntType() | inspect.FloatType() | inspect.DecimalType():
                return "number"
            case inspect.StrType() | inspect.DateTimeType():
                return "string"
            case inspect.EnumType(cls):
                return " | ".join(json.dumps(one.value) for one in cls)
            case inspect.LiteralType(values):
                return " | ".join(json.dumps(one) for one in values)
            case inspect.TupleType(items):
                return f"[{', '.join(self.of(one) for one in items)}]"
            case inspect.DictType(_, value):
                return f"{{ [key: string]: {self.of(value)} }}"
            case inspect.CollectionType(item):
                return f"({self.of(item)})[]"
            case inspect.Metadata(inner):
                return self.of(inner)
            case _:
                return "any"

    def struct(self, info: inspect.StructType) -> str:
        if info.cls in self.names:
            return self.names[info.cls]
        name = info.cls.__name__
        while name in self.interfaces:
            name += "_"
        self.names[info.cls] = name
        self.interfaces[name] = ""  # it may name itself
        omits = info.cls.__struct_config__.omit_defaults
        fields = [
            (field.encode_name, "?" if omits and not field.required else "", self.of(field.type))
            for field in info.fields
        ]
        if info.array_like:
            text = f"type {name} = [{', '.join(kind for _, _, kind in fields)}];"
        else:
            if info.tag_field:
                fields.insert(0, (info.tag_field, "", json.dumps(info.tag)))
            lines = "".join(f"  {json.dumps(key)}{mark}: {kind};\n" for key, mark, kind in fields)
            text = f"interface {name} {{\n{lines}}}"
        self.interfaces[name] = text
        return name


def written() -> str:
    types = Types()
    for struct in STREAMED:
        types.of(inspect.type_info(struct))
    lines = []
    for call, answer in sorted(answers(), key=lambda one: one[0]):
        try:
            lines.append(f"  {json.dumps(call)}: {types.of(inspect.type_info(answer))};\n")
        except TypeError:  # a stream, a redirect: not JSON
            lines.append(f"  {json.dumps(call)}: any;\n")
    structs = "\n".join(types.interfaces.values())
    return f"declare namespace Api {{\ninterface Answers {{\n{''.join(lines)}}}\n{structs}\n}}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(written())
