"""Shoal's own log of events: the jobs and services of a cluster, and the nodes they ran on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.neighbors import JobRunsAway
from shoal.core.state.events.nodes import NodeIntended, NodeJoined
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobCheckpointed,
    JobFinished,
    JobIdled,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobUsed,
)
from shoal.core.state.events.services import (
    ReplicaReady,
    ServiceEvent,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
)
from shoal.core.state.events.sleep import JobAsleep, JobAwake, JobDozing
from shoal.model.job import JobSpec, Outcome, StopCause
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy
from shoal.model.service import ServiceSpec
from shoal.sim.replay.clusters import NEVER_MS
from shoal.sim.replay.traces import (
    Arrival,
    Gangs,
    RecordedService,
    Trace,
    TraceError,
    in_order,
)

PAGE = 10_000
DAY_MS = 86_400_000

Events = Callable[[int, int], list[Recorded]]  # after this event, at most this many


# A job that saves its work and is stopped for one of these goes on from there.
KEEPS = (StopCause.RESIZE, StopCause.PREEMPT, StopCause.MOVE, StopCause.DRAIN, StopCause.BUDGET)


class _Lived:
    """One job as the log shows it."""

    __slots__ = (
        "begun_ms",
        "code",
        "dozed_ms",
        "ended_ms",
        "event",
        "failed_ms",
        "first_save_ms",
        "gpu_mb",
        "idle",
        "kept_ms",
        "last_save_ms",
        "placed_ms",
        "running_ms",
        "saved",
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
        self.failed_ms: list[int] = []  # how long its earlier attempts ran that failed
        self.code = 0
        self.saved = 0  # checkpoints that its members reported
        self.first_save_ms = self.last_save_ms = 0
        self.idle: list[tuple[int, int]] = []  # of its newest attempt, since that ran
        self.dozed_ms: int | None = None  # it sleeps for others since then
        self.gpu_mb = 0  # what it had on each GPU when it last slept

    def placed(self, event: JobPlaced) -> None:
        self.begun_ms = event.at_ms if self.begun_ms is None else self.begun_ms
        self.placed_ms, self.size = event.at_ms, len(event.slices)

    def runs(self, at_ms: int) -> None:
        self.running_ms, self.ended_ms, self.idle = at_ms, None, []
        self.dozed_ms = None
        if self.start_up_ms is None and self.placed_ms is not None:
            self.start_up_ms = at_ms - self.placed_ms

    def checkpointed(self, at_ms: int) -> None:
        self.saves = True
        self.first_save_ms = at_ms if not self.saved else self.first_save_ms
        self.last_save_ms = at_ms
        self.saved += 1

    def idled(self, since_ms: int) -> None:
        if self.running_ms is not None:
            self.idle.append((max(0, since_ms - self.running_ms), NEVER_MS))

    def used(self, at_ms: int) -> None:
        if self.idle and self.running_ms is not None:
            self.idle[-1] = (self.idle[-1][0], at_ms - self.running_ms)

    def dozes(self, event: JobDozing) -> None:
        """Time that it sleeps for others is not work. A job that nobody used would have been idle,
        with or without sleep."""
        if event.cause.wants:
            self.dozed_ms = event.at_ms
        elif not self.idle or self.idle[-1][1] < NEVER_MS:
            self.idled(event.at_ms)

    def awakes(self, at_ms: int) -> None:
        if self.dozed_ms is None:
            self.used(at_ms)
        elif self.running_ms is not None:
            self.running_ms += at_ms - self.dozed_ms
        self.dozed_ms = None

    @property
    def checkpoint_ms(self) -> int:
        """As it said, or as it was seen to save."""
        if self.saved > 1:
            return max(1, (self.last_save_ms - self.first_save_ms) // (self.saved - 1))
        if self.saved and self.running_ms is not None:
            return max(1, self.last_save_ms - self.running_ms)
        return self.event.spec.checkpoint_ms or NEVER_MS

    def requeued(self, event: JobRequeued) -> None:
        if self.saves and event.cause in KEEPS and self.ended_ms is None:
            self.kept_ms = self.work_ms(event.at_ms)
        if event.cause is StopCause.FAILURE and self.ended_ms is None and self.running_ms:
            self.failed_ms.append(self.work_ms(event.at_ms) - self.kept_ms)
        self.ended_ms = event.at_ms

    def work_ms(self, last_ms: int) -> int:
        """At the size that it asked for: twice the members do it in half the time."""
        if self.running_ms is None:
            return self.kept_ms
        ended_ms = last_ms if self.ended_ms is None else self.ended_ms
        ended_ms = ended_ms if self.dozed_ms is None else self.dozed_ms
        ran_ms = max(ended_ms - self.running_ms, 0)
        return self.kept_ms + ran_ms * self.size // max(1, self.event.spec.members)


class _Service:
    """One service as the log shows it."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, ServiceSpec | None]] = []
        self.wanted: list[tuple[int, int]] = []
        self.start_up_ms: list[int] = []
        self.ready_ms: list[int] = []
        self.until_ms: int | None = None

    @property
    def last_wanted(self) -> int:
        return self.wanted[-1][1] if self.wanted else 0

    def recorded(self, name: str, gangs: Gangs, since_ms: int, last_ms: int) -> RecordedService:
        """The log holds no requests: taken is the least work that explains its replicas."""
        work: list[tuple[int, int]] = []
        changes = [
            (max(at_ms, since_ms), _lean_service(spec, gangs)) for at_ms, spec in self.changes
        ]
        earlier = [one for one in self.changes if one[0] < since_ms]
        changes = changes[max(0, len(earlier) - 1) :]
        for at_ms, wanted in self.wanted:
            spec = next(one for at, one in reversed(self.changes) if at <= at_ms and one)
            scale = spec.scale
            if work and wanted < work[-1][1]:  # the work fell before the replicas did
                at_ms -= scale.down_after_ms if wanted else scale.idle_ms
            at_ms = max(at_ms, work[-1][0] + 1 if work else since_ms)
            work.append((at_ms, wanted))
        targets = [(at_ms, spec.scale.target) for at_ms, spec in self.changes if spec]
        return RecordedService(
            name=name,
            changes=tuple(changes),
            work=tuple(
                (at_ms, (wanted - 1) * _at(targets, at_ms) + 1 if wanted else 0)
                for at_ms, wanted in work
            ),
            start_up_ms=_median(self.start_up_ms),
            ready_ms=_median(self.ready_ms) or 0,
            until_ms=last_ms if self.until_ms is None else self.until_ms,
        )


