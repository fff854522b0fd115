"""The state of the cluster: facts, indexes, what was heard, the agenda, and caches (ADR 23).

The functions of a policy are here, too, because the queue is kept in their order: the caller of a
step brings them, and nothing in the core looks for one (ADR 97)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal.core.state.agenda import Agenda
from shoal.core.state.caches import Caches
from shoal.core.state.facts import Node as Node
from shoal.core.state.facts import Snapshot as Snapshot
from shoal.core.state.heard import Heard
from shoal.core.state.indexes import Indexes
from shoal.core.state.queue import Kin, by_submission
from shoal.core.state.room import Level
from shoal.model.ids import array_of, in_order, number_of
from shoal.model.job import Job
from shoal.model.resources import Kind

ELDER_FACTOR = 16


class State(Indexes):
    """Owned by one loop. Facts and indexes lie flat on it and only `apply` changes them. Nothing
    of `heard`, `agenda` and `caches` is stored. No fact depends on `functions`, so a log can be
    replayed without them."""

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__()
        self.functions = functions or PLAIN
        self.ordering = self.functions.order(self.policy.order)
        self.heard = Heard()
        self.agenda = Agenda()
        self.caches = Caches()

    def drop_caches(self) -> None:
        self.caches = Caches()
        self.estimates.drop_cache()
        self.foresight.drop_cache()

    def job_numbered(self, number: int) -> Job:
        return self.jobs[self.numbers[number]]

    def next_attempt(self, job: Job) -> int:
        """Nodes and neighbors may have seen attempts that a restored log does not show."""
        if self.restored_job and number_of(job.id) < self.restored_job:
            return max(job.attempt + 1, self.restored_attempt)
        return job.attempt + 1

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


# -- the functions of a policy ---------------------------------------------------------------

Rank = tuple[float, ...]

# Lower is better. `before` and `after` are what is free on the node without and with the gang.
Score = Callable[[State, Kind, Level, Level], tuple[float, ...]]


def _all_alike(_state: State, _tenant: str, _now_ms: int) -> Rank:
    return ()


def _no_kin(_state: State, _job: Job) -> Kin:
    return ()


def _no_rank(_state: State, _job: Job, _now_ms: int) -> Rank:
    return ()


def _never(_job: Job, _now_ms: int) -> int | None:
    return None


class Ordering(NamedTuple):
    """Jobs compare by priority, then by the tenant's rank, then by the job's, then by submission;
    the lower comes first. `rank` is for a waiting or running job, as of now. Waiting jobs of one
    tenant, priority, gang and `kin` share a rank, or have ranks that rise with `job`, which is
    fixed while a job waits. A tenant's rank may fall back with every placement."""

    job: Callable[[Job], int] = by_submission
    rank: Callable[[State, Job, int], Rank] = _no_rank
    kin: Callable[[State, Job], Kin] = _no_kin
    # When the rank of a running job next changes just because it keeps running.
    changes_ms: Callable[[Job, int], int | None] = _never
    tenant: Callable[[State, str, int], Rank] = _all_alike
    clairvoyant: bool = False  # it needs the true run times
    elders: bool = False  # the oldest job that has waited for too long comes first, one at a time

    @property
    def weighs_tenants(self) -> bool:
        return self.tenant is not _all_alike


def first_fit(_state: State, _kind: Kind, _before: Level, _after: Level) -> tuple[float, ...]:
    return ()


class Functions(NamedTuple):
    """Orders and placements by the names that policies use. An accepted policy may name one that
    is gone; a usual one takes its place, because a cluster with another order is better than one
    with none. `suppliers`: how sentences call the engines of supplies, if not by their names."""

    orders: Mapping[str, Ordering]
    placements: Mapping[str, Score]
    usual_order: str
    usual_placement: str
    suppliers: Mapping[str, str] = {}

    def order(self, name: str) -> Ordering:
        return self.orders.get(name) or self.orders[self.usual_order]

    def placement(self, name: str) -> Score:
        return self.placements.get(name) or self.placements[self.usual_placement]


# For a state whose queue nobody looks at: first come, first served.
PLAIN = Functions({"fifo": Ordering()}, {"first-fit": first_fit}, "fifo", "first-fit")
