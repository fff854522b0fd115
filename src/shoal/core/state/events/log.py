"""All kinds of events, and an event with its place in the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Union

import msgspec

from shoal.core.state.events import (
    arrays,
    budgets,
    cluster,
    identity,
    neighbors,
    nodes,
    notices,
    queue,
    runs,
    schedules,
    services,
    sleep,
    supply,
)
from shoal.core.state.events.base import EventBase, JobEvent
from shoal.model.ids import array_of

# Every file of events: what is declared in one of them can happen.
FILES = (
    *(arrays, budgets, cluster, identity, nodes, notices, queue, runs, schedules, services),
    *(sleep, supply, neighbors),
)


def kinds_of(base: type[EventBase]) -> list[type[EventBase]]:
    """Those that can happen: families of events have kinds below them."""
    below = base.__subclasses__()
    return [kind for family in below for kind in kinds_of(family)] if below else [base]


KINDS = tuple(kinds_of(EventBase))
if TYPE_CHECKING:
    Event = EventBase
else:
    Event = Union[KINDS]  # noqa: UP007 - so that a decoder finds the kind by its tag

# In the order of the files, whichever was imported first: an index is stored in these words.
QUIET = tuple(
    name
    for file in FILES
    for name, kind in vars(file).items()
    if kind in KINDS and kind.quiet and kind.__module__ == file.__name__
)


def jobs_of(events: Iterable[Event]) -> dict[str, None]:
    """The jobs that these events are about, and the arrays of those that are elements."""
    jobs = dict.fromkeys(event.job for event in events if isinstance(event, JobEvent))
    return {**jobs, **dict.fromkeys(array_of(job) for job in jobs if array_of(job))}


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event with its place in the log. `text`: its sentence, where it is shown to people."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    event: Event
    text: str = ""


def published(records: Iterable[Recorded]) -> list[Recorded]:
    """As views show them: with their sentences, and without secrets."""
    return [
        Recorded(record.seq, record.event.without_secrets(), record.event.sentence())
        for record in records
    ]
