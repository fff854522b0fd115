"""What happened to schedules, and to jobs that waited for others, as sentences."""

from __future__ import annotations

from typing import assert_never

from shoal.model.events import (
    JobReleased,
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSkipped,
)
from shoal.model.moments import moment_text

# fmt: off
AfterHappening = (
    JobReleased | ScheduleSet | ScheduleRan | ScheduleMissed | ScheduleSkipped | SchedulePaused
    | ScheduleResumed | ScheduleRemoved
)
# fmt: on


def about_after(event: AfterHappening) -> str:
    if isinstance(event, JobReleased):
        return f"{event.job} no longer waits for {event.by}: {event.why}"
    because = f": {event.why}" if event.why else ""
    name = event.schedule.removeprefix("default/")
    match event:
        case ScheduleSet():
            zone = f" {event.spec.timezone}" if event.spec.timezone else ""
            text = f"was set to '{event.spec.cron}'{zone}; next at {moment_text(event.next_ms)}"
        case ScheduleRan():
            text = f"ran as {event.job}, due at {moment_text(event.due_ms)}"
        case ScheduleMissed():
            text = f"was missed{because}"
        case ScheduleSkipped():
            text = f"left out the run due at {moment_text(event.due_ms)}{because}"
        case SchedulePaused():
            text = f"is paused{because}"
        case ScheduleResumed():
            text = f"goes on, next at {moment_text(event.next_ms)}{because}"
        case ScheduleRemoved():
            text = f"was removed{because}"
        case _:
            assert_never(event)
    return f"schedule {name} {text}"
