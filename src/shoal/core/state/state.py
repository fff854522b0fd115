"""The state of the cluster: facts, indexes, what was heard, the agenda, and caches (ADR 23)."""

from __future__ import annotations

from shoal.core.state.agenda import Agenda
from shoal.core.state.caches import Caches
from shoal.core.state.facts import Node as Node
from shoal.core.state.facts import Snapshot as Snapshot
from shoal.core.state.heard import Heard
from shoal.core.state.indexes import Indexes
from shoal.model.job import Job

ELDER_FACTOR = 16


class State(Indexes):
    """Owned by one loop. Facts and indexes lie flat on it and only `apply` changes them. Nothing
    of `heard`, `agenda` and `caches` is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.agenda = Agenda()
        self.caches = Caches()

    def job_numbered(self, number: int) -> Job:
        return self.jobs[self.numbers[number]]

    def patience_ms(self, now_ms: int) -> int:
        """How long a job waits before it may come first: in proportion to the usual age of jobs, so
        that an overloaded cluster does not turn every job into an exception."""
        ages_ms = self.ages.total_ms + len(self.jobs) * now_ms - self.births_ms
        mean_ms = ages_ms // max(1, self.ages.jobs + len(self.jobs))
        return max(self.policy.elder_ms, ELDER_FACTOR * mean_ms)
