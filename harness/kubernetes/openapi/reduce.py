"""Writes the part of Kubernetes' OpenAPI definitions that the tests use.

    pip install kubernetes-validate
    python -m harness.kubernetes.openapi.reduce

That package (Apache-2.0) carries the definitions of kubernetes/kubernetes,
api/openapi-spec/swagger.json (Apache-2.0, The Kubernetes Authors), as JSON schemas. What is kept is
what the kinds below refer to, without the descriptions.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

VERSIONS = ("1.29", "1.37")
KINDS = (
    "apps.v1.Deployment",
    "apps.v1.StatefulSet",
    "core.v1.Binding",
    "core.v1.ConfigMap",
    "core.v1.Event",
    "core.v1.LimitRange",
    "core.v1.Namespace",
    "core.v1.Node",
    "core.v1.PersistentVolumeClaim",
    "core.v1.Pod",
    "core.v1.ResourceQuota",
    "core.v1.Secret",
    "core.v1.Service",
    "core.v1.ServiceAccount",
    "networking.v1.NetworkPolicy",
    "policy.v1.Eviction",
    "policy.v1.PodDisruptionBudget",
    "rbac.v1.ClusterRole",
    "rbac.v1.ClusterRoleBinding",
    "rbac.v1.Role",
    "rbac.v1.RoleBinding",
)
MORE = (
    "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions",
    "io.k8s.apimachinery.pkg.apis.meta.v1.Status",
)
PREFIX = "#/$defs/"


def main() -> None:
    found = importlib.util.find_spec("kubernetes_validate")
    if found is None or found.origin is None:
        raise SystemExit("first: pip install kubernetes-validate")
    folder = Path(found.origin).parent / "kubernetes-json-schema"
    for version in VERSIONS:
        source = folder / f"v{version}.0-local-strict" / "_definitions.json"
        kept = reduce(json.loads(source.read_text())["$defs"])
        target = Path(__file__).with_name(f"v{version}.json")
        target.write_text(json.dumps(kept, sort_keys=True, separators=(",", ":")) + "\n")
        print(f"{target.name}: {len(kept)} definitions, {target.stat().st_size} bytes")


def reduce(definitions: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    wanted = [*(f"io.k8s.api.{kind}" for kind in KINDS), *MORE]
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = _bare(definitions[name])
            wanted += _references(kept[name])
    return kept


def _bare(schema: Any, under_properties: bool = False) -> Any:
    """Without descriptions. A property may have that name, too."""
    if isinstance(schema, dict):
        return {
            key: _bare(value, key == "properties")
            for key, value in schema.items()
            if under_properties or key not in ("description", "x-kubernetes-group-version-kind")
        }
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].removeprefix(PREFIX)] if isinstance(schema.get("$ref"), str) else []
        return own + [name for value in schema.values() for name in _references(value)]
    if isinstance(schema, list):
        return [name for value in schema for name in _references(value)]
    return []


if __name__ == "__main__":
    main()
