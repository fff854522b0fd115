"""The jobs of a replay while they live: attempt after attempt, and what sleep saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.scheduling.predict import Prediction
from shoal.core.state.events.sleep import JobAsleep, JobAwake, JobDozing, JobTouched, JobWaking
from shoal.ledger.accounts import GPU_US_PER_GPU_HOUR as PER_GPU_HOUR
from shoal.ledger.accounts import Account
from shoal.model.job import MemberRef
from shoal.model.resources import Slice
from shoal.sim.replay.traces import Arrival

if TYPE_CHECKING:
    from shoal.sim.replay.metrics import Levels, Outcome, Summary
    from shoal.sim.replay.simulated import SimCluster


class SimJob:
    """One live job: its work, and how much of it no failure can take away any more."""

    __slots__ = (
        "amount",
        "arrival",
        "attempts",
        "done_ms",
        "failed",
        "held",
        "placed_ms",
        "predicted",
        "waiting",
        "wants",
    )

    def __init__(self, arrival: Arrival, amount: int) -> None:
        self.arrival = arrival
        self.amount = amount  # what it asks for, in thousandths of GPUs
        self.done_ms = 0
        self.attempts = 0
        self.held = 0  # by its attempts, in thousandths of GPUs times milliseconds
        self.failed = 0  # attempts that failed as they did in the log
        self.placed_ms = -1
        self.predicted: Prediction | None = None  # as a user would have read it
        self.waiting = True  # for GPUs
        self.wants = False  # it sleeps, and is to wake


class Attempt:
    """One attempt of a job: it begins when all members have started, and halts once."""

    __slots__ = (
        "beats",
        "begin_ms",
        "down",
        "doze_ms",
        "every_ms",
        "from_step",
        "halt_ms",
        "held_ms",
        "idle",
        "job",
        "late",
        "lent",
        "missing",
        "needed_ms",
        "number",
        "own_speeds",
        "placed_ms",
        "scale",
        "sim_job",
        "slices",
        "speed",
    )

    def __init__(
        self, job: str, number: int, sim_job: SimJob, slices: tuple[Slice, ...], now_ms: int
    ) -> None:
        self.job = job
        self.number = number
        self.sim_job = sim_job
        self.slices = slices
        self.missing = len(slices)  # members whose command to start has not come yet
        self.placed_ms = now_ms
        self.held_ms = now_ms  # since when it has its GPUs, without a break
        self.begin_ms = -1  # moved on by the time that it slept
        self.halt_ms = -1
        self.needed_ms = 0  # at full speed of these members
        self.every_ms = 0  # between two checkpoints; 0: nothing is ever lost
        self.scale = len(slices) / sim_job.arrival.spec.members  # an elastic gang may be smaller
        self.speed = 1.0
        self.own_speeds: list[float] = []  # by member; all wait for the slowest
        self.from_step = 0
        self.beats = -1  # sent so far; -1: it sends none
        self.idle = False
        self.down = 0  # members that sleep, or are on the way there or back
        self.doze_ms = -1  # since when that keeps it from its work
        self.lent = False  # it holds no GPU
        # What was due while it slept: how long after its beginning, and what happens then.
        self.late: list[tuple[int, Callable[[Attempt], None]]] = []

    def came_ms(self, now_ms: int) -> int:
        """How much of its work it has done, by time at full speed."""
        now_ms = now_ms if self.doze_ms < 0 else self.doze_ms
        return min(self.needed_ms, int((now_ms - self.begin_ms) * self.speed))

    def kept_ms(self, came_ms: int) -> int:
        """How much of that the newest checkpoint holds."""
        return came_ms - came_ms % self.every_ms if self.every_ms else came_ms

    def refs(self) -> list[tuple[str, MemberRef]]:
        """Its members and their nodes."""
        return [
            (slice_.node, MemberRef(self.job, self.number, number))
            for number, slice_ in enumerate(self.slices)
        ]


# What a replay counts of jobs that sleep, and what sleep saved.


class SleepUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replay, in GPU-hours. `asleep`: of GPUs that sleepers would have held if they had been
    awake. `switching`: held by jobs that fell asleep or woke."""

    naps: int = 0
    asleep_gpu_hours: float = 0.0
    switching_gpu_hours: float = 0.0
    lost_gpu_hours: float = 0.0  # work that was done and had to be done again


