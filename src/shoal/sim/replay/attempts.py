"""The jobs of a replay while they live: their work, and one attempt after another."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.scheduling.predict import Prediction
from shoal.model.job import MemberRef
from shoal.model.resources import Slice
from shoal.sim.replay.traces import Arrival


class SimJob:
    """One live job: its work, and how much of it no failure can take away any more."""

    __slots__ = (
        "amount",
        "arrival",
        "attempts",
        "done_ms",
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
