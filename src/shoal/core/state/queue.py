"""Waiting jobs: lanes of jobs that are alike to the scheduler, and those whose time is not yet."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.model.job import Job, JobSpec, Within
from shoal.model.resources import Demand


class Gang(NamedTuple):
    """What a job asks of the cluster: if it does not fit, no job with the same gang does."""

    members: int
    demand: Demand
    per_node: int = 0
    whole_nodes: bool = False
    within: Within = Within.ANYWHERE
    required: bool = False


Kin = tuple[str | int, ...]


class Lane(NamedTuple):
    """Jobs that differ in nothing but who comes first. `kin` is what the policy's order tells them
    apart by; the elder has a lane of its own."""

    tenant: str
    priority: int
    gang: Gang
    kin: Kin = ()
    elder: bool = False


def gang_of(job: Job) -> Gang:
    return gang_of_spec(job.spec)


def gang_of_spec(spec: JobSpec) -> Gang:
    return Gang(
        spec.members,
        spec.demand,
        spec.members_per_node,
        spec.whole_nodes,
        spec.within,
        spec.within_required,
    )


InnerKey = Callable[[Job], int]


def by_submission(job: Job) -> int:  # noqa: ARG001
    return 0


class Queue:
    """Inside a lane jobs stand by the policy's key, which is fixed while a job waits, and then by
    submission. Who of the lanes' heads comes first is asked anew in every cycle."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[tuple[int, int]]] = {}  # (inner key, job number)
        self.of_gang: dict[Gang, dict[Lane, None]] = {}
        self.lane: dict[int, Lane] = {}  # job number -> the lane it stands in
        self.delayed: list[tuple[int, int]] = []  # heap of (not_before_ms, job number)
        self.oldest: list[int] = []  # heap of job numbers, of which some stand no more
        self.fresh: dict[Lane, None] = {}  # lanes that somebody joined since the last cycle
        # Lanes of which nobody found a gap beside what is set aside for these jobs.
        self.stuck: dict[Lane, tuple[str, ...]] = {}
        self.held: dict[int, None] = {}  # numbers of those whose budget is used up
        self.holds: Callable[[Job], bool] = lambda _job: False
        self.size = 0
        self.inner: InnerKey = by_submission
        self.kin: Callable[[Job], Kin] = lambda _job: ()

    def add(self, job: Job) -> None:
        self.size += 1
        if job.not_before_ms:
            heapq.heappush(self.delayed, (job.not_before_ms, job.number))
        else:
            self._stand(job)

    def remove(self, job: Job) -> None:
        self.size -= 1
        lane = self.lane.pop(job.number, None)
        if lane is None and job.number in self.held:
            del self.held[job.number]
            return
        if lane is None:
            self.delayed.remove((job.not_before_ms, job.number))
            heapq.heapify(self.delayed)
            return
        self.stuck.pop(lane, None)
        line = self.lanes[lane]
        del line[bisect_left(line, (self.inner(job), job.number))]
        if not line:
            del self.lanes[lane]
            self.fresh.pop(lane, None)
            of_gang = self.of_gang[lane.gang]
            del of_gang[lane]
            if not of_gang:
                del self.of_gang[lane.gang]

    def wake(self, now_ms: int, jobs: Callable[[int], Job]) -> None:
        """Move the delayed jobs whose time has come among those that may start."""
        while self.delayed and self.delayed[0][0] <= now_ms:
            self._stand(jobs(heapq.heappop(self.delayed)[1]))

    def reorder(self, inner: InnerKey, kin: Callable[[Job], Kin], jobs: Iterable[Job]) -> None:
        """Another policy: everybody who waits takes a new place."""
        self.inner, self.kin = inner, kin
        delayed = {number for _, number in self.delayed}
        self.lanes, self.of_gang, self.lane, self.fresh, self.oldest = {}, {}, {}, {}, []
        self.held = {}
        for job in jobs:
            if job.number not in delayed:
                self._stand(job)

    def first(self) -> int | None:
        """The number of the oldest job that may start."""
        while self.oldest and self.oldest[0] not in self.lane:
            heapq.heappop(self.oldest)
        return self.oldest[0] if self.oldest else None

    def judge_holds(self, jobs: Iterable[Job]) -> None:
        """Somebody's budget is used up, or is not any more."""
        for job in jobs:
            if job.number in self.held or job.number in self.lane:
                self.remove(job)
                self.size += 1
                self._stand(job)

    def _stand(self, job: Job) -> None:
        if self.holds(job):
            self.held[job.number] = None
            return
        lane = Lane(job.spec.tenant, job.spec.priority, gang_of(job), self.kin(job), job.elder)
        self.lane[job.number] = lane
        insort(self.lanes.setdefault(lane, []), (self.inner(job), job.number))
        self.of_gang.setdefault(lane.gang, {})[lane] = None
        self.fresh[lane] = None
        self.stuck.pop(lane, None)
        heapq.heappush(self.oldest, job.number)
        if len(self.oldest) > 2 * len(self.lane) + 64:
            self.oldest = sorted(self.lane)
