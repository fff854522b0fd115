"""Validates objects against the official OpenAPI definitions (see openapi/reduce.py)."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs

FOLDER = Path(__file__).with_name("openapi")
VERSIONS = tuple(sorted(path.stem.removeprefix("v") for path in FOLDER.glob("v*.json")))
GROUPS = {
    "v1": "io.k8s.api.core.v1",
    "apps/v1": "io.k8s.api.apps.v1",
    "rbac.authorization.k8s.io/v1": "io.k8s.api.rbac.v1",
    "networking.k8s.io/v1": "io.k8s.api.networking.v1",
    "policy/v1": "io.k8s.api.policy.v1",
}
META = "io.k8s.apimachinery.pkg.apis.meta.v1"
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?\d+))?")


@functools.cache
def _validator(version: str, name: str) -> Any:
    definitions = json.loads((FOLDER / f"v{version}.json").read_text())
    return jsonschema_rs.validator_for({"$ref": f"#/$defs/{name}", "$defs": definitions})


def problems(found: dict[str, Any], version: str) -> list[str]:
    """What is wrong with it, each with the field. Unknown fields are wrong."""
    api, kind = str(found.get("apiVersion")), str(found.get("kind"))
    if kind in ("DeleteOptions", "Status"):
        name = f"{META}.{kind}"
    elif api in GROUPS:
        name = f"{GROUPS[api]}.{kind}"
    else:
        return [f"apiVersion: {api!r} is not known here"]
    wrong = [
        f"{'.'.join(str(one) for one in error.instance_path)}: {error.message}"
        for error in _validator(version, name).iter_errors(found)
    ]
    return wrong + _semantics(found)


def _semantics(found: dict[str, Any]) -> list[str]:
    """Rules of the API server that the definitions do not hold: names, labels, quantities."""
    wrong: list[str] = []
    name = found.get("metadata", {}).get("name", "")
    if name and not re.fullmatch(r"[a-z0-9]([a-z0-9.:-]{0,251}[a-z0-9])?", name):
        wrong.append(f"metadata.name: Invalid value: {name!r}")
    for key, value in (found.get("metadata", {}).get("labels") or {}).items():
        if not re.fullmatch(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", value):
            wrong.append(f"metadata.labels: Invalid value: {value!r} of {key}")
    if found.get("kind") == "Pod":
        for at, container in enumerate(found["spec"]["containers"]):
            image = container.get("image", "")
            if not image or image != image.strip():
                wrong.append(f"spec.containers[{at}].image: Invalid value: {image!r}")
            resources = container.get("resources", {})
            for amounts in resources.values():
                for what, amount in amounts.items():
                    if not QUANTITY.fullmatch(str(amount)):
                        wrong.append(f"spec.containers[{at}].resources: {what}: {amount!r}")
            for what, amount in (resources.get("requests") or {}).items():
                limit = (resources.get("limits") or {}).get(what)
                if "/" in what and str(limit) != str(amount):
                    wrong.append(f"spec.containers[{at}].resources: {what}: must equal its limit")
    return wrong
