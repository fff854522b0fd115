"""What a supplier is given when it is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.model.supply import Supply


class SupplyContext(msgspec.Struct, frozen=True, kw_only=True):
    """`cluster`: 8 hex digits that name this home, to be put into the names or labels of whatever
    the supplier makes, so that it finds its own again and nothing else. `join_token` lets a machine
    join, so it must not be where other users can read it. `supplies`: those of the policy and of
    all orders, which name the places where the engine has to look. `changed`: a supplier that
    notices changes by itself calls it, and is looked at soon."""

    cluster: str
    home: Path
    join_url: str  # where nodes reach the controller
    join_token: str
    python: str  # the interpreter that runs Shoal here
    supplies: Callable[[], tuple[Supply, ...]] = tuple
    changed: Callable[[], None] = lambda: None