class History:
    """What a log shows. The nodes are as they last were.

    A job's work is the run time of its last attempt, and of earlier attempts that the cluster
    stopped after they had saved; each counts by its size. A job that still runs counts with its
    time so far. Jobs that never ran, or were submitted before the log begins, are left out. A
    replica belongs to its service, which is replayed as a service.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_ms = 0
        self.policy: Policy | None = None  # the last one that was in force
        self._jobs: dict[str, _Lived] = {}
        self._arrays: dict[str, ArraySubmitted] = {}
        self._nodes: dict[str, NodeSpec] = {}
        self._services: dict[str, _Service] = {}
        self._replicas: dict[str, tuple[int, int]] = {}  # when each was placed, and began to run

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
            raise TraceError(f"{self.name}: the log has no job that ran{when}")
        depths = self._depths()
        ran.sort(key=lambda lived: depths[lived.event.job])  # others wait for the first ones
        arrivals = [_arrival(lived, gangs, self.last_ms) for lived in ran]
        services = [
            one.recorded(name, gangs, since_ms, self.last_ms)
            for name, one in self._services.items()
            if one.until_ms is None or one.until_ms > since_ms
        ]
        skipped = len(self._jobs) - len(arrivals)
        return in_order(self.name, arrivals, skipped, services)

    def _depths(self) -> dict[str, int]:
        """How many jobs of the log come before each one, along the longest way."""
        depths: dict[str, int] = {}
        for name in self._jobs:
            ways = [name]
            while ways:
                before = [
                    one for one in _after(self._jobs[ways[-1]].event.spec) if one in self._jobs
                ]
                unknown = [one for one in before if one not in depths]
                ways += unknown
                if not unknown:
                    depths[ways.pop()] = 1 + max((depths[one] for one in before), default=0)
        return depths

    def take(self, seq: int, event: Event) -> None:
        jobs = self._jobs
        self.last_ms = event.at_ms
        if isinstance(event, ServiceEvent):
            self._take_service(event)
            return
        match event:
            case JobSubmitted() if event.spec.service in self._services:
                pass  # its service starts it again
            case ArraySubmitted():
                self._arrays[event.job] = event
            case JobSubmitted():
                if event.job in jobs:  # an element that was retried
                    jobs[f"{event.job} before {seq}"] = jobs[event.job]
                jobs[event.job] = _Lived(seq, self._as_submitted(event))
            case JobPlaced() if event.job not in jobs:
                self._replicas[event.job] = event.at_ms, event.at_ms
            case JobRunning() if event.job in self._replicas:
                self._replicas[event.job] = self._replicas[event.job][0], event.at_ms
            case JobPlaced() if event.job in jobs:
                jobs[event.job].placed(event)
            case JobRunning() | JobRunsAway() if event.job in jobs:
                jobs[event.job].runs(event.at_ms)
            case JobCheckpointed() if event.job in jobs:
                jobs[event.job].checkpointed(event.at_ms)
            case JobIdled() if event.job in jobs:
                jobs[event.job].idled(event.since_ms)
            case JobDozing() if event.job in jobs:
                jobs[event.job].dozes(event)
            case JobAsleep() if event.job in jobs:
                spec = jobs[event.job].event.spec
                jobs[event.job].gpu_mb = event.memory_mb // max(1, spec.gpus)
            case JobAwake() if event.job in jobs:
                jobs[event.job].awakes(event.at_ms)
            case JobUsed() if event.job in jobs:
                jobs[event.job].used(event.at_ms)
            case JobRequeued() if event.job in jobs:
                jobs[event.job].requeued(event)
            case JobFinished() if event.job in jobs:
                jobs[event.job].ended_ms = event.at_ms
                jobs[event.job].code = event.code if event.outcome is Outcome.FAILED else 0
            case PolicyChanged():
                self.policy = event.policy
            case NodeJoined():
                self._nodes[event.node] = event.spec
            case NodeIntended() if event.intent is NodeIntent.REMOVED:
                self._nodes.pop(event.node, None)

    def _as_submitted(self, event: JobSubmitted) -> JobSubmitted:
        """An element came with its array: when it became a job depends on the room that there was.
        If only some may run at a time, it is kept, because a replay does not know that limit."""
        array = self._arrays.get(event.spec.array)
        if array is None or array.spec.sweep is None or array.spec.sweep.at_most:
            return event
        return msgspec.structs.replace(event, at_ms=array.at_ms)

    def _take_service(self, event: ServiceEvent) -> None:
        service = self._services.get(event.service)
        if isinstance(event, ServiceSet):
            service = self._services.setdefault(event.service, _Service())
            if not event.back:
                service.changes.append((event.at_ms, event.spec))
            service.wanted.append((event.at_ms, max(service.last_wanted, event.spec.scale.least)))
            service.until_ms = None
        elif service is None:
            return
        match event:
            case ServiceScaled():
                service.wanted.append((event.at_ms, event.wanted))
            case ReplicaReady():
                if event.job in self._replicas:
                    placed_ms, began_ms = self._replicas.pop(event.job)
                    service.start_up_ms.append(began_ms - placed_ms)
                    service.ready_ms.append(event.at_ms - began_ms)
            case ServiceStopping():
                service.changes.append((event.at_ms, None))
                service.wanted.append((event.at_ms, 0))
            case ServiceStopped():
                service.until_ms = event.at_ms


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
        checkpoint_ms=lived.checkpoint_ms,
        beats=lived.saved > 0,
        job=lived.event.job,
        after=_after(spec),
        begin_ms=max(0, spec.begin_ms - came_ms) if spec.begin_ms else 0,
        failed_ms=tuple(lived.failed_ms),
        idle_ms=tuple(lived.idle),
        gpu_mb=lived.gpu_mb,
        start_up_ms=lived.start_up_ms,
        waited_ms=-1 if lived.begun_ms is None else lived.begun_ms - came_ms,
        took_ms=lived.ended_ms - came_ms if over and lived.ended_ms is not None else -1,
    )


def _lean(spec: JobSpec) -> JobSpec:
    """What a replay needs of it: a month of jobs must fit into memory."""
    own = {
        "cluster": "",
        "if_cut_ms": 0,
        "after": (),
        "begin_ms": 0,
        "workflow": "",
        "schedule": "",
        "scheduled_ms": 0,
    }
    own |= {
        "service": "",
        "version": 0,
        "array": "",
        "index": 0,
        "sweep": None,
    }  # these are set by Shoal
    return msgspec.structs.replace(spec, command=("replayed",), env={}, workdir="", **own)


def _after(spec: JobSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.partition(":")[0] for text in spec.after))


def _lean_service(spec: ServiceSpec | None, gangs: Gangs) -> ServiceSpec | None:
    if spec is None:
        return None
    return msgspec.structs.replace(spec, replica=gangs.uncounted(_lean(spec.replica)))


def _median(values: list[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None


def _at(values: list[tuple[int, int]], at_ms: int) -> int:
    """The newest value at that time, or the first of all."""
    return next((value for when, value in reversed(values) if when <= at_ms), values[0][1])
