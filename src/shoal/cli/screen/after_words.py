"""What happened to jobs that waited for others, as sentences."""

from __future__ import annotations

from shoal.model.events import JobReleased

AfterHappening = JobReleased


def about_after(event: AfterHappening) -> str:
    return f"{event.job} no longer waits for {event.by}: {event.why}"
