"""Finds the functions of users that a policy names as `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.core.scheduling.order import ORDERINGS, Ordering
from shoal.core.scheduling.registry import UnknownFunction
from shoal.core.scheduling.score import PLACEMENTS
from shoal.model.policy import Policy, problem_with


def enable() -> None:
    """From now on policies may name functions of modules that Python can import here."""
    ORDERINGS.find = _find_ordering
    PLACEMENTS.find = _find


def problem(policy: Policy) -> str | None:
    """What keeps this policy from being obeyed, in one line."""
    try:
        ORDERINGS[policy.order]
    except UnknownFunction as error:
        return f"order: {error}"
    try:
        PLACEMENTS[policy.placement]
    except UnknownFunction as error:
        return f"placement: {error}"
    return problem_with(policy)


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
