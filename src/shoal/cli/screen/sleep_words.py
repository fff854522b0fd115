"""What happens to jobs that sleep, in words."""

from __future__ import annotations

from shoal.model.durations import duration_text
from shoal.model.events import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    MembersAsleep,
    MembersAwake,
    SleepRefused,
    WakeRefused,
)
from shoal.model.resources import plural

SleepHappening = (
    JobDozing
    | MembersAsleep
    | JobAsleep
    | SleepRefused
    | WakeRefused
    | JobTouched
    | JobWaking
    | MembersAwake
    | JobAwake
)


def about_sleep(event: SleepHappening) -> str:
    match event:
        case JobDozing():
            put = "put to sleep"
            return f"is being {event.why if event.why.startswith(put) else f'{put}: {event.why}'}"
        case MembersAsleep():
            return f"has {plural(len(event.members), 'member')} asleep"
        case JobAsleep():
            took = f", after {duration_text(event.took_ms)}" if event.took_ms else ""
            moved = f", {event.memory_mb} MB of GPU memory per member" if event.memory_mb else ""
            return f"is asleep and holds no GPU{took}{moved}"
        case WakeRefused():
            return event.why
        case SleepRefused():
            return f"goes on: {event.why}"
        case JobTouched():
            return event.why if event.wants else f"stays asleep: {event.why}"
        case JobWaking():
            return event.why
        case MembersAwake():
            return f"has {plural(len(event.members), 'member')} awake"
        case JobAwake():
            took = f" (waking took {duration_text(event.took_ms)})" if event.took_ms else ""
            return f"{event.why}{took}"
