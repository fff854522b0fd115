"""The models and the hardware that Shoal knows by name, from the data files beside this module."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.plan.hardware import Accelerator, Cluster, Fabric, NodeKind
from shoal.plan.impossible import Impossible
from shoal.plan.model import Model

Known = TypeVar("Known")
DATA = Path(__file__).with_name("data")


class Catalogue(msgspec.Struct, frozen=True):
    """A hardware file: accelerators, nodes and fabrics by name."""

    accelerators: dict[str, Accelerator] = {}
    nodes: dict[str, NodeKind] = {}
    fabrics: dict[str, Fabric] = {}

    def accelerator(self, name: str) -> Accelerator:
        return _find("GPU", name, self.accelerators)

    def node(self, name: str) -> NodeKind:
        return _find("node kind", name, self.nodes)

    def fabric(self, name: str) -> Fabric:
        return _find("fabric", name, self.fabrics)

    def node_for(self, accelerator: str) -> NodeKind:
        """The usual node with this GPU: the first in the file."""
        self.accelerator(accelerator)
        for kind in self.nodes.values():
            if kind.accelerator == accelerator:
                return kind
        raise Impossible(f"no node kind has the GPU {accelerator}: add one to the hardware file")

    def cluster(self, gpu: str, nodes: int, *, node: str = "", fabric: str = "") -> Cluster:
        kind = self.node(node) if node else self.node_for(gpu)
        if gpu and kind.accelerator != gpu:
            raise Impossible(f"node kind {kind.name} has the GPU {kind.accelerator}, not {gpu}")
        return Cluster(
            accelerator=self.accelerator(kind.accelerator),
            node=kind,
            fabric=self.fabric(fabric or "infiniband"),
            nodes=nodes,
        ).check()


@functools.cache
def models() -> dict[str, Model]:
    return {
        name: convert(Model, {"name": name, **row}, name) for name, row in _toml("models").items()
    }


def model(name: str) -> Model:
    return _find("model", name, models())


@functools.cache
def hardware() -> Catalogue:
    return catalogue(_toml("hardware"))


def catalogue(tables: Mapping[str, Any], base: Catalogue | None = None) -> Catalogue:
    """From the tables of a hardware file. Entries with the same name as one of `base` change only
    the fields that they give."""
    known = base or Catalogue()
    for section, rows in tables.items():
        if section not in Catalogue.__struct_fields__:
            raise Impossible(
                f"a hardware file has no section {section!r}: use accelerators, nodes or fabrics"
            )
        named = {f"{section}.{name}": row for name, row in rows.items()} if _table(rows) else {}
        for name, row in {section: rows, **named}.items():
            if not _table(row):
                raise Impossible(f"{name} of the hardware file must be a table of fields")
    return Catalogue(
        accelerators=_merged(Accelerator, known.accelerators, tables.get("accelerators", {})),
        nodes=_merged(NodeKind, known.nodes, tables.get("nodes", {})),
        fabrics=_merged(Fabric, known.fabrics, tables.get("fabrics", {})),
    )


def _table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _merged(kind: Any, known: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(known)
    for name, row in rows.items():
        old = msgspec.to_builtins(known[name]) if name in known else {}
        merged[name] = convert(kind, {**old, "name": name, **row}, name)
    return merged


def convert(kind: Any, row: Any, name: str) -> Any:
    try:
        return msgspec.convert(row, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Impossible(f"{name}: {error}") from None


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def _find(kind: str, name: str, known: Mapping[str, Known]) -> Known:
    if name in known:
        return known[name]
    raise Impossible(f"no {kind} is called {name!r}; {_suggestion(name, known)}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}"
