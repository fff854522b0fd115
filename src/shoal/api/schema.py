"""The API's schema (OpenAPI): describes the fields of jobs and services as their files do."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin

from shoal.forms.fields import JOB, SERVICE

# The schemas by the first part of a target, as in `scale.idle_ms`.
PARTS = {"scale": "Scale", "probe": "Probe", "route": "Route", "sweep": "Sweep"}


class DescribedSchema(JsonRenderPlugin):
    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        schemas = openapi_schema["components"]["schemas"]
        for whole, table in (("ServiceSpec", SERVICE), ("JobSpec", JOB)):
            for field in table.values():
                for target in field.targets.split():
                    part, _, name = target.rpartition(".")
                    about = schemas[PARTS[part] if part else whole]["properties"].get(name)
                    if about is not None:
                        about["description"] = f"`{field.name}` in a file: {field.help}"
        return super().render(request, openapi_schema)
