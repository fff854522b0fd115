"""What a policy says of neighbors, as people write it: `{name: west, gpus_max: 16, after: 10m}`."""

from __future__ import annotations

import json
import re
from typing import Any

from shoal.forms import datafile, readers
from shoal.forms.failure import BadField
from shoal.forms.supply import NUMBER_MAX, price, time, written_as
from shoal.model.neighbor import Neighbor
from shoal.model.phrases import shortened

EXAMPLE = "[{name: west, gpus_max: 16, price_max: 2.50, after: 10m}]"


def _tenants(field: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise readers.wrong(field, value, "a tenant or a list of tenants")
    return list(names)


# The word in a file -> the field of `Neighbor`, and how it is read.
FIELDS: dict[str, tuple[str, readers.Reader]] = {
    "tenants": ("tenants", _tenants),
    "gpus_max": ("gpus_max", readers.Count(0, NUMBER_MAX, "GPUs of our jobs there at a time")),
    "price_max": ("price_max", price),
    "labels": ("labels", readers.labels),
    "after": ("after_ms", time),
}
STORED = "after_ms"  # as `show --json` prints it; prices beside it are in millionths


def neighbors(value: Any) -> list[dict[str, Any]]:
    """A list of tables; or tables by name."""
    if isinstance(value, dict):
        value = [
            {"name": str(name), **(about or {})} if isinstance(about, dict | None) else about
            for name, about in value.items()
        ]
    if not isinstance(value, list):
        raise BadField("neighbors", f"must be a list of neighbors, e.g. {EXAMPLE}")
    return [_neighbor(row) for row in value]


def _neighbor(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise BadField("neighbors", f"must be tables with a name each, e.g. {EXAMPLE}")
    where = f"neighbors.{shortened(row['name'], 40)}"
    name = readers.name(where, row["name"])
    if STORED in row:
        return dict(row)
    written = {word: value for word, value in row.items() if word != "name"}
    datafile.check_names(written, FIELDS, f"a neighbor has name, {', '.join(FIELDS)}", where)
    found: dict[str, Any] = {"name": name}
    for word, value in written.items():
        target, read = FIELDS[word]
        found[target] = read(f"{where}.{word}", value)
    return found


def where_of(path: str, rows: list[dict[str, Any]]) -> str | None:
    """The field, as people write it, at a path such as `neighbors[0].after_ms`."""
    match = re.match(r"neighbors\[(\d+)\]\.?(\w*)", path)
    if match is None:
        return None
    name = shortened(str(rows[int(match[1])].get("name", "")), 40)
    word = next((word for word, (target, _) in FIELDS.items() if target == match[2]), match[2])
    return f"neighbors.{name}" + (f".{word}" if word else "")


def about(one: Neighbor) -> str:
    """As a file would write it: only what differs from the defaults."""
    usual = Neighbor(name=one.name)
    parts = [f"name: {json.dumps(one.name)}"]  # no and 1 would be other things
    for word, (target, read) in FIELDS.items():
        value = getattr(one, target)
        if value != getattr(usual, target):
            parts.append(f"{word}: {written_as(value, read)}")
    return "{" + ", ".join(parts) + "}"
