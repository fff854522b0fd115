"""Events of schedules. The next due time is part of them: a replay needs no time zones."""

from __future__ import annotations

from shoal.model.eventbase import EventBase
from shoal.model.schedule import ScheduleSpec


class ScheduleEvent(EventBase, frozen=True, kw_only=True):
    """`schedule` is TENANT/NAME."""

    schedule: str
    why: str = ""


class ScheduleSet(ScheduleEvent, frozen=True, kw_only=True):
    """It is new, or was changed."""

    spec: ScheduleSpec
    next_ms: int
    owner: str = ""


class ScheduleRan(ScheduleEvent, frozen=True, kw_only=True):
    """The job, or the first job of the workflow, is submitted by the events after this one."""

    due_ms: int
    next_ms: int
    job: str


class ScheduleMissed(ScheduleEvent, frozen=True, kw_only=True):
    """`count` due times, from the first to the last, passed without a run."""

    count: int
    first_ms: int
    last_ms: int
    next_ms: int


class ScheduleSkipped(ScheduleEvent, frozen=True, kw_only=True):
    due_ms: int
    next_ms: int


class SchedulePaused(ScheduleEvent, frozen=True, kw_only=True):
    """By a user, or because nobody is left that it could run for."""


class ScheduleResumed(ScheduleEvent, frozen=True, kw_only=True):
    next_ms: int


class ScheduleRemoved(ScheduleEvent, frozen=True, kw_only=True):
    pass
