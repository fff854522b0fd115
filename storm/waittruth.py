"""The truth about reported waits: a job really waits that long, and somebody asked, once."""

from __future__ import annotations

import msgspec

from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded, JobReturned
from shoal.core.state.events.queue import JobReleased, JobSubmitted, JobWaited
from shoal.core.state.events.runs import JobAdopted, JobFinished, JobPlaced, JobRequeued
from shoal.model.job import JobSpec
from shoal.model.notice import wanted_of
from storm.lives import Untruth

WISHES = ("waiting:2s=https://x.org", "started,waiting:9s=@hook", "waiting:500ms,ended=@other")


class WaitTruth:
    """It knows of each job that waits since when, and what was said about it."""

    def __init__(self) -> None:
        self._asked: dict[str, frozenset[int]] = {}
        self._since_ms: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def see(self, event: Event) -> None:
        match event:
            case JobSubmitted():
                waits = {wanted_of(wish).waiting_ms for wish in event.spec.notify}
                self._asked[event.job] = frozenset(waits - {0})
                self._begins(event.job, max(event.at_ms, event.spec.begin_ms))
            case JobReleased():
                self._begins(event.job, max(event.at_ms, self._since_ms.get(event.job, 0)))
            case JobRequeued():
                self._begins(event.job, max(event.at_ms, event.not_before_ms))
            case JobReturned():
                self._begins(event.job, event.at_ms)
            case JobPlaced() | JobAdopted() | JobFinished() | JobHanded():
                self._since_ms.pop(event.job, None)
            case JobWaited():
                self._judge(event)
            case _:
                pass

    def _begins(self, job: str, since_ms: int) -> None:
        self._since_ms[job], self._said[job] = since_ms, 0

    def _judge(self, event: JobWaited) -> None:
        since_ms = self._since_ms.get(event.job)
        if since_ms is None:
            raise Untruth(f"{event.job} is said to wait, and does not: {event}")
        if event.since_ms != since_ms or event.at_ms < since_ms + event.waited_ms:
            raise Untruth(f"{event.job} waits since {since_ms}, but {event}")
        if event.waited_ms not in self._asked.get(event.job, ()):
            raise Untruth(f"nobody asked for {event}")
        if event.waited_ms <= self._said[event.job]:
            raise Untruth(f"a wait is reported again: {event}")
        self._said[event.job] = event.waited_ms


def with_wishes(spec: JobSpec, number: int) -> JobSpec:
    """Every third job wants its waits to be reported; without chance, so that the rest of a history
    stays as it is."""
    if number % 3:
        return spec
    return msgspec.structs.replace(spec, notify=WISHES[: number // 3 % 3 + 1])
