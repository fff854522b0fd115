"""What events do to services; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state.state import State
from shoal.model.events import (
    EventBase,
    JobFinished,
    ReplicaDraining,
    ReplicaReady,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
)
from shoal.model.job import Job, Outcome, StopCause
from shoal.model.service import Service

# A replica that failed is replaced after this, then twice that, up to a minute.
REPLICA_RETRY_MS = 1_000
REPLICA_RETRY_MS_MAX = 60_000


def _service_set(state: State, event: ServiceSet) -> None:
    service = state.services.get(event.service)
    known = service is not None
    if service is None:
        service = Service(spec=event.spec, since_ms=event.at_ms, wanted=event.spec.scale.least)
        state.services[event.service] = service
    elif event.back:
        service.before, service.proven = None, True
    elif service.proven and event.version != service.version:
        service.before, service.before_version = service.spec, service.version
        service.proven = False
    if known:
        state.tally.service(state.accounts, service.spec, -1)
        state.sizes.service(service.spec, gone=True)
    state.tally.service(state.accounts, event.spec, 1)
    state.sizes.service(event.spec)
    service.spec, service.version, service.why = event.spec, event.version, event.why
    service.newest = max(service.newest, event.version)
    service.failures, service.retry_ms = 0, 0
    if state.endings:
        state.agenda.other_gaps()  # its replicas may need more or less time to leave a node
        state.agenda.ends_ms = 0
    scale = event.spec.scale
    service.wanted = min(max(service.wanted, scale.least), scale.most)


def _service_scaled(state: State, event: ServiceScaled) -> None:
    service = state.services[event.service]
    service.wanted, service.why = event.wanted, event.why


def _replica_ready(state: State, event: ReplicaReady) -> None:
    service = state.services[event.service]
    service.ready[event.job] = event.at_ms
    if state.jobs[event.job].spec.version == service.version:
        service.proven, service.failures = True, 0
        service.why = f"{event.job}: {event.why}"


def _replica_draining(state: State, event: ReplicaDraining) -> None:
    state.services[event.service].draining[event.job] = event.at_ms


def _service_stopping(state: State, event: ServiceStopping) -> None:
    service = state.services[event.service]
    service.stopping, service.wanted, service.why = True, 0, event.why


def _service_stopped(state: State, event: ServiceStopped) -> None:
    service = state.services.pop(event.service)
    state.tally.service(state.accounts, service.spec, -1)
    state.sizes.service(service.spec, gone=True)
    state.heard.loads.pop(event.service, None)
    state.heard.recent_work.pop(event.service, None)


def not_served(state: State, job: Job) -> None:
    """The replica gets no more requests."""
    service = state.services.get(job.spec.service)
    if service is not None:
        service.ready.pop(job.id, None)
    state.heard.down_ms.pop(job.id, None)
    state.heard.quiet.pop(job.id, None)


def replica_over(state: State, job: Job, event: JobFinished) -> None:
    """A server that ends by itself has failed, whatever its exit code. The next one starts a little
    later each time."""
    service = state.services.get(job.spec.service)
    if service is None:
        return
    drained = service.draining.pop(job.id, None) is not None
    if drained or event.outcome is Outcome.CANCELLED or job.spec.version != service.version:
        return
    service.failures += 1
    # The reason for stopping it says more than its exit code.
    why = job.why if job.stop_cause is StopCause.FAILURE else event.why
    service.why = f"{job.id}: {why}"
    wait_ms = min(REPLICA_RETRY_MS << min(service.failures - 1, 6), REPLICA_RETRY_MS_MAX)
    service.retry_ms = event.at_ms + wait_ms


APPLY_SERVICE: dict[type[EventBase], Callable[[State, Any], None]] = {
    ServiceSet: _service_set,
    ServiceScaled: _service_scaled,
    ReplicaReady: _replica_ready,
    ReplicaDraining: _replica_draining,
    ServiceStopping: _service_stopping,
    ServiceStopped: _service_stopped,
}
