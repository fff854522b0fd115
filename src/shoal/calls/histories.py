"""Answers that hold events: only who asks for them needs the declarations of events."""

from __future__ import annotations

import msgspec

from shoal.calls.lines import Why
from shoal.core.state.events.log import Recorded


class WhyView(Why, kw_only=True):
    """`events` show how it came about: the newest, oldest first, and of several checkpoints in a
    row only the last."""

    events: list[Recorded]


class SharedView(msgspec.Struct, kw_only=True):
    """`price`: the lowest of a GPU for an hour; None: not known. `guests`: tenants of clusters that
    may send jobs. `moved`: the newest events of jobs that went to neighbors or came back."""

    price: float | None
    currency: str
    guests: list[str]
    moved: list[Recorded]


class EventsView(msgspec.Struct, kw_only=True):
    """Pass `next_after` as `after` to continue from here."""

    events: list[Recorded]
    next_after: int
