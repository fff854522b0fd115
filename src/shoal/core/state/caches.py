"""What only saves time: dropping it between any two steps changes no decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.core.phases.reconcile import GangView
    from shoal.core.state.state import State


class Caches:
    """`Estimates` and `Foresight` keep caches of their own; `drop_caches` empties all of them."""

    def __init__(self) -> None:
        self.ending: dict[int, frozenset[int]] = {}  # how many -> the open nodes that end first
        self.roots: frozenset[str] | None = None  # places where nodes keep checkpoints
        self.gang_views: dict[str, GangView] = {}  # the environment of large gangs that start


def drop_caches(state: State) -> None:
    state.caches = Caches()
    state.estimates.drop_cache()
    state.foresight.drop_cache()
