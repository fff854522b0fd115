"""In which order jobs are tried: the policies' orders, and a walk over the queue by one of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from shoal.core.queue import Lane, by_submission
from shoal.core.scheduling.registry import Registry
from shoal.model.job import Job

if TYPE_CHECKING:
    from shoal.core.state import State

Rank = tuple[float, ...]


def _all_alike(_state: State, _tenant: str, _now_ms: int) -> Rank:
    return ()


class Ordering(NamedTuple):
    """Priority comes first, then what the order says of the tenant, then what it says of the job,
    then submission; the lower comes first. A job's rank is fixed while it waits, a tenant's may
    fall back whenever the tenant is given something."""

    job: Callable[[Job], int] = by_submission
    job_now: Callable[[Job, int], int] = lambda _job, _now_ms: 0  # the same of a running job
    tenant: Callable[[State, str, int], Rank] = _all_alike
    clairvoyant: bool = False  # it needs to know how long jobs will run

    @property
    def weighs_tenants(self) -> bool:
        return self.tenant is not _all_alike


def ran_ms(job: Job, now_ms: int) -> int:
    """How long it has run, in this attempt and in what is kept of earlier ones."""
    if job.running_ms is None or not job.active:
        return job.attained_ms
    return job.attained_ms + now_ms - job.running_ms


def gpus_of(job: Job) -> int:
    """GPUs of the whole gang; a job without any counts as one."""
    return max(1, job.spec.gpus * job.spec.members)


def gpu_milli_of(job: Job) -> int:
    """GPU-thousandths of the gang at its least size; a share by memory counts as a whole GPU."""
    return job.spec.gpus * job.spec.members * (job.spec.gpu_milli or 1000)


# Tiresias' two thresholds, in GPU-milliseconds of attained service.
TIRESIAS_LIMITS = (3_250_000, 7_200_000)


def _remaining(job: Job, attained_ms: int) -> int:
    """What is left of the user's estimate; a job that outlived it is about to end."""
    return max(0, job.spec.estimate_ms - attained_ms)


def _service(job: Job, attained_ms: int) -> int:
    return _remaining(job, attained_ms) * gpus_of(job)


def _tiresias_queue(job: Job, attained_ms: int) -> int:
    return sum(attained_ms * gpus_of(job) >= limit for limit in TIRESIAS_LIMITS)


# A job's first turn, in GPU-milliseconds; each further one is eight times as long.
FIRST_TURN_GPU_MS = 7_200_000


def _turn(job: Job, attained_ms: int) -> int:
    """Least attained service first, in turns that grow: short jobs are through soon though
    nobody knows that they are short, and long ones are seldom interrupted. A job that may not be
    preempted has no turns: it runs once."""
    if not job.spec.preemptible:
        return 0
    turns = attained_ms * gpus_of(job) // FIRST_TURN_GPU_MS
    return (turns.bit_length() + 2) // 3


def _by(rank: Callable[[Job, int], int], *, clairvoyant: bool = False) -> Ordering:
    return Ordering(
        job=lambda job: rank(job, job.attained_ms),
        job_now=lambda job, now_ms: rank(job, ran_ms(job, now_ms)),
        clairvoyant=clairvoyant,
    )


ORDERINGS: Registry[Ordering] = Registry(
    "order",
    {
        "fifo": Ordering(),
        "fair": _by(_turn)._replace(
            tenant=lambda state, name, now_ms: state.accounts.standing(name, now_ms)
        ),
        "srtf": _by(_remaining, clairvoyant=True),
        "srsf": _by(_service, clairvoyant=True),
        "tiresias": _by(_tiresias_queue),
    },
)


def place_in_line(state: State, job: Job, now_ms: int) -> Rank:
    """Where the job stands among all."""
    ordering = ORDERINGS[state.policy.order]
    tenant = ordering.tenant(state, job.spec.tenant, now_ms)
    return (-job.spec.priority, *tenant, ordering.job(job), job.number)


class Walk:
    """From the front of the queue to its end, one lane at a time.

    Ideally every waiting job is tried in turn. Jobs of one lane are alike, so once one of them
    does not fit the others need no try: the walk costs in proportion to lanes and placements,
    not to the length of the queue. Lanes of one tenant and priority keep their order during a
    walk, so only the tenants are compared anew.
    """

    def __init__(self, state: State, now_ms: int) -> None:
        self._state = state
        self._now_ms = now_ms
        self._ordering = ORDERINGS[state.policy.order]
        self._groups: dict[tuple[int, str], list[tuple[int, int, Lane]]] = {}
        self._standings: dict[str, Rank] = {}
        for lane, line in state.queue.lanes.items():
            self._groups.setdefault((lane.priority, lane.tenant), []).append((*line[0], lane))
        for heads in self._groups.values():
            heapq.heapify(heads)
        self._front = [(self._key(group), group) for group in self._groups]
        heapq.heapify(self._front)
        self._current: tuple[int, str] | None = None

    def next(self) -> tuple[Job, Lane] | None:
        """The next job to try. A group that fell back since it was compared is put back."""
        self._put_back()
        while self._front:
            key, group = heapq.heappop(self._front)
            now = self._key(group)
            if now > key:
                heapq.heappush(self._front, (now, group))
                continue
            _, number, lane = heapq.heappop(self._groups[group])
            self._current = group
            return self._state.job_numbered(number), lane
        return None

    def again(self, lane: Lane) -> None:
        """A job of this lane was placed: the next of its kind is in turn."""
        self._standings.clear()  # what one is given changes how its whole branch stands
        line = self._state.queue.lanes.get(lane)
        if line:
            heapq.heappush(self._groups[lane.priority, lane.tenant], (*line[0], lane))

    def _put_back(self) -> None:
        if self._current is not None and self._groups[self._current]:
            heapq.heappush(self._front, (self._key(self._current), self._current))
        self._current = None

    def _key(self, group: tuple[int, str]) -> Rank:
        priority, tenant = group
        rank, number, _ = self._groups[group][0]
        standing = self._standings.get(tenant)
        if standing is None:
            standing = self._ordering.tenant(self._state, tenant, self._now_ms)
            self._standings[tenant] = standing
        return (-priority, *standing, rank, number)
