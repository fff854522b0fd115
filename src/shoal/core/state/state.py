"""The state of the cluster: facts, indexes, what was heard, the agenda, and caches (ADR 23)."""

from __future__ import annotations

from shoal.core.state.agenda import Agenda
from shoal.core.state.caches import Caches
from shoal.core.state.facts import Node as Node
from shoal.core.state.facts import Snapshot as Snapshot
from shoal.core.state.heard import Heard
from shoal.core.state.indexes import Indexes
from shoal.model.ids import array_of, in_order
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

    def live(self, job_id: str) -> Job | None:
        """The job or array of this id, until it has ended. An element that has not begun is none
        yet: see `pending`."""
        return self.jobs.get(job_id) or self.arrays.get(job_id)

    def pending(self, job_id: str) -> bool:
        """Whether it is an element of a live array that has not begun."""
        array = self.arrays.get(array_of(job_id))
        if array is None or array.elements is None or array.spec.sweep is None:
            return False
        position = array.spec.sweep.position_of(in_order(job_id)[1])
        return position is not None and position in array.elements.pending

    def patience_ms(self, now_ms: int) -> int:
        """How long a job waits before it may come first: in proportion to the usual age of jobs, so
        that an overloaded cluster does not turn every job into an exception."""
        ages_ms = self.ages.total_ms + len(self.jobs) * now_ms - self.births_ms
        mean_ms = ages_ms // max(1, self.ages.jobs + len(self.jobs))
        return max(self.policy.elder_ms, ELDER_FACTOR * mean_ms)
