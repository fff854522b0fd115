"""What events have in common."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class EventBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """All events of one step carry the same `at_ms`."""

    about_job: ClassVar[bool] = False
    at_ms: int


class JobEvent(EventBase, frozen=True, kw_only=True):
    about_job: ClassVar[bool] = True
    job: str


class NodeEvent(EventBase, frozen=True, kw_only=True):
    node: str
    why: str = ""
