"""Answers that hold events: only who asks for them needs the declarations of events."""

from __future__ import annotations

import msgspec

from shoal.core.state.events.log import Recorded
from shoal.model.explanation import AttemptRecord
from shoal.model.job import Note
from shoal.model.views import ProgressView, Remedy


class WhyView(msgspec.Struct, kw_only=True):
    """`why` is true now; `events` show how it came about: the newest ones, oldest first, and of
    several checkpoints in a row only the last. `attempts` are all of the job's."""

    id: str
    state: str
    why: str
    early_ms: int | None  # a waiting job will probably start between these two times
    late_ms: int | None
    start: str = ""  # the same in words; empty: `why` says all there is to say
    progress: ProgressView | None
    events: list[Recorded]
    attempts: list[AttemptRecord] = []
    labels: dict[str, str] = {}
    notes: list[Note] = []
    remedies: list[Remedy] = []  # what would let it start sooner


class EventsView(msgspec.Struct, kw_only=True):
    """Pass `next_after` as `after` to continue from here."""

    events: list[Recorded]
    next_after: int
