"""The truth about schedules: each due time has exactly one run, or an event that says why not."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.schedules import (
    ScheduleEvent,
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleSet,
    ScheduleSkipped,
)
from shoal.cron import due_after, parse, zone_of
from shoal.model.schedule import ScheduleSpec
from storm.lives import Untruth


class ScheduleTruth:
    def __init__(self) -> None:
        self._specs: dict[str, ScheduleSpec] = {}
        self._next: dict[str, int] = {}  # the first due time that is not accounted for
        self._told: dict[str, int] = {}  # the newest that was reported as missed

    def done(self, events: Sequence[Event]) -> None:
        """Runs and their jobs are in one transaction."""
        due = [
            (event.schedule.partition("/")[2], event.due_ms, len(self._specs[event.schedule].jobs))
            for event in events
            if isinstance(event, ScheduleRan) and event.schedule in self._specs
        ]
        came = [event.spec for event in events if isinstance(event, JobSubmitted)]
        for name, due_ms, jobs in due:
            found = [one for one in came if (one.schedule, one.scheduled_ms) == (name, due_ms)]
            if len(found) != jobs:
                raise Untruth(f"the run of {name} at {due_ms} came with {len(found)} jobs")
        names = {(name, due_ms) for name, due_ms, _ in due}
        for one in came:
            if one.schedule and (one.schedule, one.scheduled_ms) not in names:
                raise Untruth(f"a job of {one.schedule} came without a run at {one.scheduled_ms}")

    def see(self, event: Event) -> None:
        if not isinstance(event, ScheduleEvent):
            return
        key = event.schedule
        match event:
            case ScheduleSet():
                self._specs[key], self._next[key] = event.spec, event.next_ms
                self._told.pop(key, None)
            case ScheduleMissed():
                for _ in range(event.count - 1):
                    self._account(key, self._next[key])
                if event.first_ms > event.last_ms or self._next[key] != event.last_ms:
                    raise Untruth(f"{key} says that it missed what was not due: {event.why}")
                self._account(key, event.last_ms)
                self._told[key] = event.last_ms
            case ScheduleRan() | ScheduleSkipped():
                if event.at_ms < event.due_ms:
                    raise Untruth(f"{key} ran before {event.due_ms}")
                if self._told.pop(key, None) != event.due_ms:  # otherwise it makes up for it
                    self._account(key, event.due_ms)
            case SchedulePaused() | ScheduleRemoved():
                self._next.pop(key, None)

    def _account(self, key: str, due_ms: int) -> None:
        if self._next[key] != due_ms:
            raise Untruth(f"{key} ran for {due_ms}, but {self._next[key]} was due")
        spec = self._specs[key]
        self._next[key] = due_after(parse(spec.cron), zone_of(spec.timezone), due_ms) or 0