class Naps:
    """Follows the events of a replay, and keeps its levels right: a sleeper holds no GPU, and one
    that is to wake asks for some."""

    def __init__(
        self, cluster: SimCluster, levels: Levels, outcome: Outcome, jobs: dict[str, SimJob]
    ) -> None:
        self._cluster, self._levels, self._outcome, self._jobs = cluster, levels, outcome, jobs
        self._since_ms: dict[str, int] = {}  # by job: its newest change
        self._count, self._asleep, self._switching = 0, 0, 0
        self.handlers: dict[type, Callable[[Any], None]] = {
            JobDozing: self._dozing,
            JobAsleep: self._asleep_now,
            JobTouched: self._touched,
            JobWaking: self._waking,
            JobAwake: self._awake,
        }

    def use(self) -> SleepUse:
        return SleepUse(
            naps=self._count,
            asleep_gpu_hours=self._asleep / PER_GPU_HOUR,
            switching_gpu_hours=self._switching / PER_GPU_HOUR,
            lost_gpu_hours=self._cluster.lost / PER_GPU_HOUR,
        )

    def over(self, job_id: str) -> None:
        """Its attempt is over; it may have slept or been on the way."""
        if job_id in self._since_ms:
            attempt = self._cluster.attempts[job_id]
            if attempt.lent:
                self._asleep += self._passed(attempt)
            else:
                self._switching += self._passed(attempt)
            del self._since_ms[job_id]

    def _dozing(self, event: JobDozing) -> None:
        self._count += 1
        self._since_ms[event.job] = event.at_ms
        self._jobs[event.job].wants = event.cause.wants

    def _asleep_now(self, event: JobAsleep) -> None:
        attempt = self._cluster.attempts[event.job]
        self._switching += self._passed(attempt, event.at_ms)
        for number, slice_ in self._held(attempt):
            self._levels.held -= self._levels.amount(slice_)
            self.draw(attempt, number, event.at_ms)
        attempt.lent = True
        self._ask(self._jobs[event.job])

    def _touched(self, event: JobTouched) -> None:
        job, attempt = self._jobs[event.job], self._cluster.attempts[event.job]
        job.wants = event.wants
        if attempt.lent:
            self._ask(job)

    def _ask(self, job: SimJob) -> None:
        if job.wants != job.waiting:
            self._levels.waiting += job.amount if job.wants else -job.amount
            job.waiting = job.wants

    def _waking(self, event: JobWaking) -> None:
        attempt, job = self._cluster.attempts[event.job], self._jobs[event.job]
        self._asleep += self._passed(attempt, event.at_ms)
        attempt.lent, attempt.held_ms = False, event.at_ms
        attempt.slices = tuple(
            msgspec.structs.replace(slice_, gpus=gpus)
            for slice_, gpus in zip(attempt.slices, event.gpus, strict=True)
        )
        for _, slice_ in self._held(attempt):
            self._levels.held += self._levels.amount(slice_)
        job.wants = False
        self._ask(job)

    def _awake(self, event: JobAwake) -> None:
        self._switching += self._passed(self._cluster.attempts[event.job], event.at_ms)
        del self._since_ms[event.job]

    def _passed(self, attempt: Attempt, now_ms: int | None = None) -> int:
        """GPU-time of the attempt since its newest change."""
        now_ms = self._levels.now_ms if now_ms is None else now_ms
        since_ms = self._since_ms.get(attempt.job, now_ms)
        self._since_ms[attempt.job] = now_ms
        return (now_ms - since_ms) * sum(map(self._levels.amount, attempt.slices))

    def _held(self, attempt: Attempt) -> Iterable[tuple[int, Any]]:
        """Members that have not ended, and their slices."""
        for number, slice_ in enumerate(attempt.slices):
            if (attempt.job, attempt.number, number) in self._cluster.nodes[slice_.node].holding:
                yield number, slice_

    def draw(self, attempt: Attempt, number: int, now_ms: int) -> None:
        """The time in which the member held its GPUs, for the timeline."""
        row, slice_ = attempt.sim_job.arrival.row, attempt.slices[number]
        index = self._cluster.nodes[slice_.node].index
        self._outcome.segments.add(index, slice_, attempt.held_ms, now_ms, row)
        attempt.sim_job.held += self._levels.amount(slice_) * (now_ms - attempt.held_ms)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What sleep changed under one policy, and in plain words."""

    policy: str
    naps: int
    stops_without: int
    stops: int
    lost_gpu_hours_without: float
    lost_gpu_hours: float
    wasted_gpu_hours_without: float
    wasted_gpu_hours: float
    completion_mean_s_without: float
    completion_mean_s: float
    text: str


def wasted_gpu_hours(summary: Summary) -> float:
    """That jobs held without getting further: start-up, switching, and work that was lost."""
    start_up = sum(one.gpu_us for one in summary.accounts if one.account == Account.STARTUP)
    sleep = summary.sleep
    return start_up / PER_GPU_HOUR + sleep.switching_gpu_hours + sleep.lost_gpu_hours


def saved(policy: str, without: Summary, slept: Summary) -> Saved:
    before, after = wasted_gpu_hours(without), wasted_gpu_hours(slept)
    return Saved(
        policy=policy,
        naps=slept.sleep.naps,
        stops_without=without.preemptions,
        stops=slept.preemptions,
        lost_gpu_hours_without=without.sleep.lost_gpu_hours,
        lost_gpu_hours=slept.sleep.lost_gpu_hours,
        wasted_gpu_hours_without=before,
        wasted_gpu_hours=after,
        completion_mean_s_without=without.completion.mean_s,
        completion_mean_s=slept.completion.mean_s,
        text=_saved_text(policy, without, slept, before - after),
    )


def _saved_text(policy: str, without: Summary, slept: Summary, less: float) -> str:
    """'fair with sleep: 12 naps, and 3 stops instead of 15. Sleep saves 10.5 GPU-hours ...'"""
    if not slept.sleep.naps:
        return f"{policy} with sleep: no job had to sleep, so nothing changes"
    did = "saves" if less >= 0 else "costs"
    mean_s, was_s = slept.completion.mean_s, without.completion.mean_s
    change = 100 * (mean_s / was_s - 1) if was_s else 0.0
    how = "sooner" if change < 0 else "later"
    lost = f"{slept.sleep.lost_gpu_hours:,.1f} GPU-hours of work"
    naps = "1 nap" if slept.sleep.naps == 1 else f"{slept.sleep.naps:,} naps"
    stops = "1 stop" if slept.preemptions == 1 else f"{slept.preemptions:,} stops"
    return (
        f"{policy} with sleep: {naps}, and {stops} instead of {without.preemptions:,}. Sleep {did} "
        f"{abs(less):,.1f} GPU-hours: {lost} lost instead of "
        f"{without.sleep.lost_gpu_hours:,.1f}, and {slept.sleep.switching_gpu_hours:,.1f} for "
        f"falling asleep and waking. Jobs complete {abs(change):.1f} % {how} on average"
    )
