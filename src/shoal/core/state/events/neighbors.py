"""What happens to jobs that neighbors run: they go, they are heard of, they come back."""

from __future__ import annotations

import msgspec

from shoal.core.state.apply_queue import join_queue, leave_waiting
from shoal.core.state.events.base import JobEvent
from shoal.core.state.state import State
from shoal.model.away import STRAYS_MAX, Away, Stray
from shoal.model.job import Job, Phase
from shoal.model.phrases import because

HOUR_MS = 3_600_000


class JobHanded(JobEvent, frozen=True, kw_only=True):
    """The neighbor may have it from now on, so it is not started here before that has ended.
    `start_ms`, `price`: as offered. `until_there_ms`, `until_here_ms`: its lease, if it has one."""

    attempt: int
    neighbor: str
    why: str
    start_ms: int = 0
    price: int | None = None
    until_there_ms: int = 0
    until_here_ms: int = 0

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        leave_waiting(state, job)
        job.phase = Phase.AWAY
        job.attempt = self.attempt
        job.members = []
        job.master = job.door = job.said = job.fault = job.refused = ""
        job.placed_ms = self.at_ms
        job.running_ms = job.saved_ms = job.awake_ms = job.idle_since_ms = None
        job.stop_cause = job.first_bad_code = job.startup = None
        job.not_before_ms = 0
        job.why = self.why
        job.away = Away(
            neighbor=self.neighbor,
            since_ms=self.at_ms,
            start_ms=self.start_ms,
            price=self.price,
            until_there_ms=self.until_there_ms,
            until_here_ms=self.until_here_ms,
        )
        state.away[job.id] = None

    def phrase(self) -> str:
        return f"was handed over to {self.neighbor}{because(self.why)}"


class AwayEvent(JobEvent, frozen=True, kw_only=True):
    """Something about a job that is away."""

    attempt: int
    neighbor: str
    why: str = ""

    def change(self, state: State, **fields: object) -> None:
        job, away = away_of(state, self.job)
        job.away = msgspec.structs.replace(away, **fields)
        job.why = self.why or job.why


class JobTaken(AwayEvent, frozen=True, kw_only=True):
    """The neighbor has stored it. `id`: its name there."""

    id: str

    def apply(self, state: State) -> None:
        self.change(state, id=self.id, taken_ms=self.at_ms)

    def phrase(self) -> str:
        return f"was taken by {self.neighbor}, as {self.id} there"


class JobRunsAway(AwayEvent, frozen=True, kw_only=True):
    """It has begun there."""

    def apply(self, state: State) -> None:
        self.change(state, running_ms=self.at_ms)

    def phrase(self) -> str:
        return f"is running at {self.neighbor}"


class JobLeaseAsked(AwayEvent, frozen=True, kw_only=True):
    """The neighbor may run it for longer: until this moment by its clock, which is over for certain
    at the other by ours."""

    until_there_ms: int
    until_here_ms: int

    def apply(self, state: State) -> None:
        self.change(state, until_there_ms=self.until_there_ms, until_here_ms=self.until_here_ms)

    def phrase(self) -> str:
        return f"may run on at {self.neighbor}"


class JobWithdrawn(AwayEvent, frozen=True, kw_only=True):
    """It is to come back: the neighbor will be told to end it until it has said that it has.
    `cancelled`: it is not wanted any more."""

    cancelled: bool = False

    def apply(self, state: State) -> None:
        _, away = away_of(state, self.job)
        self.change(state, withdrawn=self.why, cancelled=away.cancelled or self.cancelled)

    def phrase(self) -> str:
        what = "is being cancelled at" if self.cancelled else "is being taken back from"
        return f"{what} {self.neighbor}{because(self.why)}"


class JobReturned(AwayEvent, frozen=True, kw_only=True):
    """The neighbor will never run it (again), and it has not ended: it waits here. What it used
    there, in GPU-ms and millionths of the currency, is owed all the same."""

    away_after_ms: int
    gpu_ms: int = 0
    money: int = 0

    def apply(self, state: State) -> None:
        job, _ = away_of(state, self.job)
        job.away = None
        del state.away[job.id]
        job.phase = Phase.WAITING
        state.tally.wait(state.accounts, job, 1)
        job.returns += 1
        job.away_after_ms = self.away_after_ms
        job.requeued_ms, job.waited_ms = self.at_ms, 0
        job.placed_ms = None
        job.why = self.why
        join_queue(state, job)

    def phrase(self) -> str:
        return f"came back from {self.neighbor}{because(self.why)}"


class JobGivenUp(AwayEvent, frozen=True, kw_only=True):
    """Nobody waits for the end of this hand-over any more. The neighbor may have it still: it is
    to end it, and what it used is owed."""

    def apply(self, state: State) -> None:
        job, away = away_of(state, self.job)
        gpus = job.spec.gpus * max(job.spec.members, job.spec.members_max)
        state.strays[f"{self.job}/{self.attempt}"] = Stray(
            neighbor=self.neighbor,
            job=self.job,
            attempt=self.attempt,
            since_ms=away.since_ms,
            gpus=gpus,
            tenant=job.spec.tenant,
            price=away.price,
        )
        if len(state.strays) > STRAYS_MAX:
            del state.strays[next(iter(state.strays))]

    def phrase(self) -> str:
        return f"was given up at {self.neighbor}{because(self.why)}"


class JobSettled(AwayEvent, frozen=True, kw_only=True):
    """The neighbor's record of it has ended, and with it, the job: its end follows in this step.
    Or that of an earlier hand-over, which was given up; the job may have ended long ago."""

    gpu_ms: int = 0
    money: int = 0
    tenant: str = ""  # of an earlier hand-over

    def apply(self, state: State) -> None:
        if state.strays.pop(f"{self.job}/{self.attempt}", None) is None:
            self.change(state)

    def phrase(self) -> str:
        hours = f" after {self.gpu_ms / HOUR_MS:.2f} GPU-hours" if self.gpu_ms else ""
        return f"has ended at {self.neighbor}{hours}"


def away_of(state: State, job_id: str) -> tuple[Job, Away]:
    job = state.jobs[job_id]
    assert job.away is not None, f"{job_id} is not away"
    return job, job.away
