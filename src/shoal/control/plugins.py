"""Finds users' functions that a policy names as `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.core.scheduling.order import ORDERINGS, Ordering
from shoal.core.scheduling.registry import UnknownFunction
from shoal.core.scheduling.score import PLACEMENTS
from shoal.model.policy import Policy, problem_with


def enable() -> None:
    """Let policies name functions of modules that Python can import here."""
    ORDERINGS.find = _find_ordering
    PLACEMENTS.find = _find


def problem(policy: Policy) -> str | None:
    """Why this policy cannot be obeyed, in one line."""
    try:
        ORDERINGS.load(policy.order)
    except UnknownFunction as error:
        return f"order: {error}"
    try:
        PLACEMENTS.load(policy.placement)
    except UnknownFunction as error:
        return f"placement: {error}"
    return problem_with(policy)


def alarm(policy: Policy) -> str:
    """Which part of the policy in force is not obeyed, and why; empty if all of it is."""
    lost = []
    for field, registry in (("order", ORDERINGS), ("placement", PLACEMENTS)):
        name = getattr(policy, field)
        if name in registry.lost:
            why = registry.lost[name]
            lost.append(f"{field} {name} is replaced by {registry.fallback}: {why}")
    if not lost:
        return ""
    return f"the policy {policy.name}: {'; '.join(lost)}; fix it, then run: shoal policy set"


def distrust(error: Exception) -> bool:
    """Something failed, and users' functions may be the cause: do without them. False if none are
    left."""
    why = f"{type(error).__name__}: {error}"[:300]
    found = False
    for registry in (ORDERINGS, PLACEMENTS):
        for name in [name for name in registry if ":" in name and name not in registry.lost]:
            registry.distrust(name, why)
            found = True
    return found


def _find_ordering(path: str) -> Ordering:
    found = _find(path)
    if not isinstance(found, Ordering):
        raise UnknownFunction(f"{path} is not a shoal.core.scheduling.order.Ordering")
    return found


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise UnknownFunction(f"{path} cannot be loaded: {error}") from None
    if not callable(found) and not isinstance(found, Ordering):
        raise UnknownFunction(f"{path} is not a function")
    return found
