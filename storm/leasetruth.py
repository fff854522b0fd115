"""What a lease promises: nobody lives after it, whoever is dead or cut off by then."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobLeased
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobStopping
from shoal.model.job import StopCause
from storm.lives import Lives, Untruth
from storm.timeline import Timeline

LATE_MS = 100  # docs/leases.md promises 2 s, for machines that are busy


class LeaseTruth:
    """`on`: nodes with a living agent. What a killed keeper has left is ended by others."""

    def __init__(self, timeline: Timeline, lives: Lives, on: Container[str]) -> None:
        self._timeline, self._lives, self._on = timeline, lives, on
        self._until_ms: dict[str, int] = {}
        self._lapsed: dict[str, int] = {}  # job -> the last lease that a node has ended

    def see(self, event: Event) -> None:
        match event:
            case JobLeased():
                before_ms = self._until_ms.get(event.job, event.at_ms)
                if event.until_ms <= before_ms or event.at_ms > before_ms:
                    raise Untruth(f"the lease of {event.job} went from {before_ms} to {event}")
                self._until_ms[event.job] = event.until_ms
                over_ms = event.until_ms + LATE_MS
                self._timeline.at(over_ms, partial(self._verify, event.job, event.until_ms))
            case JobPlaced():
                if event.at_ms >= self._until_ms.get(event.job, event.at_ms + 1):
                    raise Untruth(f"{event.job} was placed after its lease was over")
            case JobStopping() if event.cause is StopCause.LEASE and not self._over(event):
                raise Untruth(f"{event.job} was stopped, but its lease is not over: {event.why}")

    def lapses(self, job: str, until_ms: int) -> None:
        """A node stops a member because of this lease."""
        self._lapsed[job] = until_ms
        if self._timeline.now_ms > until_ms + LATE_MS:
            raise Untruth(f"a node ends the lease of {job} too late")

    def has_lapsed(self, job: str) -> bool:
        """A node has stopped a member of it at the end of a lease that was renewed too late."""
        return job in self._lapsed

    def may_be_cancelled(self, event: JobFinished) -> bool:
        return self._over(event)

    def _over(self, event: JobFinished | JobStopping) -> bool:
        until_ms = self._until_ms.get(event.job)
        if until_ms is None:
            return False
        return event.at_ms >= until_ms or self._lapsed.get(event.job) == until_ms

    def _verify(self, job: str, until_ms: int) -> None:
        if self._until_ms[job] != until_ms:
            return  # it was renewed
        for _, life in self._lives.of_job(job):
            if life.node in self._on:
                raise Untruth(f"{life}, and the lease of {job} ended at {until_ms}")
