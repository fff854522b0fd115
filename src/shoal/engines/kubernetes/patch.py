"""What a supply says of its pods in Kubernetes' own words, put into ours. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]

# Lists whose rows have a name of their own are merged by it; any other list replaces ours.
NAMED = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
OWN_LABELS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
)
OWN_FIELDS = ("name", "namespace", "ownerReferences", "generateName", "finalizers")


def read(text: str, container: str) -> Object:
    """Raises `ValueError` with what is wrong. What Shoal needs of a pod is not to be changed: its
    name and labels, its owner, what its container runs, and that it never starts again."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() <= {"metadata", "spec"}:
        raise ValueError("must be a table with metadata and spec, as in a pod's manifest")
    made = merged({}, found)
    meta, spec = made.get("metadata", {}), made.get("spec", {})
    labels = meta.get("labels", {}) if isinstance(meta, dict) else None
    if not isinstance(labels, dict) or not isinstance(spec, dict):
        raise ValueError("metadata, its labels and spec must be tables")
    taken = [f"metadata.{name}" for name in OWN_FIELDS if name in meta]
    taken += [f"label {name}" for name in labels if name in OWN_LABELS or name[:6] == "shoal-"]
    taken += ["spec.restartPolicy"] if "restartPolicy" in spec else []
    for row in spec.get("containers") or ():
        if row["name"] != container:
            raise ValueError(f"a pod has one container, {container}; others go to initContainers")
        taken += [f"the container's {name}" for name in ("command", "args") if name in row]
    if taken:
        raise ValueError(f"{taken[0]} is Shoal's own")
    return found


def merged(ours: Any, theirs: Any, at: str = "") -> Any:
    """As `kubectl patch` merges them: tables field by field, and null removes a field."""
    if isinstance(theirs, dict):
        found = dict(ours) if isinstance(ours, dict) else {}
        for key, value in theirs.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(found.get(key), value, key)
        return found
    if at in NAMED:
        if not isinstance(theirs, list):
            raise ValueError(f"{at} must be a list")
        rows = {row[NAMED[at]]: row for row in ours or ()}
        for row in theirs:
            name = row.get(NAMED[at]) if isinstance(row, dict) else None
            if not isinstance(name, str):
                raise ValueError(f"every row of {at} must have a {NAMED[at]}")
            rows[name] = merged(rows.get(name), row)
        return list(rows.values())
    return theirs


def filled(patch: Any, values: Mapping[str, str]) -> Any:
    """With `${order}` and the like replaced."""
    if isinstance(patch, dict):
        return {key: filled(value, values) for key, value in patch.items()}
    if isinstance(patch, list):
        return [filled(value, values) for value in patch]
    if isinstance(patch, str):
        for name, value in values.items():
            patch = patch.replace(f"${{{name}}}", value)
    return patch
