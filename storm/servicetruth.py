"""What the log says about services, against the requests and the design's promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.features.service.serve import TRIES_MAX
from shoal.core.state.events.base import EventBase
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeIntended
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRequeued, JobStopping
from shoal.core.state.events.services import (
    ReplicaDraining,
    ReplicaReady,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
)
from shoal.core.state.events.sleep import JobAwake, JobDozing
from shoal.model.job import JobSpec, MemberRef, Outcome, StopCause
from shoal.model.node import NodeIntent
from shoal.model.report import Request, SetService, StopService
from shoal.model.service import Rollout, ServiceSpec
from storm.lives import Lives, Untruth
from storm.services import ready_at_ms


class Seen:
    """One service, by the log alone."""

    def __init__(self) -> None:
        self.spec: ServiceSpec | None = None
        self.version = self.newest = self.wanted = self.failed = 0
        self.stopping = False
        self.proven: dict[int, ServiceSpec] = {}  # versions that were ready
        self.jobs: dict[str, JobSpec] = {}
        self.ready: dict[str, None] = {}
        self.draining: dict[str, None] = {}
        self.sleepers: dict[str, None] = {}

    @property
    def serving(self) -> list[str]:
        return [job_id for job_id in self.ready if job_id not in self.draining]


class ServiceTruth:
    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self.has_work: Callable[[str], bool] = lambda _: False  # a replica that drains
        self.hangs: Callable[[str, int], bool] = lambda _job, _attempt: True
        # Whether a version may fail in another cluster, where the service is, too.
        self.fails_elsewhere: Callable[[str, int], bool] = lambda _service, _version: False
        self._asked: list[SetService | StopService] = []
        self._services: dict[str, Seen] = {}
        self._of_job: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self._places: dict[str, frozenset[str]] = {}
        self._to_empty: set[str] = set()

    def asked(self, request: Request) -> None:
        if isinstance(request, SetService | StopService):
            self._asked.append(request)

    def see(self, event: Event) -> None:
        judge = JUDGES.get(type(event))
        if judge is not None:
            judge(self, event)

    def _set(self, event: ServiceSet) -> None:
        seen = self._services.setdefault(event.service, Seen())
        before = seen.spec
        if event.back:
            if seen.proven.get(event.version) is None or event.version >= seen.version:
                raise Untruth(f"{event.service} rolls back to {event.version}, never seen ready")
            here = seen.failed >= TRIES_MAX and seen.version not in seen.proven
            if not here and not self.fails_elsewhere(event.service, seen.version):
                raise Untruth(f"{event.service} goes back after {seen.failed} failures")
        elif not any(isinstance(a, SetService) and a.spec == event.spec for a in self._asked):
            raise Untruth(f"{event.service} was set to a spec that nobody asked for")
        elif event.version != seen.newest + 1 and (
            event.version != seen.version or before is None or before.replica != event.spec.replica
        ):
            raise Untruth(f"{event.service} became version {event.version} after {seen.newest}")
        if event.version != seen.version:
            seen.failed = 0
        if event.version in seen.proven:
            seen.proven[event.version] = event.spec
        scale = event.spec.scale
        seen.spec, seen.version = event.spec, event.version
        seen.newest = max(seen.newest, event.version)
        seen.wanted = min(max(seen.wanted, scale.least), scale.most)

    def _scaled(self, event: ServiceScaled) -> None:
        seen = self._services[event.service]
        assert seen.spec is not None
        if not seen.spec.scale.least <= event.wanted <= seen.spec.scale.most or seen.stopping:
            raise Untruth(f"{event.service} is to have {event.wanted} replicas")
        seen.wanted = event.wanted

    def _submitted(self, event: JobSubmitted) -> None:
        name = event.spec.service
        if not name:
            return
        seen = self._services.get(name)
        if seen is None or seen.stopping or event.spec.version != seen.version:
            raise Untruth(f"{event.job} is a replica of {name} that nobody wants")
        seen.jobs[event.job] = event.spec
        self._of_job[event.job] = name

    def _placed(self, event: JobPlaced) -> None:
        if event.job not in self._of_job:
            return
        self._attempts[event.job] = event.attempt
        self._places[event.job] = frozenset(one.node for one in event.slices)
        if len(event.slices) > 1 and event.door in ("", event.master):
            raise Untruth(f"{event.job} is a gang that answers where its members meet")

    def _ready(self, event: ReplicaReady) -> None:
        seen = self._services[event.service]
        spec = seen.jobs[event.job]
        life = self._lives.all.get(MemberRef(event.job, self._attempts[event.job], 0))
        at_ms = ready_at_ms(spec, life) if life is not None else None
        if at_ms is None or at_ms > event.at_ms:
            raise Untruth(f"{event.job} is said to be ready, but its probe has not answered")
        for number in range(spec.members):
            if MemberRef(event.job, self._attempts[event.job], number) not in self._lives.all:
                raise Untruth(f"{event.job} is said to be ready, but {number} never started")
        seen.ready[event.job] = None
        if spec.version == seen.version:
            assert seen.spec is not None
            seen.proven[spec.version] = seen.spec
            seen.failed = 0

    def _draining(self, event: ReplicaDraining) -> None:
        seen = self._services[event.service]
        if event.job not in seen.serving:
            raise Untruth(f"{event.job} is drained, but it was not served")
        seen.draining[event.job] = None
        has_to_go = bool(self._places[event.job] & self._to_empty)
        few = len(seen.serving) < self._least(seen, event.job)
        if few and not seen.stopping and not has_to_go:
            raise Untruth(
                f"{event.job} is drained, which leaves {len(seen.serving)} ready replicas "
                f"of the {seen.wanted} wanted of {event.service}"
            )

    def _least(self, seen: Seen, drained: str) -> int:
        """How many have to be ready beside this one: fewer than wanted only if an old version
        leaves first because the service asks for that."""
        spec = seen.spec
        assert spec is not None
        old = seen.jobs[drained].version != seen.version
        if spec.rollout is not Rollout.REPLACE or not old:
            return seen.wanted
        return seen.wanted - (spec.at_a_time or max(1, seen.wanted // 4))

    def _stopping_job(self, event: JobStopping) -> None:
        name = self._of_job.get(event.job)
        if name is None:
            return
        seen = self._services[name]
        if event.cause is StopCause.CANCEL and event.job in seen.serving:
            raise Untruth(f"{event.job} of {name} is stopped without being drained: {event.why}")
        if event.why == "drained" and event.job in seen.ready and self.has_work(event.job):
            raise Untruth(f"{event.job} of {name} is said to be drained, but has work in flight")
        if event.why.endswith("it hangs"):
            if not self.hangs(event.job, event.attempt):
                raise Untruth(f"{event.job} of {name} is said to hang, but it answers")
            well = {*seen.ready, *seen.draining, *seen.sleepers}
            if starting := [job_id for job_id in seen.jobs if job_id not in well]:
                raise Untruth(f"{event.job} is stopped while {starting[0]} is not yet ready")
        seen.ready.pop(event.job, None)
        seen.sleepers.pop(event.job, None)

    def _dozing(self, event: JobDozing) -> None:
        """It gets no requests from now on."""
        if name := self._of_job.get(event.job):
            self._services[name].ready.pop(event.job, None)
            self._services[name].sleepers[event.job] = None

    def _awake(self, event: JobAwake) -> None:
        if name := self._of_job.get(event.job):
            self._services[name].sleepers.pop(event.job, None)

    def _requeued(self, event: JobRequeued) -> None:
        name = self._of_job.get(event.job)
        if name is not None:
            self._services[name].ready.pop(event.job, None)
            self._services[name].sleepers.pop(event.job, None)

    def _intended(self, event: NodeIntended) -> None:
        if event.intent is NodeIntent.DRAINING:
            self._to_empty.add(event.node)
        else:
            self._to_empty.discard(event.node)

    def _finished(self, event: JobFinished) -> None:
        name = self._of_job.pop(event.job, None)
        if name is None:
            return
        self._places.pop(event.job, None)
        seen = self._services[name]
        spec = seen.jobs.pop(event.job)
        seen.ready.pop(event.job, None)
        seen.sleepers.pop(event.job, None)
        drained = event.job in seen.draining
        seen.draining.pop(event.job, None)
        if event.outcome is not Outcome.CANCELLED and not drained:
            seen.failed += spec.version == seen.version

    def _stopping(self, event: ServiceStopping) -> None:
        if not any(isinstance(a, StopService) and a.service == event.service for a in self._asked):
            raise Untruth(f"{event.service} is stopped, but nobody asked for it")
        self._services[event.service].stopping = True

    def _stopped(self, event: ServiceStopped) -> None:
        seen = self._services.pop(event.service)
        if seen.jobs or not seen.stopping:
            raise Untruth(f"{event.service} is gone, but {list(seen.jobs)} are not")


JUDGES: dict[type[EventBase], Callable[[ServiceTruth, Any], None]] = {
    ServiceSet: ServiceTruth._set,
    ServiceScaled: ServiceTruth._scaled,
    ServiceStopping: ServiceTruth._stopping,
    ServiceStopped: ServiceTruth._stopped,
    ReplicaReady: ServiceTruth._ready,
    ReplicaDraining: ServiceTruth._draining,
    JobSubmitted: ServiceTruth._submitted,
    JobPlaced: ServiceTruth._placed,
    JobStopping: ServiceTruth._stopping_job,
    JobDozing: ServiceTruth._dozing,
    JobAwake: ServiceTruth._awake,
    JobRequeued: ServiceTruth._requeued,
    JobFinished: ServiceTruth._finished,
    NodeIntended: ServiceTruth._intended,
}
