"""Figures of the control loop's own work, for monitoring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shoal.core.state.events.log import Event
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobStopping
from shoal.core.state.state import State

# Upper bounds in seconds: for a step or a commit, and for a job's wait for its first start.
WORK_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAIT_BOUNDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0)
TENANTS_MAX = 100
OTHERS = "(others)"  # not a valid name of a tenant


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Counters:
    """Counted since this controller began; readers look at how they grow."""

    def __init__(self) -> None:
        self.steps = Histogram(WORK_BOUNDS)
        self.commits = Histogram(WORK_BOUNDS)
        self.waits = Histogram(WAIT_BOUNDS)
        self.reports = 0
        self.events: dict[str, int] = {}  # by kind
        self.placements: dict[str, int] = {}  # by tenant
        self.stops: dict[str, int] = {}  # by cause
        self.ends: dict[tuple[str, str], int] = {}  # by outcome and tenant
        self._tenants: dict[str, None] = {}

    def happened(self, state: State, events: Sequence[Event], tenants: dict[str, str]) -> None:
        """`tenants`: by job, for jobs that have just left the state."""
        for event in events:
            kind = type(event).__name__
            self.events[kind] = self.events.get(kind, 0) + 1
            if type(event) is JobPlaced:
                job = state.jobs.get(event.job)
                if job is not None:
                    tenant = self._tenant(job.spec.tenant)
                    self.placements[tenant] = self.placements.get(tenant, 0) + 1
                    if event.attempt == 1:
                        self.waits.add(max(0, event.at_ms - job.submitted_ms) / 1000)
            elif type(event) is JobStopping:
                cause = event.cause.value
                self.stops[cause] = self.stops.get(cause, 0) + 1
            elif type(event) is JobFinished:
                key = event.outcome.value, self._tenant(tenants.get(event.job, OTHERS))
                self.ends[key] = self.ends.get(key, 0) + 1

    def _tenant(self, tenant: str) -> str:
        """The first `TENANTS_MAX` are counted by name."""
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                return OTHERS
            self._tenants[tenant] = None
        return tenant
