"""What events do to schedules; a part of `apply`."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from shoal.core.state.state import State
from shoal.model.events import (
    EventBase,
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSkipped,
)
from shoal.model.schedule import Schedule


def _set(state: State, event: ScheduleSet) -> None:
    before = state.schedules.get(event.schedule)
    if before is None:
        schedule = Schedule(spec=event.spec, since_ms=event.at_ms, next_ms=0)
    else:
        schedule = before
        schedule.spec, schedule.paused, schedule.note = event.spec, "", ""
    schedule.owner = event.owner
    add_schedule(state, schedule, event.next_ms)


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


def _ran(state: State, event: ScheduleRan) -> None:
    schedule = state.schedules[event.schedule]
    schedule.runs += 1
    schedule.last_ms, schedule.last_job = event.due_ms, event.job
    _due_at(state, schedule, event.next_ms)


def _missed(state: State, event: ScheduleMissed) -> None:
    schedule = state.schedules[event.schedule]
    schedule.missed += event.count
    schedule.note = event.why
    _due_at(state, schedule, event.next_ms)


def _skipped(state: State, event: ScheduleSkipped) -> None:
    schedule = state.schedules[event.schedule]
    schedule.skipped += 1
    schedule.note = event.why
    _due_at(state, schedule, event.next_ms)


def _paused(state: State, event: SchedulePaused) -> None:
    schedule = state.schedules[event.schedule]
    schedule.paused = event.why or "paused"
    _due_at(state, schedule, 0)


def _resumed(state: State, event: ScheduleResumed) -> None:
    schedule = state.schedules[event.schedule]
    schedule.paused = schedule.note = ""
    _due_at(state, schedule, event.next_ms)


def _removed(state: State, event: ScheduleRemoved) -> None:
    state.sizes.schedule(state.schedules.pop(event.schedule).spec, gone=True)
    _drop_stale(state)


APPLY_SCHEDULE: dict[type[EventBase], Callable[[State, Any], None]] = {
    ScheduleSet: _set,
    ScheduleRan: _ran,
    ScheduleMissed: _missed,
    ScheduleSkipped: _skipped,
    SchedulePaused: _paused,
    ScheduleResumed: _resumed,
    ScheduleRemoved: _removed,
}
