"""The clusters of a replay over several, as people write them: `shoal sim --clusters FILE`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from shoal.forms import datafile, neighbor, readers, units
from shoal.forms.failure import BadField
from shoal.forms.supply import price
from shoal.model.durations import MINUTE_MS
from shoal.model.neighbor import NEIGHBORS_MAX, Neighbor
from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec
from shoal.model.phrases import shortened
from shoal.sim.replay.clusters import NODES_MAX, alike, read_nodes
from shoal.sim.replay.several import Sites, SiteSpec

FIELDS = ("clusters", "currency", "round_trip", "after")
OF_CLUSTER = ("nodes", "gpus", "price", "shift", "share", "neighbors")
EXAMPLE = "clusters: {east: {nodes: 8, gpus: 8}, west: {nodes: 8, gpus: 8, shift: 8h}}"
DEFAULT_GPUS = 8
CURRENCY_CHARACTERS_MAX = 12

_count = readers.Count(1, NODES_MAX, "nodes")
_gpus = readers.Count(1, GPUS_PER_NODE_MAX, "GPUs of each node")
_shift = readers.time("8h")
_round_trip = readers.time("80ms", most=MINUTE_MS)
_after = readers.time("1m or 10m", least=1)


def read(word: str) -> Sites:
    return datafile.read_named(word, "file of clusters", parse)


def parse(text: str, ending: str) -> Sites:
    """ValueError names the field and the fix."""
    written = datafile.load(text, ending, EXAMPLE)
    datafile.check_names(written, FIELDS, f"there are {', '.join(FIELDS)}")
    given = written.get("clusters")
    if not isinstance(given, dict) or not 1 <= len(given) <= NEIGHBORS_MAX + 1:
        raise BadField("clusters", f"must name 1 to {NEIGHBORS_MAX + 1} clusters, e.g. {EXAMPLE}")
    after_ms = _after("after", written.get("after", "1m"))
    names = [str(name) for name in given]
    sites = [_site(str(name), about, names, after_ms) for name, about in given.items()]
    for field in ("price", "share"):
        without = [site.name for site in sites if getattr(site, field) is None]
        if 0 < len(without) < len(sites):
            where = f"clusters.{without[0]}.{field}"
            raise BadField(where, "is missing; give it to all, or to none")
    if len({any(node.gpus for node in site.nodes) for site in sites}) > 1:
        raise BadField("clusters", "some have GPUs and others have none; they cannot be compared")
    currency = readers.text("currency", written.get("currency", ""))
    if sites[0].price is not None and not 0 < len(currency) <= CURRENCY_CHARACTERS_MAX:
        raise BadField("currency", "must be the name of one, e.g. currency: EUR")
    round_trip_ms = _round_trip("round_trip", written.get("round_trip", "0"))
    return Sites(sites=tuple(sites), currency=currency, round_trip_ms=round_trip_ms)


def _site(name: str, about: Any, names: list[str], after_ms: int) -> SiteSpec:
    where = f"clusters.{shortened(name, 40)}"
    readers.name(where, name)
    if not isinstance(about, dict) or "nodes" not in about:
        raise BadField(where, "must be a table with nodes, e.g. {nodes: 8, gpus: 8}")
    datafile.check_names(about, OF_CLUSTER, f"a cluster has {', '.join(OF_CLUSTER)}", where)
    return SiteSpec(
        name=name,
        nodes=_nodes(where, about),
        price=price(f"{where}.price", about["price"]) if "price" in about else None,
        shift_ms=_shift(f"{where}.shift", about.get("shift", "0")),
        share=_share(f"{where}.share", about["share"]) if "share" in about else None,
        neighbors=_neighbors(where, about.get("neighbors"), name, names, after_ms),
    )


def _nodes(where: str, about: dict[Any, Any]) -> list[NodeSpec]:
    nodes = about["nodes"]
    if not isinstance(nodes, str):
        gpus = _gpus(f"{where}.gpus", about.get("gpus", DEFAULT_GPUS))
        return alike(_count(f"{where}.nodes", nodes), gpus=gpus)
    if "gpus" in about:
        raise BadField(f"{where}.gpus", f"is in {units.quoted(nodes)}; leave it out here")
    if not Path(nodes).is_file():
        raise BadField(f"{where}.nodes", f"{units.quoted(nodes)} is neither a number nor a file")
    return read_nodes(Path(nodes))


def _share(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise readers.wrong(where, value, "a number, e.g. 0.5")
    if not (math.isfinite(value) and 0 < value <= 1_000_000):
        raise BadField(where, "must be more than 0, e.g. 0.5")
    return float(value)


def _neighbors(
    where: str, given: Any, name: str, names: list[str], after_ms: int
) -> tuple[Neighbor, ...]:
    """All others, unless the file says which; in the policy's own form."""
    others = [other for other in names if other != name]
    rows = [{"name": other} for other in others] if given is None else given
    try:
        rows = neighbor.neighbors(rows)
        for row in rows:
            if row["name"] not in others:
                known = ", ".join(others) or "none"
                raise BadField("neighbors", f"{row['name']} is not another cluster; known: {known}")
        if len({row["name"] for row in rows}) < len(rows):
            raise BadField("neighbors", "names one twice")
        return tuple(msgspec.convert({"after_ms": after_ms, **row}, Neighbor) for row in rows)
    except msgspec.ValidationError as error:
        raise BadField(f"{where}.neighbors", str(datafile.invalid(error))) from None
    except BadField as error:
        raise BadField(where, str(error)) from None
