"""What only saves time: dropping it between any two steps changes no decision."""

from __future__ import annotations

from typing import Any

from shoal.core.state.sizes import Specs


class Caches:
    """`Estimates` and `Foresight` keep caches of their own; `State.drop_caches` empties
    all of them."""

    def __init__(self) -> None:
        self.ending: dict[int, frozenset[int]] = {}  # how many -> the open nodes that end first
        self.roots: frozenset[str] | None = None  # places where nodes keep checkpoints
        self.specs = Specs()
        self.possible: set[Any] = set()  # gangs that the known nodes hold when they are empty
        self.gang_views: dict[str, Any] = {}  # the environment of large gangs that start
