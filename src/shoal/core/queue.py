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


class Lane(NamedTuple):
    """Jobs that differ in nothing but who comes first."""

    tenant: str
    priority: int
    gang: Gang


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


def lane_of(job: Job) -> Lane:
    return Lane(job.spec.tenant, job.spec.priority, gang_of(job))


InnerKey = Callable[[Job], int]


def by_submission(job: Job) -> int:  # noqa: ARG001
    return 0


class Queue:
    """Inside a lane jobs stand by the policy's key, which is fixed while a job waits, and then by
    submission. Who of the lanes' heads comes first is asked anew in every cycle."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[tuple[int, int]]] = {}  # (inner key, job number)
        self.delayed: list[tuple[int, int]] = []  # heap of (not_before_ms, job number)
        self.size = 0
        self.inner: InnerKey = by_submission

    def add(self, job: Job) -> None:
        self.size += 1
        if job.not_before_ms:
            heapq.heappush(self.delayed, (job.not_before_ms, job.number))
        else:
            self._stand(job)

    def remove(self, job: Job) -> None:
        self.size -= 1
        lane = lane_of(job)
        line = self.lanes.get(lane, [])
        entry = (self.inner(job), job.number)
        position = bisect_left(line, entry)
        if position < len(line) and line[position] == entry:
            del line[position]
            if not line:
                del self.lanes[lane]
        else:
            self.delayed.remove((job.not_before_ms, job.number))
            heapq.heapify(self.delayed)

    def wake(self, now_ms: int, jobs: Callable[[int], Job]) -> None:
        """Move the delayed jobs whose time has come among those that may start."""
        while self.delayed and self.delayed[0][0] <= now_ms:
            self._stand(jobs(heapq.heappop(self.delayed)[1]))

    def reorder(self, inner: InnerKey, jobs: Iterable[Job]) -> None:
        """Another policy: everybody who waits takes a new place."""
        if inner is not self.inner:
            self.inner = inner
            delayed = {number for _, number in self.delayed}
            self.lanes = {}
            for job in jobs:
                if job.number not in delayed:
                    self._stand(job)

    def _stand(self, job: Job) -> None:
        insort(self.lanes.setdefault(lane_of(job), []), (self.inner(job), job.number))
