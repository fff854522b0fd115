"""The truth about arrays: each element begins once, not too many at a time, and all of them end."""

from __future__ import annotations

import math

from shoal.core.state.events.arrays import (
    ArrayCancelled,
    ArrayFinished,
    ArrayRetried,
    ArraySubmitted,
    TrialJudged,
)
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobStopping
from shoal.model.ids import array_of
from shoal.model.job import JobSpec, Outcome
from shoal.model.report import Cancel, Request, Retry
from storm.lives import Untruth
from storm.training import loss_of

MANY_STEPS = 1 << 40


class ArrayLife:
    """What the log has said of one array so far."""

    def __init__(self, spec: JobSpec) -> None:
        assert spec.sweep is not None
        self.at_most = spec.sweep.at_most
        ranges = [range(one.first, one.last + 1, one.step) for one in spec.sweep.ranges]
        self.pending = {index for one in ranges for index in one}
        self.live: set[int] = set()
        self.ended: dict[int, Outcome] = {}
        self.attempts = 0  # the most that an element that ended has had
        self.base = 0  # the same at the last retry
        self.over = False
        self.sweep = spec.sweep
        self.rungs: dict[int, dict[int, float | None]] = {}  # rung -> index -> value
        self.halted: set[int] = set()

    @property
    def missed(self) -> set[int]:
        return {index for index, how in self.ended.items() if how is not Outcome.SUCCEEDED}


class ArrayTruth:
    def __init__(self) -> None:
        self.known: dict[str, ArrayLife] = {}
        self._cancels: set[str] = set()
        self._retries: set[str] = set()

    @property
    def unfinished(self) -> list[str]:
        return [name for name, life in self.known.items() if not life.over]

    def asked(self, request: Request) -> None:
        if isinstance(request, Cancel):
            self._cancels.add(request.job)
        elif isinstance(request, Retry):
            self._retries.add(request.job)

    def cancelled(self, job: str) -> bool:
        return array_of(job) in self._cancels

    def see(self, event: Event) -> None:
        match event:
            case ArraySubmitted():
                if event.job in self.known:
                    raise Untruth(f"{event.job} was submitted twice")
                self.known[event.job] = ArrayLife(event.spec)
            case JobSubmitted() if event.spec.array:
                self._begins(event)
            case JobFinished() if array_of(event.job) in self.known:
                self._ends(event)
            case ArrayCancelled():
                if event.job not in self._cancels:
                    raise Untruth(f"nobody wanted to cancel {event.job}")
                life = self.known[event.job]
                life.ended.update(dict.fromkeys(life.pending, Outcome.CANCELLED))
                life.pending = set()
            case TrialJudged():
                self._judged(event)
            case ArrayRetried():
                self._retried(event)
            case ArrayFinished():
                self._finished(event)

    def _begins(self, event: JobSubmitted) -> None:
        life, index = self.known[event.spec.array], event.spec.index
        if index not in life.pending or event.job != f"{event.spec.array}.{index}":
            raise Untruth(f"{event.job} begins, but it was not to")
        if event.spec.env.get("SHOAL_ARRAY_INDEX") != str(index):
            raise Untruth(f"{event.job} does not find its index")
        life.pending.discard(index)
        life.live.add(index)
        if life.at_most and len(life.live) > life.at_most:
            raise Untruth(f"{event.spec.array} has more than {life.at_most} elements at a time")

    def _ends(self, event: JobFinished) -> None:
        life, index = self.known[array_of(event.job)], int(event.job.partition(".")[2])
        life.live.remove(index)
        life.ended[index] = event.outcome
        life.attempts = max(life.attempts, event.attempt)

    def _judged(self, event: TrialJudged) -> None:
        """Once at each rung, by what it reported, against those that were there before."""
        life, index = self.known[array_of(event.job)], int(event.job.partition(".")[2])
        there = life.rungs.setdefault(event.rung, {})
        if index in there or (event.rung and index not in life.rungs[event.rung - 1]):
            raise Untruth(f"{event.job} is judged twice at a rung, or has skipped one")
        if event.step < event.at_step != life.sweep.rung * life.sweep.halve**event.rung:
            raise Untruth(f"{event.job} is judged at step {event.step} for {event.at_step}")
        early, late = loss_of(event.job, MANY_STEPS), loss_of(event.job, 0)
        if (event.value is None) != math.isnan(late):
            raise Untruth(f"{event.job} is judged by {event.value}, not {late}")
        if event.value is not None and not early <= event.value <= late:
            raise Untruth(f"{event.job} is judged by {event.value}, which it never reported")
        there[index] = event.value
        order = sorted(math.inf if one is None else one for one in there.values())
        rank = 1 + order.index(math.inf if event.value is None else event.value)
        kept = len(order) // life.sweep.halve
        if (event.rank, event.count) != (rank, len(order)):
            raise Untruth(f"{event.job} is {rank} of {len(order)}, not {event.rank}")
        if event.goes_on != (not kept or rank <= kept):
            raise Untruth(f"{event.job} is {rank} of {len(order)}: goes on is {event.goes_on}")
        if not event.goes_on:
            life.halted.add(index)

    def must_be_halted(self, event: JobStopping) -> None:
        life, index = self.known[array_of(event.job)], int(event.job.partition(".")[2])
        if index not in life.halted:
            raise Untruth(f"{event.job} is stopped early, but was not judged: {event.why}")

    def _retried(self, event: ArrayRetried) -> None:
        life = self.known[event.job]
        again = life.missed if event.index is None else {event.index}
        name = event.job if event.index is None else f"{event.job}.{event.index}"
        if name not in self._retries or not again or not again <= life.missed:
            raise Untruth(f"{name} is retried, but nobody wanted that, or nothing failed")
        if life.over != (event.record is not None):
            raise Untruth(f"{event.job} comes back although it is there, or from nowhere")
        for index in again:
            del life.ended[index]
        life.pending |= again
        life.base = life.attempts
        life.over = False

    def _finished(self, event: ArrayFinished) -> None:
        life = self.known[event.job]
        if life.pending or life.live or life.over:
            raise Untruth(f"{event.job} is said to have ended, but not all of it has")
        hows = set(life.ended.values())
        order = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.CANCELLED, Outcome.SUCCEEDED)
        if event.outcome is not next(how for how in order if how in hows):
            raise Untruth(f"{event.job} ended as {event.outcome.value}, but {hows}")
        life.over = True
        for how in (Outcome.FAILED, Outcome.CANCELLED):
            count = sum(one is how for one in life.ended.values())
            if count and f"{count} {how.value}" not in event.why:
                raise Untruth(f"{event.job} says {event.why}, but {count} are {how.value}")
