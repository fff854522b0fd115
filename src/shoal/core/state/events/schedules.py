"""What happens to schedules. The next due time is part of it: a replay needs no time zones."""

from __future__ import annotations

import heapq
from typing import Self

import msgspec

from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.durations import moment_text
from shoal.model.hidden import without_keys
from shoal.model.phrases import because
from shoal.model.schedule import Schedule, ScheduleSpec


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

    def apply(self, state: State) -> None:
        before = state.schedules.get(self.schedule)
        if before is None:
            schedule = Schedule(spec=self.spec, since_ms=self.at_ms, next_ms=0)
        else:
            schedule = before
            schedule.spec, schedule.paused, schedule.note = self.spec, "", ""
        schedule.owner = self.owner
        add_schedule(state, schedule, self.next_ms)

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

    def apply(self, state: State) -> None:
        schedule = state.schedules[self.schedule]
        schedule.runs += 1
        schedule.last_ms, schedule.last_job = self.due_ms, self.job
        _due_at(state, schedule, self.next_ms)

    def phrase(self) -> str:
        return f"ran as {self.job}, due at {moment_text(self.due_ms)}"


class ScheduleMissed(ScheduleEvent, frozen=True, kw_only=True):
    """`count` due times, from the first to the last, passed without a run."""

    count: int
    first_ms: int
    last_ms: int
    next_ms: int

    def apply(self, state: State) -> None:
        schedule = state.schedules[self.schedule]
        schedule.missed += self.count
        schedule.note = self.why
        _due_at(state, schedule, self.next_ms)

    def phrase(self) -> str:
        return f"was missed{because(self.why)}"


class ScheduleSkipped(ScheduleEvent, frozen=True, kw_only=True):
    due_ms: int
    next_ms: int

    def apply(self, state: State) -> None:
        schedule = state.schedules[self.schedule]
        schedule.skipped += 1
        schedule.note = self.why
        _due_at(state, schedule, self.next_ms)

    def phrase(self) -> str:
        return f"skipped the run due at {moment_text(self.due_ms)}{because(self.why)}"


class SchedulePaused(ScheduleEvent, frozen=True, kw_only=True):
    """By a user, or because nobody is left that it could run for."""

    def apply(self, state: State) -> None:
        schedule = state.schedules[self.schedule]
        schedule.paused = self.why or "paused"
        _due_at(state, schedule, 0)

    def phrase(self) -> str:
        return f"is paused{because(self.why)}"


class ScheduleResumed(ScheduleEvent, frozen=True, kw_only=True):
    next_ms: int

    def apply(self, state: State) -> None:
        schedule = state.schedules[self.schedule]
        schedule.paused = schedule.note = ""
        _due_at(state, schedule, self.next_ms)

    def phrase(self) -> str:
        return f"goes on, next at {moment_text(self.next_ms)}{because(self.why)}"


class ScheduleRemoved(ScheduleEvent, frozen=True, kw_only=True):
    def apply(self, state: State) -> None:
        state.sizes.schedule(state.schedules.pop(self.schedule).spec, gone=True)
        _drop_stale(state)

    def phrase(self) -> str:
        return f"was removed{because(self.why)}"


def add_schedule(state: State, schedule: Schedule, next_ms: int) -> None:
    state.schedules[schedule.spec.key] = schedule
    state.sizes.schedule(schedule.spec)
    _due_at(state, schedule, next_ms)


def _due_at(state: State, schedule: Schedule, next_ms: int) -> None:
    """The first entry of the heap is always right; others may be of earlier times."""
    schedule.next_ms = next_ms
    if next_ms:
        heapq.heappush(state.dues, (next_ms, schedule.spec.key))
    if len(state.dues) > 2 * len(state.schedules) + 64:
        due = ((one.next_ms, one.spec.key) for one in state.schedules.values() if one.next_ms)
        state.dues = sorted(due)
    _drop_stale(state)


def _drop_stale(state: State) -> None:
    while state.dues:
        due_ms, key = state.dues[0]
        schedule = state.schedules.get(key)
        if schedule is not None and schedule.next_ms == due_ms:
            return
        heapq.heappop(state.dues)
