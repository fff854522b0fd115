"""The gateway of a replay: its services and their load, as the history recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.core.state.state import State
from shoal.model.job import Phase
from shoal.model.report import Request, SetService, StopService
from shoal.model.service import ReplicaLoad, Service, ServiceLoad
from shoal.sim.replay.clusters import NEVER_MS
from shoal.sim.replay.traces import RecordedService

LOOK_MS = 30_000  # between two looks at live services
SOON_MS = 1_000  # while a replica falls asleep or wakes


class Gateway(Protocol):
    """What a replay asks of the gateway."""

    next_ms: int  # when it next has news
    until_ms: int  # a replay goes on until then, even without jobs

    def requests(self, state: State, now_ms: int) -> Sequence[Request]: ...

    def loads(self, state: State, now_ms: int) -> Sequence[ServiceLoad]: ...


class RecordedGateway:
    """Looks at services when their load changes, when a replica gets ready, and regularly."""

    def __init__(self, services: Sequence[RecordedService]) -> None:
        self._services = {one.name: one for one in services}
        self._changes = sorted(
            ((at_ms, one.name, spec) for one in services for at_ms, spec in one.changes),
            key=lambda change: change[0],
        )
        self._turns = sorted({at_ms for one in services for at_ms, _ in one.work})
        self.until_ms = max((one.until_ms for one in services), default=0)
        self.next_ms = self._changes[0][0] if self._changes else NEVER_MS

    def requests(self, state: State, now_ms: int) -> list[Request]:
        due: list[Request] = []
        while self._changes and self._changes[0][0] <= now_ms:
            _, name, spec = self._changes[0]
            known = state.services.get(name)
            if known is not None and known.stopping:
                break  # it can be set again once it is gone
            del self._changes[0]
            due.append(StopService(name) if spec is None else SetService(spec))
        return due

    def loads(self, state: State, now_ms: int) -> list[ServiceLoad]:
        """Called once for each step, before it."""
        if now_ms < self.next_ms:
            return []
        while self._turns and self._turns[0] <= now_ms:
            del self._turns[0]
        times = [max(at_ms, now_ms + 1_000) for at_ms, _, _ in self._changes[:1]]
        times += self._turns[:1]
        times.append(now_ms + LOOK_MS if state.services or now_ms < self.until_ms else NEVER_MS)
        loads = [self._load(state, service, now_ms, times) for service in state.services.values()]
        self.next_ms = min(times)
        return loads

    def _load(self, state: State, service: Service, now_ms: int, times: list[int]) -> ServiceLoad:
        recorded = self._services[service.spec.name]
        ready = []
        for job_id in state.replicas.get(recorded.name, {}):
            job = state.jobs[job_id]
            if job.phase is Phase.RUNNING and job.running_ms is not None:
                ready_ms = job.running_ms + recorded.ready_ms
                if ready_ms <= now_ms:
                    ready.append(job_id)
                else:
                    times.append(ready_ms)
            elif job.napping and (job.phase is not Phase.ASLEEP or job.wants):
                times.append(now_ms + SOON_MS)
        serving = [job_id for job_id in service.ready if job_id not in service.draining]
        work = next((work for at_ms, work in reversed(recorded.work) if at_ms <= now_ms), 0)
        replicas = {
            job_id: ReplicaLoad(
                up=True, in_flight=work // len(serving) + (place < work % len(serving))
            )
            for place, job_id in enumerate(serving)
        }
        return ServiceLoad(
            service=recorded.name,
            in_flight=work if serving else 0,
            held=0 if serving else work,
            replicas=replicas,
            ready=tuple(ready),
        )
