"""Loads what a policy names: functions (ours, of packages, and `module:name`) and suppliers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from shoal import extensions
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.state import Functions, Ordering
from shoal.model.policy import Policy, problem_with
from shoal.model.supply import SIM_PREFIX, Supply


class UnknownFunction(Exception):
    """The policy names an unknown function; the message lists the known ones."""


def problem(policy: Policy) -> str | None:
    """Why this policy cannot be obeyed, in one line."""
    for field in ("order", "placement"):
        try:
            find(field, getattr(policy, field))
        except UnknownFunction as error:
            return f"{field}: {error}"
    supplied = (text for supply in policy.supply if (text := _problem_with_supply(supply)))
    return next(supplied, None) or problem_with(policy)


def _problem_with_supply(supply: Supply) -> str | None:
    where = f"supply.{supply.name}"
    try:
        words = extensions.supplier(supply.engine).words
    except extensions.Missing as error:
        return f"{where}.engine: {error}"
    for word in supply.options:
        if word not in words and not word.startswith(SIM_PREFIX):
            return f"{where}.{word}: {supply.engine} has no such word; it has {', '.join(words)}"
    return None


def titles(policy: Policy) -> Mapping[str, str]:
    """How sentences call the engines of its supplies. One that is missing raises its own alarm."""
    found = {}
    for engine in {supply.engine for supply in policy.supply}:
        with contextlib.suppress(extensions.Missing):
            found[engine] = extensions.supplier(engine).title
    return found


class PolicyFunctions:
    """The table that a loop gives to its steps. A function that is missing or fails is in `lost`
    with the reason; it is not in the table, so the usual one takes its place."""

    def __init__(self) -> None:
        self.table = FUNCTIONS
        self.lost: dict[tuple[str, str], str] = {}

    def load(self, policy: Policy) -> Functions:
        """Before a step sees this policy. A lost function is looked for again."""
        found: dict[str, dict[str, Any]] = {"order": {}, "placement": {}}
        for field, functions in found.items():
            name = getattr(policy, field)
            try:
                functions[name] = find(field, name)
                self.lost.pop((field, name), None)
            except UnknownFunction as error:
                self.lost[field, name] = str(error)
        orders = {**self.table.orders, **found["order"]}
        placements = {**self.table.placements, **found["placement"]}
        suppliers = {**self.table.suppliers, **titles(policy)}
        self.table = self.table._replace(orders=orders, placements=placements, suppliers=suppliers)
        return self.table

    def alarm(self, policy: Policy) -> str:
        """Which part of the policy in force is not obeyed, and why; empty if all of it is."""
        usual = {"order": self.table.usual_order, "placement": self.table.usual_placement}
        lost = [
            f"{field} {name} is replaced by {usual[field]}: {why}"
            for (field, name), why in self.lost.items()
            if getattr(policy, field) == name
        ]
        if not lost:
            return ""
        return f"the policy {policy.name}: {'; '.join(lost)}; fix it, then run: shoal policy set"

    def distrust(self, error: Exception) -> bool:
        """Something failed, and functions of others may be the cause: do without them. False if
        none are left."""
        why = f"{type(error).__name__}: {error}"[:300]
        others = [("order", name) for name in self.table.orders.keys() - FUNCTIONS.orders.keys()]
        others += [
            ("placement", name)
            for name in self.table.placements.keys() - FUNCTIONS.placements.keys()
        ]
        self.lost |= dict.fromkeys(others, why)
        self.table = FUNCTIONS._replace(suppliers=self.table.suppliers)
        return bool(others)


def find(field: str, name: str) -> Any:
    """The order or placement of this name, or UnknownFunction."""
    shipped = FUNCTIONS.orders if field == "order" else FUNCTIONS.placements
    if name in shipped:
        return shipped[name]
    try:
        if ":" in name:
            function = extensions.loaded(metadata.EntryPoint(name, name, extensions.POLICY))
        elif name in extensions.names(extensions.POLICY):
            function = extensions.load(extensions.POLICY, name)
        else:
            known = ", ".join(sorted(shipped))
            raise UnknownFunction(
                f"there is no {field} {name!r}; there are {known}, or module:name of your own"
            )
    except extensions.Missing as error:
        raise UnknownFunction(str(error)) from None
    if field == "order" and not isinstance(function, Ordering):
        raise UnknownFunction(f"{name} is not a shoal.core.scheduling.order.Ordering")
    if field == "placement" and not callable(function):
        raise UnknownFunction(f"{name} is not a function")
    return function
