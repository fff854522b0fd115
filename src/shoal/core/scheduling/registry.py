"""Functions by name, so that a policy can be data; users' own are found by module path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Function = TypeVar("Function")


class UnknownFunction(KeyError):
    """The policy names an unknown function; the message lists the known ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(dict[str, Function], Generic[Function]):
    """A dict that can also find `module:name`. The core does not import modules, so its caller
    provides the import.

    A look-up never fails: an accepted policy may name a function that is gone, and a cluster
    without an order is worse than one with another order. A missing or failing function is in
    `lost` with the reason, and `fallback` takes its place."""

    def __init__(self, kind: str, functions: dict[str, Function], fallback: str) -> None:
        super().__init__(functions)
        self.kind = kind
        self.fallback = fallback
        self.lost: dict[str, str] = {}
        self.find: Callable[[str], Function] | None = None

    def load(self, name: str) -> Function:
        """The function of this name, or UnknownFunction; a lost one is looked for again."""
        if name in self and name not in self.lost:
            return self[name]
        if ":" in name and self.find is not None:
            self[name] = self.find(name)
            self.lost.pop(name, None)
            return self[name]
        known = ", ".join(sorted(known for known in self if ":" not in known))
        raise UnknownFunction(
            f"there is no {self.kind} {name!r}; there are {known}, or module:name of your own"
        )

    def distrust(self, name: str, why: str) -> None:
        """From now on the fallback takes its place."""
        self.lost[name] = why
        self[name] = self[self.fallback]

    def __missing__(self, name: str) -> Function:
        try:
            return self.load(name)
        except UnknownFunction as error:
            self.distrust(name, str(error))
            return self[name]
