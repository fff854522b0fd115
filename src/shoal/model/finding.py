"""Which jobs somebody looks for: by words, user, tenant, name, state, labels, age, node or service;
and in which order they are listed."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.model.columns import COLUMNS, NOT_YET
from shoal.model.ids import number_of
from shoal.model.job import NOTE_CHARACTERS_MAX, Job, Outcome, Phase
from shoal.model.labels import (
    CONDITION_PATTERN,
    CONDITIONS_MAX,
    LabelKey,
    LabelValue,
    meets,
    words_of,
)

LIVE = tuple(phase.value for phase in Phase if phase is not Phase.FINISHED)
ENDED = tuple(outcome.value for outcome in Outcome)
STATES = (*LIVE, *ENDED, "live", "finished")
NAME_CHARACTERS_MAX = 128
TEXT_CHARACTERS_MAX = 200

Mark = tuple[str | int, int]  # a job's place in an order: its value and its number
Marked = TypeVar("Marked", bound=tuple[Mark, object])
Word = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A job must meet everything that is given. `name` is a pattern, as shells have it. `states`:
    any of them; `labels`: conditions such as run=a, run=a|b, run!=a, run and !run. `since_ms`:
    submitted, started or ended since then; `until_ms`: submitted by then. `node`: its newest
    attempt is or was there. `text`: words that its id, name, user, command or labels contain, each
    of them somewhere, in small or capital letters."""

    user: Word = ""
    tenant: Word = ""
    name: Word = ""
    states: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    since_ms: int = 0
    node: Word = ""
    array: Word = ""  # in a list: the elements of this array; empty: no elements
    text: Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)] = ""
    service: Word = ""
    until_ms: int = 0
    first_job: int = 0  # only jobs with this number or a higher one
    among: frozenset[str] | None = None  # live jobs with these ids; None: any

    @property
    def given(self) -> bool:
        return self != EVERY_JOB

    @property
    def only_live(self) -> bool:
        if self.among is not None:
            return True
        return bool(self.states) and not {*self.states} & {*ENDED, "finished"}

    @property
    def only_ended(self) -> bool:
        return bool(self.states) and not {*self.states} & {*LIVE, "live"}

    def problem(self) -> tuple[str, str] | None:
        """The field that is wrong, and how it should be."""
        for state in self.states:
            if state not in STATES:
                return "state", f"is one of {', '.join(STATES)}"
        if len(self.labels) > CONDITIONS_MAX:
            return "label", f"at most {CONDITIONS_MAX} conditions can be given"
        if len(self.text) > TEXT_CHARACTERS_MAX:
            return "text", f"has at most {TEXT_CHARACTERS_MAX} characters"
        for condition in self.labels:
            if not re.fullmatch(CONDITION_PATTERN, condition):
                return "label", "write key=value, key=a|b, key!=value, key or !key"
        return None

    def matches(self, job: Job) -> bool:
        spec = job.spec
        return (
            (self.among is None or job.id in self.among)
            and self.user in ("", spec.user)
            and self.tenant in ("", spec.tenant)
            and (not self.first_job or number_of(job.id) >= self.first_job)
            and (not self.name or fnmatchcase(spec.name or "", self.name))
            and (not self.states or self._in_state(job))
            and self.since_ms <= max(job.submitted_ms, job.began_ms or 0, job.finished_ms or 0)
            and (not self.node or any(self.node == one.slice.node for one in job.members))
            and (not self.labels or self._labeled(spec.labels))
            and self.service in ("", spec.service)
            and (not self.until_ms or job.submitted_ms <= self.until_ms)
            and (not self.text or self._says(job))
        )

    def _says(self, job: Job) -> bool:
        spec = job.spec
        labels = (f"{key}={value}" for key, value in spec.labels.items())
        told = "\n".join((job.id, spec.name or "", spec.user, " ".join(spec.command), *labels))
        told = told.lower()
        return all(word in told for word in self.text.lower().split())

    def _in_state(self, job: Job) -> bool:
        ended = job.outcome is not None
        return job.state in self.states or ("finished" if ended else "live") in self.states

    def _labeled(self, labels: dict[str, str]) -> bool:
        words = words_of(labels)
        return all(meets(condition, words) for condition in self.labels)


EVERY_JOB = JobFilter()


class Order(msgspec.Struct, frozen=True):
    """How a list of jobs is sorted; jobs with the same value by their numbers. By what a job keeps
    forever (submitted, name, user, ...), a place in the list stays one place while jobs end."""

    by: str = "ended"  # a column
    down: bool = True
    at_ms: int = 0  # how long jobs have run is counted until then

    def mark(self, job: Job, end: int = NOT_YET) -> Mark:
        """`end`: the number of the event that ended the job."""
        return COLUMNS[self.by].rank_of(job, self.at_ms, end), job.number

    def after(self, one: Mark, other: Mark) -> bool:
        """Does `one` come after the other? Both are of this order."""
        return one < other if self.down else one > other

    def first(self, rows: Iterable[Marked], limit: int) -> list[Marked]:
        pick = heapq.nlargest if self.down else heapq.nsmallest
        return pick(limit, rows, key=lambda row: row[0])


LAST_ENDED = Order()


class Found(NamedTuple):
    """`next`: all that match up to this place are there; None: to the end. `left_out`: so many
    match that the oldest were not sorted among them."""

    jobs: list[tuple[Mark, Job]]
    next: Mark | None = None
    left_out: bool = False


class LabelsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None removes a label."""

    labels: Annotated[dict[LabelKey, LabelValue | None], msgspec.Meta(max_length=256)]


class NoteText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty text removes all notes."""

    text: Annotated[str, msgspec.Meta(max_length=NOTE_CHARACTERS_MAX)]
