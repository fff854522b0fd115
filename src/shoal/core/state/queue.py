"""Waiting jobs: lanes of jobs that are alike to the scheduler, and jobs that are delayed."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

from shoal.model.job import Job, JobSpec, Within
from shoal.model.neighbor import asks
from shoal.model.resources import WHOLE_GPU_MILLI, Demand


class Gang(NamedTuple):
    """What a job asks of the cluster: if it does not fit, no job with the same gang does."""

    members: int
    demand: Demand
    per_node: int = 0
    whole_nodes: bool = False
    within: Within = Within.ANYWHERE
    required: bool = False
    spread: str = ""  # over the values of this label
    together: str = ""  # on nodes with one value of this label

    @property
    def gpu_milli(self) -> int:
        """GPU-thousandths that it takes at least; a share by memory counts as a whole GPU."""
        demand = self.demand
        return self.members * demand.gpus * (demand.gpu_milli or WHOLE_GPU_MILLI)

    @property
    def bound(self) -> bool:
        """It has to stay in one area: a node, rack or block, or nodes alike in a label."""
        return bool(self.together) or (self.required and self.within is not Within.ANYWHERE)


Kin = tuple[str | int, ...]


class Lane(NamedTuple):
    """Jobs that differ only in their order. `kin` is what the policy's order distinguishes them by;
    the elder has a lane of its own."""

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
        spec.spread,
        spec.together,
    )


def by_submission(job: Job) -> int:  # noqa: ARG001
    return 0


class Queue:
    """Inside a lane jobs are sorted by the policy's key, which is fixed while a job waits, then by
    submission. Every cycle compares the heads of the lanes again."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[tuple[int, int]]] = {}  # (inner key, job number)
        self.of_gang: dict[Gang, dict[Lane, Lane]] = {}  # each lane is one object
        self.lane: dict[int, Lane] = {}  # job number -> its lane
        self.delayed: list[tuple[int, int]] = []  # heap of (not_before_ms, job number)
        # Heap of (when it was submitted, job number); the first one is in a lane. An element is
        # younger than its number says.
        self.oldest: list[tuple[int, int]] = []
        self.held: dict[int, None] = {}  # numbers of jobs whose budget is used up
        # Lanes whose tenants may hold no such gang more, by a cap; and the lanes of their jobs.
        self.capped: dict[Lane, list[tuple[int, int]]] = {}
        self.capped_lane: dict[int, Lane] = {}
        self.parked: dict[int, None] = {}  # numbers of jobs that wait for other jobs to end
        self.outbound: dict[int, None] = {}  # numbers of jobs that only a neighbor may run
        # Numbers of jobs in lanes, capped or not, that may leave.
        self.wishing: dict[int, None] = {}

    @property
    def size(self) -> int:
        apart = len(self.capped_lane) + len(self.held) + len(self.parked) + len(self.outbound)
        return len(self.lane) + len(self.delayed) + apart

    def wanting(self, by_ms: int) -> bool:
        """Will a job want room by then?"""
        return bool(self.lane) or (bool(self.delayed) and self.delayed[0][0] <= by_ms)

    def first(self) -> int | None:
        """The number of the oldest job that may start."""
        return self.oldest[0][1] if self.oldest else None

    def leads(self, job: Job) -> bool:
        """Is it the first of its lane?"""
        lane = self.lane.get(job.number)
        return lane is not None and self.lanes[lane][0][1] == job.number

    def stand(self, job: Job, lane: Lane, inner: int) -> None:
        if asks(job.spec.cluster):
            self.wishing[job.number] = None
        if self.capped and lane in self.capped:
            insort(self.capped[lane], (inner, job.number))
            self.capped_lane[job.number] = lane
            return
        lane = self.of_gang.setdefault(lane.gang, {}).setdefault(lane, lane)
        self.lane[job.number] = lane
        line, entry = self.lanes.setdefault(lane, []), (inner, job.number)
        if line and entry < line[-1]:
            insort(line, entry)
        else:  # most come last
            line.append(entry)
        heapq.heappush(self.oldest, (job.submitted_ms, job.number))
        self._shorten()

    def hold_back(self, lane: Lane) -> None:
        """Its jobs may not start until `stand_again`."""
        self.capped[lane] = line = self.lanes.pop(lane)
        self._leave_gang(lane)
        for _, number in line:
            self.capped_lane[number] = self.lane.pop(number)
        self._tidy()

    def stand_again(self, lane: Lane, submitted_ms: Callable[[int], int]) -> None:
        self.lanes[lane] = line = self.capped.pop(lane)
        self.of_gang.setdefault(lane.gang, {})[lane] = lane
        for _, number in line:
            self.lane[number] = self.capped_lane.pop(number)
        self.oldest += [(submitted_ms(number), number) for _, number in line]
        heapq.heapify(self.oldest)
        self._shorten()

    def delay(self, job: Job) -> None:
        heapq.heappush(self.delayed, (job.not_before_ms, job.number))

    def hold(self, job: Job) -> None:
        self.held[job.number] = None

    def park(self, job: Job) -> None:
        self.parked[job.number] = None

    def remove(self, job: Job, inner: int) -> Lane | None:
        """Its former lane, if it was in one."""
        lane = self.lane.pop(job.number, None)
        self.wishing.pop(job.number, None)
        if lane is not None:
            line = self.lanes[lane]
            del line[bisect_left(line, (inner, job.number))]
            if not line:
                del self.lanes[lane]
                self._leave_gang(lane)
            self._tidy()
        elif job.number in self.capped_lane:
            line = self.capped[capped := self.capped_lane.pop(job.number)]
            del line[bisect_left(line, (inner, job.number))]
            if not line:
                del self.capped[capped]
        elif job.number in self.held:
            del self.held[job.number]
        elif job.number in self.parked:
            del self.parked[job.number]
        elif job.number in self.outbound:
            del self.outbound[job.number]
        else:
            self.delayed.remove((job.not_before_ms, job.number))
            heapq.heapify(self.delayed)
        return lane

    def _leave_gang(self, lane: Lane) -> None:
        of_gang = self.of_gang[lane.gang]
        del of_gang[lane]
        if not of_gang:
            del self.of_gang[lane.gang]

    def _shorten(self) -> None:
        if len(self.oldest) > 2 * len(self.lane) + 64:
            self.oldest = sorted({entry for entry in self.oldest if entry[1] in self.lane})

    def _tidy(self) -> None:
        while self.oldest and self.oldest[0][1] not in self.lane:
            heapq.heappop(self.oldest)

    def take_due(self, now_ms: int) -> list[int]:
        """Remove and return the delayed jobs whose time has come."""
        due = []
        while self.delayed and self.delayed[0][0] <= now_ms:
            due.append(heapq.heappop(self.delayed)[1])
        return due
