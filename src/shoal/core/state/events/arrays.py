"""What happens to arrays. What happens to their elements are events of jobs."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.core.state.apply_array import add_array, drop_from, parts_of
from shoal.core.state.events.base import JobEvent
from shoal.core.state.state import State
from shoal.model.array import ELEMENT_NUMBERS, Bits, Elements
from shoal.model.hidden import without_keys
from shoal.model.ids import array_of, number_of
from shoal.model.job import Job, JobSpec, Outcome, Phase
from shoal.model.phrases import ordinal, sweep_text


class ArrayEvent(JobEvent, frozen=True, kw_only=True):
    """`job` is the array's id."""


class ArraySubmitted(ArrayEvent, frozen=True, kw_only=True):
    """`spec` is the template of its elements."""

    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # as for a job

    def apply(self, state: State) -> None:
        number = number_of(self.job)
        state.next_job = max(state.next_job, number + 1)
        assert self.spec.sweep is not None, self.job
        array = Job(
            id=self.job,
            number=number * ELEMENT_NUMBERS,
            spec=self.spec,
            key=self.key,
            submitted_ms=self.at_ms,
            awaits=self.awaits,
            elements=Elements(pending=Bits.full(self.spec.sweep.count)),
        )
        add_array(state, array)

    def phrase(self) -> str:
        name = f" as '{self.spec.name}'" if self.spec.name else ""
        many = sweep_text(self.spec.sweep) if self.spec.sweep is not None else ""
        return f"was submitted{name}: an array of {many}"

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=without_keys(self.spec))


class ArrayCancelled(ArrayEvent, frozen=True, kw_only=True):
    """No further element begins; those that run are stopped by events of their own."""

    why: str

    def apply(self, state: State) -> None:
        array = state.arrays[self.job]
        _, elements = parts_of(array)
        elements.cancelled.take_in(elements.pending)
        elements.pending = Bits()
        array.why = self.why
        array.phase = Phase.STOPPING

    def phrase(self) -> str:
        return f"is being cancelled: {self.why}"


class ArrayRetried(ArrayEvent, frozen=True, kw_only=True):
    """Elements that ended without success are pending again: that with this index, or all of them
    (None). `record`: the array had finished and comes back as it was stored."""

    index: int | None
    why: str
    record: Job | None = None

    def apply(self, state: State) -> None:
        if self.record is not None:
            add_array(state, _revived(self.record))
        array = state.arrays[self.job]
        sweep, elements = parts_of(array)
        if self.index is None:
            for missed in elements.missed:
                elements.pending.take_in(missed)
            elements.failed, elements.timed_out, elements.cancelled = Bits(), Bits(), Bits()
            again = list(elements.pending)
        else:
            position = sweep.position_of(self.index)
            assert position is not None, self.index
            for missed in elements.missed:
                missed.discard(position)
            elements.pending.add(position)
            again = [position]
        for position in again if elements.halted.count else ():
            elements.halted.discard(position)
        elements.base = elements.attempts
        array.why = self.why
        if array.phase is Phase.STOPPING:
            array.phase = Phase.WAITING

    def phrase(self) -> str:
        return f"goes on: {self.why}{'' if self.index is None else f' (index {self.index})'}"

    def without_secrets(self) -> Self:
        if self.record is None:
            return self
        record = msgspec.structs.replace(self.record, spec=without_keys(self.record.spec))
        return msgspec.structs.replace(self, record=record)


class TrialJudged(JobEvent, frozen=True, kw_only=True):
    """A trial of a sweep has reached a rung, and is compared with those that were there before.
    `value` None: what it reported is not a number."""

    attempt: int
    rung: int
    at_step: int  # of the rung
    step: int  # that it was heard at
    metric: str
    value: float | None
    rank: int  # 1: the best so far
    count: int  # that have reached the rung, with this one
    goes_on: bool

    def apply(self, state: State) -> None:
        sweep, elements = parts_of(state.arrays[array_of(self.job)])
        position = sweep.position_of(state.jobs[self.job].spec.index)
        assert position is not None, self.job
        if not self.rung:
            elements.first_rung = self.at_step
        if self.rung == len(elements.rungs):
            elements.rungs = [*elements.rungs, {}]
        elements.rungs[self.rung][position] = self.value
        if not self.goes_on:
            elements.halted.add(position)

    def phrase(self) -> str:
        shown = "not a number" if self.value is None else f"{self.value:.4g}"
        place = f"{self.metric} {shown} is {ordinal(self.rank)} of {self.count}"
        return f"reached step {self.at_step}: {place}; it {'goes on' if self.goes_on else 'stops'}"


class ArrayFinished(ArrayEvent, frozen=True, kw_only=True):
    """Its last element has ended."""

    outcome: Outcome
    code: int
    why: str

    def apply(self, state: State) -> None:
        array = state.arrays.pop(self.job)
        del state.unfolded[self.job]
        state.agenda.windows.pop(self.job, None)
        state.tally.array(state.accounts, array, -1)
        state.sizes.gone(array)
        if array.key:
            del state.keys[array.key]
        for other in array.awaits:
            drop_from(state.dependents, other, array.id)
        if array.spec.workflow:
            drop_from(state.flows, array.spec.workflow, array.id)
        array.phase = Phase.FINISHED
        array.outcome, array.code, array.why = self.outcome, self.code, self.why
        array.finished_ms = self.at_ms

    def phrase(self) -> str:
        return f"ended, {self.outcome.value}: {self.why}"


def _revived(record: Job) -> Job:
    """A copy: an event does not change."""
    _, elements = parts_of(record)
    copy = msgspec.json.decode(msgspec.json.encode(elements), type=Elements)
    return msgspec.structs.replace(
        record, elements=copy, phase=Phase.WAITING, outcome=None, code=None, finished_ms=None
    )
