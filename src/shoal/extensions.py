"""Finds what installed packages bring by entry points; what comes with Shoal is found the same way.

A search reads the metadata of every installed package, which takes milliseconds: only what names
an extension may cause one, never a job or a plain command (ADR 105)."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.ports import SupplierKind

# The groups of entry points, and what they hold.
POLICY = "shoal.policy"  # orders (`Ordering`) and placements (functions) that policies name
SUPPLIER = "shoal.supplier"  # a `SupplierKind`, by the name that supplies give as `engine`
PROBE = "shoal.probe"  # functions of `probes.reading.Asked` that return a `Reading`
GROUPS = (POLICY, SUPPLIER, PROBE)


class Missing(Exception):
    """There is no such extension, or it cannot be loaded; one line that says why."""


def names(group: str) -> list[str]:
    return sorted(metadata.entry_points(group=group).names)


def load(group: str, name: str) -> Any:
    entries = list(metadata.entry_points(group=group, name=name))
    kind = group.rpartition(".")[2]
    if not entries:
        known = ", ".join(names(group)) or "none at all; install Shoal again"
        raise Missing(f"there is no {kind} {name!r}; there are {known}")
    if len(entries) > 1:
        packages = " and ".join(sorted(entry.dist.name for entry in entries if entry.dist))
        raise Missing(f"the {kind} {name!r} is in several packages: {packages}")
    return loaded(entries[0])


def loaded(entry: metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # somebody's module may fail in any way
        raise Missing(f"{entry.name} cannot be loaded: {error}") from None


@functools.cache  # of what was found; the next call looks again for what was not
def supplier(name: str) -> SupplierKind:
    from shoal.ports import SupplierKind

    kind = load(SUPPLIER, name)
    if not isinstance(kind, SupplierKind):
        raise Missing(f"{name} is not a shoal.ports.SupplierKind")
    return kind
