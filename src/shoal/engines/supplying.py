"""What a supplier is given when it is built."""

from __future__ import annotations

from pathlib import Path

import msgspec


class SupplyContext(msgspec.Struct, frozen=True, kw_only=True):
    """`cluster`: 8 hex digits that name this home, to be put into the names or labels of whatever
    the supplier makes, so that it finds its own again and nothing else. `join_token` lets a machine
    join, so it must not be where other users can read it."""

    cluster: str
    home: Path
    join_url: str  # where nodes reach the controller
    join_token: str
    python: str  # the interpreter that runs Shoal here
