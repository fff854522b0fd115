"""Functions by name, so that a policy can be data; those of users are found by module path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Function = TypeVar("Function")


class UnknownFunction(KeyError):
    """The policy names something that is not there; the message says what is."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(dict[str, Function], Generic[Function]):
    """A dict that can be taught to find `module:name`. Importing is not the core's business, so
    whoever runs it says how."""

    def __init__(self, kind: str, functions: dict[str, Function]) -> None:
        super().__init__(functions)
        self.kind = kind
        self.find: Callable[[str], Function] | None = None

    def __missing__(self, name: str) -> Function:
        if ":" in name and self.find is not None:
            self[name] = self.find(name)
            return self[name]
        known = ", ".join(sorted(known for known in self if ":" not in known))
        raise UnknownFunction(
            f"there is no {self.kind} {name!r}; there are {known}, or module:name of your own"
        )
