"""Shoal's own log of events: what a cluster was asked for, how long it ran, and on which nodes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.model.events import (
    Event,
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobSubmitted,
    NodeIntended,
    NodeJoined,
    Recorded,
)
from shoal.model.job import JobSpec, Outcome, StopCause
from shoal.model.node import NodeIntent, NodeSpec
from shoal.sim.replay.clusters import NEVER_MS
from shoal.sim.replay.traces import Arrival, Gangs, Trace, TraceError, in_order

PAGE = 10_000
DAY_MS = 86_400_000

Events = Callable[[int, int], list[Recorded]]  # those after this one, so many at most


# Who is stopped by these and saves its work goes on from there: what it did is not done again.
KEEPS = (StopCause.RESIZE, StopCause.PREEMPT, StopCause.MOVE, StopCause.DRAIN, StopCause.BUDGET)


class _Lived:
    """One job as the log tells it."""

    __slots__ = (
        "begun_ms",
        "code",
        "ended_ms",
        "event",
        "kept_ms",
        "placed_ms",
        "running_ms",
        "saves",
        "seq",
        "size",
        "start_up_ms",
    )

    def __init__(self, seq: int, event: JobSubmitted) -> None:
        self.seq = seq
        self.event = event
        self.begun_ms: int | None = None  # first placed
        self.placed_ms: int | None = None  # of its newest attempt
        self.running_ms: int | None = None
        self.ended_ms: int | None = None
        self.size = event.spec.members
        self.start_up_ms: int | None = None  # of its first attempt
        self.saves = event.spec.checkpoint_ms > 0
        self.kept_ms = 0  # work of attempts before the newest
        self.code = 0

    def placed(self, event: JobPlaced) -> None:
        self.begun_ms = event.at_ms if self.begun_ms is None else self.begun_ms
        self.placed_ms, self.size = event.at_ms, len(event.slices)

    def runs(self, at_ms: int) -> None:
        self.running_ms, self.ended_ms = at_ms, None
        if self.start_up_ms is None and self.placed_ms is not None:
            self.start_up_ms = at_ms - self.placed_ms

    def requeued(self, event: JobRequeued) -> None:
        if self.saves and event.cause in KEEPS and self.ended_ms is None:
            self.kept_ms = self.work_ms(event.at_ms)
        self.ended_ms = event.at_ms

    def work_ms(self, last_ms: int) -> int:
        """At the size that it asked for: twice the members do it in half the time."""
        if self.running_ms is None:
            return self.kept_ms
        ended_ms = last_ms if self.ended_ms is None else self.ended_ms
        ran_ms = max(ended_ms - self.running_ms, 0)
        return self.kept_ms + ran_ms * self.size // max(1, self.event.spec.members)


class History:
    """What a log tells. The nodes are as they last were.

    A job's work is the run time of its last attempt, and of those before that it was stopped in by
    us and had saved; each counts by its size. One that still runs counts with its time so far.
    Left out is what never ran, and what was submitted before the log begins.
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
            case JobPlaced() if event.job in jobs:
                jobs[event.job].placed(event)
            case JobRunning() if event.job in jobs:
                jobs[event.job].runs(event.at_ms)
            case JobCheckpointed() if event.job in jobs:
                jobs[event.job].saves = True
            case JobRequeued() if event.job in jobs:
                jobs[event.job].requeued(event)
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
    spec, came_ms = lived.event.spec, lived.event.at_ms
    over = lived.ended_ms is not None and lived.begun_ms is not None
    return Arrival(
        submit_ms=came_ms,
        work_ms=lived.work_ms(last_ms),
        spec=gangs.uncounted(_lean(spec)),
        row=lived.seq,
        tenant=getattr(spec, "tenant", ""),
        exit_code=lived.code,
        checkpoint_ms=spec.checkpoint_ms or NEVER_MS,
        start_up_ms=lived.start_up_ms,
        waited_ms=-1 if lived.begun_ms is None else lived.begun_ms - came_ms,
        took_ms=lived.ended_ms - came_ms if over and lived.ended_ms is not None else -1,
    )


def _lean(spec: JobSpec) -> JobSpec:
    """What a replay needs of it: a month of jobs must fit into memory. A replica counts as the job
    it was, for no service stands behind it here."""
    return msgspec.structs.replace(
        spec, command=("replayed",), env={}, workdir="", service="", version=0
    )
