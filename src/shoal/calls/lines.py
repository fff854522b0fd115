"""Answers that hold events, read for their sentences: without the declarations of events, which
bring most of the core with them."""

from __future__ import annotations

import msgspec

from shoal.model.explanation import AttemptRecord
from shoal.model.job import Note
from shoal.model.views import ProgressView, Remedy


class Facts(msgspec.Struct, frozen=True):
    """What a list of events needs beside the sentence. Most kinds have only some of these."""

    event: str  # its kind
    at_ms: int
    job: str = ""
    service: str = ""
    outcome: str = ""
    code: int = 0


class EventLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event with its place in the log and its sentence."""

    seq: int
    event: msgspec.Raw
    text: str = ""

    @property
    def facts(self) -> Facts:
        return msgspec.json.decode(self.event, type=Facts)


class EventLines(msgspec.Struct, kw_only=True):
    events: list[EventLine]
    next_after: int


class Why(msgspec.Struct, kw_only=True):
    """`why` is true now. `attempts` are all of the job's."""

    id: str
    state: str
    why: str
    early_ms: int | None  # a waiting job will probably start between these two times
    late_ms: int | None
    start: str = ""  # the same in words; empty: `why` says all there is to say
    position: int = 0  # in the queue; 0: beyond the first 500, or not waiting
    since_ms: int | None = None  # it has waited since then
    progress: ProgressView | None
    attempts: list[AttemptRecord] = []
    labels: dict[str, str] = {}
    notes: list[Note] = []
    remedies: list[Remedy] = []  # what would let it start sooner


class WhyLines(Why, kw_only=True):
    events: list[EventLine]
