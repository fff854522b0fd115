"""Shoal's own log of events: what a cluster was asked for, how long it ran, and on which nodes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.model.events import (
    Event,
    JobFinished,
    JobRequeued,
    JobRunning,
    JobSubmitted,
    NodeIntended,
    NodeJoined,
    Recorded,
)
from shoal.model.job import JobSpec, Outcome
from shoal.model.node import NodeIntent, NodeSpec
from shoal.sim.traces import Arrival, Gangs, Trace, TraceError, in_order

PAGE = 10_000
DAY_MS = 86_400_000

Events = Callable[[int, int], list[Recorded]]  # those after this one, so many at most


class _Lived:
    """One job as the log tells it."""

    __slots__ = ("code", "ended_ms", "event", "running_ms", "seq")

    def __init__(self, seq: int, event: JobSubmitted) -> None:
        self.seq = seq
        self.event = event
        self.running_ms: int | None = None  # of its newest attempt
        self.ended_ms: int | None = None
        self.code = 0


class History:
    """What a log tells. The nodes are as they last were.

    A job's work is the run time of its last attempt; one that still runs counts with its time so
    far. Left out is what never ran, and what was submitted before the log begins.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_ms = 0
        self._jobs: dict[str, _Lived] = {}
        self._nodes: dict[str, NodeSpec] = {}

    @property
    def nodes(self) -> list[NodeSpec]:
        if not self._nodes:
            raise TraceError(f"{self.name}: the log names no node")
        return list(self._nodes.values())

    def trace(self, gangs: Gangs, days: int = 0) -> Trace:
        """Of the last `days` before the log's end; 0: of all."""
        since_ms = self.last_ms - days * DAY_MS if days else 0
        ran = [
            lived
            for lived in self._jobs.values()
            if lived.running_ms is not None and lived.event.at_ms >= since_ms
        ]
        if not ran:
            when = f" in its last {days} days" if days else ""
            raise TraceError(f"{self.name}: the log holds no job that ran{when}")
        arrivals = [_arrival(lived, gangs, self.last_ms) for lived in ran]
        return in_order(self.name, arrivals, skipped=len(self._jobs) - len(arrivals))

    def take(self, seq: int, event: Event) -> None:
        jobs = self._jobs
        self.last_ms = event.at_ms
        match event:
            case JobSubmitted():
                jobs[event.job] = _Lived(seq, event)
            case JobRunning() if event.job in jobs:
                jobs[event.job].running_ms = event.at_ms
                jobs[event.job].ended_ms = None
            case JobRequeued() if event.job in jobs:
                jobs[event.job].ended_ms = event.at_ms
            case JobFinished() if event.job in jobs:
                jobs[event.job].ended_ms = event.at_ms
                jobs[event.job].code = event.code if event.outcome is Outcome.FAILED else 0
            case NodeJoined():
                self._nodes[event.node] = event.spec
            case NodeIntended() if event.intent is NodeIntent.REMOVED:
                self._nodes.pop(event.node, None)


def read_history(events: Events, name: str) -> History:
    history, after = History(name), 0
    while page := events(after, PAGE):
        for recorded in page:
            history.take(recorded.seq, recorded.event)
        after = page[-1].seq
    return history


def _arrival(lived: _Lived, gangs: Gangs, last_ms: int) -> Arrival:
    spec = lived.event.spec
    ended_ms = last_ms if lived.ended_ms is None else lived.ended_ms
    return Arrival(
        submit_ms=lived.event.at_ms,
        work_ms=max(ended_ms - (lived.running_ms or 0), 0),
        spec=gangs.uncounted(_lean(spec)),
        row=lived.seq,
        tenant=getattr(spec, "tenant", ""),
        exit_code=lived.code,
    )


def _lean(spec: JobSpec) -> JobSpec:
    """What a replay needs of it: a month of jobs must fit into memory. A replica counts as the job
    it was, for no service stands behind it here."""
    return msgspec.structs.replace(
        spec, command=("replayed",), env={}, workdir="", service="", version=0
    )
