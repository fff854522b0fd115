"""The API's schema (OpenAPI), made of the calls and of their handlers' signatures. It is imported
with the first question about it."""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args, get_origin

import msgspec

from shoal import __version__
from shoal.api.handling import Handler
from shoal.api.http import JSON, Redirect, Response, Stream
from shoal.calls.call import WEBSOCKET, Call
from shoal.forms.fields import JOB, SERVICE
from shoal.model.views import Problem

if TYPE_CHECKING:
    from shoal.api.routing import App

REFS = "#/components/schemas/{name}"
# The schemas by the first part of a target, as in `scale.idle_ms`.
PARTS = {"scale": "Scale", "probe": "Probe", "route": "Route", "goals": "Goals", "sweep": "Sweep"}


@lru_cache(maxsize=1)  # a process has one app, and its calls do not change
def described(app: App) -> bytes:
    shown = [one for one in app.handlers if getattr(one.owner, "in_schema", True)]
    types = _Types()
    paths: dict[str, dict[str, Any]] = {}
    for handler in shown:
        call = handler.call
        if call is not None and call.method != WEBSOCKET:
            path = re.sub(r":\w+}", "}", call.path)
            paths.setdefault(path, {})[call.method.lower()] = _operation(app, handler, call, types)
    schemas = types.schemas()
    _describe(schemas)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Shoal", "version": __version__},
            "security": [{"token": []}],
            "paths": _filled(paths, types),
            "components": {
                "schemas": schemas,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


class _Types:
    """Types are named while the paths are written, and become schemas together."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.made: list[dict[str, Any]] = []
        self._components: dict[str, Any] = {}

    def place(self, kind: Any) -> int:
        self.known.append(kind)
        return len(self.known) - 1

    def schemas(self) -> dict[str, Any]:
        made, self._components = msgspec.json.schema_components(
            self.known, schema_hook=lambda _: {}, ref_template=REFS
        )
        self.made = list(made)
        return self._components


def _operation(app: App, handler: Handler, call: Call, types: _Types) -> dict[str, Any]:
    parameters = []
    for params in app.plan(handler).all_params():
        for name, (kind, default) in params.types.items():
            in_path = name in call.path_names
            must = in_path or default is inspect.Parameter.empty
            where, place = "path" if in_path else "query", types.place(kind)
            parameters.append({"name": name, "in": where, "required": must, "schema": place})
    answer: dict[str, Any] = {"description": "done"}
    kind = handler.hints.get("return")
    if get_origin(kind) is Response:
        (kind,) = get_args(kind)
    if kind not in (bytes, str, Redirect, Stream, type(None)):
        answer["content"] = {handler.media_type: {"schema": types.place(kind)}}
    problem = {"description": "refused", "content": {JSON: {"schema": types.place(Problem)}}}
    operation: dict[str, Any] = {
        "operationId": handler.verb,
        "description": call.text,
        "parameters": parameters,
        "responses": {str(handler.status): answer, "4XX": problem},
    }
    body = handler.hints.get("data")
    if body is not None:
        content = {JSON: {"schema": types.place(body)}}
        operation["requestBody"] = {"required": True, "content": content}
    elif call.body is bytes:
        operation["requestBody"] = {"content": {"application/octet-stream": {"schema": {}}}}
    return operation


def _filled(value: Any, types: _Types) -> Any:
    """With the schemas in their places."""
    if isinstance(value, list):
        return [_filled(one, types) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: types.made[one] if key == "schema" and isinstance(one, int) else _filled(one, types)
        for key, one in value.items()
    }


def _describe(schemas: dict[str, Any]) -> None:
    """The fields of jobs and services, as their files are described."""
    for whole, table in (("ServiceSpec", SERVICE), ("JobSpec", JOB)):
        for field in table.values():
            for target in field.targets.split():
                part, _, name = target.rpartition(".")
                about = schemas[PARTS[part] if part else whole]["properties"].get(name)
                if about is not None:
                    about["description"] = f"`{field.name}` in a file: {field.help}"
