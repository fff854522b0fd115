"""The order in which jobs are tried: the policies' orders, and a walk over the queue by one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import cast

from shoal.core.state.estimates import Key, octave
from shoal.core.state.expect import ran_ms
from shoal.core.state.queue import Kin, Lane
from shoal.core.state.state import Ordering as Ordering  # where users import it from
from shoal.core.state.state import Rank, State
from shoal.model.job import Job, Phase

FIFO = Ordering()
Branch = tuple[int, bool, str]  # priority, elder, tenant


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


def _tiresias_changes_ms(job: Job, now_ms: int) -> int | None:
    attained_ms, gpus = ran_ms(job, now_ms), gpus_of(job)
    left = [limit - attained_ms * gpus for limit in TIRESIAS_LIMITS if limit > attained_ms * gpus]
    return now_ms + -(-left[0] // gpus) if left else None


# A running job counts as this many octaves better than it is: it gives way only to a job that seems
# at least four times as near its end, to the octave. Every preemption costs a restart.
HOLD_OCTAVES = 2


# The rank of jobs that take no turns: among those that seem two GPU-hours from their end.
NO_TURNS_OCTAVES = (7_200_000).bit_length()


def takes_turns(job: Job) -> bool:
    """May it be stopped for others and go on later? If not, it runs once, in order of
    submission."""
    return job.spec.yields and bool(job.spec.checkpoint_ms)


def _fair_kin(state: State, job: Job) -> Kin:
    if not takes_turns(job):
        return ()
    return (*state.estimates.key_for(job), octave(job.attained_ms))


def _fair_rank(state: State, job: Job, now_ms: int) -> Rank:
    """Among jobs that take turns, the least remaining service as learned first, in octaves. A
    user's figure counts only as an upper bound, so understating it gains nothing."""
    if not takes_turns(job):
        return (NO_TURNS_OCTAVES, 0)
    attained_ms = ran_ms(job, now_ms)
    lane = state.queue.lane.get(job.number)  # jobs of one lane share its group
    key = cast("Key", lane.kin[:-1]) if lane is not None else state.estimates.key_for(job)
    left_ms = state.estimates.remaining_ms(key, attained_ms)
    if job.spec.time_limit_ms:
        left_ms = min(left_ms, max(1, job.spec.time_limit_ms - attained_ms))
    octaves = (left_ms * gpus_of(job)).bit_length()
    running = job.phase is Phase.RUNNING
    return (octaves - HOLD_OCTAVES * running, not running)


def _fair_changes_ms(job: Job, now_ms: int) -> int | None:
    attained_ms = ran_ms(job, now_ms)
    return now_ms + (4096 << octave(attained_ms)) - attained_ms


def _by(
    rank: Callable[[Job, int], int],
    changes_ms: Callable[[Job, int], int | None] = FIFO.changes_ms,
    *,
    clairvoyant: bool = False,
) -> Ordering:
    return Ordering(
        job=lambda job: rank(job, job.attained_ms),
        rank=lambda _state, job, now_ms: (rank(job, ran_ms(job, now_ms)),),
        changes_ms=changes_ms,
        clairvoyant=clairvoyant,
    )


ORDERS = {
    "fifo": FIFO,
    "fair": Ordering(
        rank=_fair_rank,
        kin=_fair_kin,
        changes_ms=_fair_changes_ms,
        tenant=lambda state, name, now_ms: state.accounts.standing(name, now_ms),
        elders=True,
    ),
    "srtf": _by(_remaining, clairvoyant=True),
    "srsf": _by(_service, clairvoyant=True),
    "tiresias": _by(_tiresias_queue, _tiresias_changes_ms),
}


def place_in_line(state: State, job: Job, now_ms: int) -> Rank:
    """The job's place among all jobs."""
    ordering = state.ordering
    tenant = ordering.tenant(state, job.spec.tenant, now_ms)
    rank = ordering.rank(state, job, now_ms)
    return (-job.spec.priority, not job.elder, *tenant, *rank, ordering.job(job), job.number)


class Walk:
    """From the front of the queue to its end, one lane at a time.

    Ideally every waiting job is tried in turn. Jobs of one lane are alike, so if one of them does
    not fit, the others are not tried: the walk costs in proportion to lanes and placements, not to
    the length of the queue. Lanes of one tenant and priority keep their order during a walk, so
    only the tenants are compared again.
    """

    def __init__(self, state: State, now_ms: int, lanes: Iterable[Lane]) -> None:
        self._state = state
        self._now_ms = now_ms
        self._ordering = state.ordering
        self._groups: dict[Branch, list[tuple[Rank, int, int, Lane]]] = {}
        self._standings: dict[str, Rank] = {}
        for lane in lanes:
            branch = (lane.priority, lane.elder, lane.tenant)
            self._groups.setdefault(branch, []).append(self._head(lane))
        for heads in self._groups.values():
            heapq.heapify(heads)
        self._front = [(self._key(group), group) for group in self._groups]
        heapq.heapify(self._front)
        self._current: Branch | None = None

    def next(self) -> tuple[Rank, Job, Lane] | None:
        """The next job to try, with its place. A group that fell back since then is put back."""
        self._put_back()
        while self._front:
            key, group = heapq.heappop(self._front)
            now = self._key(group)
            if now > key:
                heapq.heappush(self._front, (now, group))
                continue
            _, _, number, lane = heapq.heappop(self._groups[group])
            self._current = group
            return key, self._state.job_numbered(number), lane
        return None

    def again(self, lane: Lane) -> None:
        """A job of this lane was placed: the next of the lane may be tried."""
        self._standings.clear()  # a placement changes the standing of the tenant's whole branch
        if lane in self._state.queue.lanes:
            branch = (lane.priority, lane.elder, lane.tenant)
            heapq.heappush(self._groups[branch], self._head(lane))

    def _head(self, lane: Lane) -> tuple[Rank, int, int, Lane]:
        inner, number = self._state.queue.lanes[lane][0]
        job = self._state.job_numbered(number)
        return (self._ordering.rank(self._state, job, self._now_ms), inner, number, lane)

    def _put_back(self) -> None:
        if self._current is not None and self._groups[self._current]:
            heapq.heappush(self._front, (self._key(self._current), self._current))
        self._current = None

    def _key(self, group: Branch) -> Rank:
        priority, elder, tenant = group
        rank, inner, number, _ = self._groups[group][0]
        standing = self._standings.get(tenant)
        if standing is None:
            standing = self._ordering.tenant(self._state, tenant, self._now_ms)
            self._standings[tenant] = standing
        return (-priority, not elder, *standing, *rank, inner, number)
