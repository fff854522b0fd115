"""Events of schedules. The next due time is part of them: a replay needs no time zones."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.durations import moment_text
from shoal.model.eventbase import EventBase, Reader
from shoal.model.hidden import without_keys
from shoal.model.phrases import because
from shoal.model.schedule import ScheduleSpec


class ScheduleEvent(EventBase, frozen=True, kw_only=True):
    """`schedule` is TENANT/NAME."""

    schedule: str
    why: str = ""

    @property
    def subject(self) -> str:
        return f"schedule {self.schedule.removeprefix('default/')}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.schedule.partition("/")[0], self.at_ms)


class ScheduleSet(ScheduleEvent, frozen=True, kw_only=True):
    """It is new, or was changed."""

    spec: ScheduleSpec
    next_ms: int
    owner: str = ""

    def phrase(self) -> str:
        zone = f" {self.spec.timezone}" if self.spec.timezone else ""
        return f"was set to '{self.spec.cron}'{zone}; next at {moment_text(self.next_ms)}"

    def without_secrets(self) -> Self:
        change = msgspec.structs.replace
        jobs = tuple(change(job, spec=without_keys(job.spec)) for job in self.spec.jobs)
        return change(self, spec=change(self.spec, jobs=jobs))


class ScheduleRan(ScheduleEvent, frozen=True, kw_only=True):
    """The job, or the first job of the workflow, is submitted by the events after this one."""

    due_ms: int
    next_ms: int
    job: str

    def phrase(self) -> str:
        return f"ran as {self.job}, due at {moment_text(self.due_ms)}"


class ScheduleMissed(ScheduleEvent, frozen=True, kw_only=True):
    """`count` due times, from the first to the last, passed without a run."""

    count: int
    first_ms: int
    last_ms: int
    next_ms: int

    def phrase(self) -> str:
        return f"was missed{because(self.why)}"


class ScheduleSkipped(ScheduleEvent, frozen=True, kw_only=True):
    due_ms: int
    next_ms: int

    def phrase(self) -> str:
        return f"left out the run due at {moment_text(self.due_ms)}{because(self.why)}"


class SchedulePaused(ScheduleEvent, frozen=True, kw_only=True):
    """By a user, or because nobody is left that it could run for."""

    def phrase(self) -> str:
        return f"is paused{because(self.why)}"


class ScheduleResumed(ScheduleEvent, frozen=True, kw_only=True):
    next_ms: int

    def phrase(self) -> str:
        return f"goes on, next at {moment_text(self.next_ms)}{because(self.why)}"


class ScheduleRemoved(ScheduleEvent, frozen=True, kw_only=True):
    def phrase(self) -> str:
        return f"was removed{because(self.why)}"
