"""What happens to arrays. What happens to their elements are events of jobs."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.eventbase import JobEvent
from shoal.model.hidden import without_keys
from shoal.model.job import Job, JobSpec, Outcome
from shoal.model.phrases import sweep_text


class ArrayEvent(JobEvent, frozen=True, kw_only=True):
    """`job` is the array's id."""


class ArraySubmitted(ArrayEvent, frozen=True, kw_only=True):
    """`spec` is the template of its elements."""

    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # as for a job

    def phrase(self) -> str:
        name = f" as '{self.spec.name}'" if self.spec.name else ""
        many = sweep_text(self.spec.sweep) if self.spec.sweep is not None else ""
        return f"was submitted{name}: an array of {many}"

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=without_keys(self.spec))


class ArrayCancelled(ArrayEvent, frozen=True, kw_only=True):
    """No further element begins; those that run are stopped by events of their own."""

    why: str

    def phrase(self) -> str:
        return f"is being cancelled: {self.why}"


class ArrayRetried(ArrayEvent, frozen=True, kw_only=True):
    """Elements that ended without success are pending again: that with this index, or all of them
    (None). `record`: the array had finished and comes back as it was stored."""

    index: int | None
    why: str
    record: Job | None = None

    def phrase(self) -> str:
        return f"goes on: {self.why}{'' if self.index is None else f' (index {self.index})'}"

    def without_secrets(self) -> Self:
        if self.record is None:
            return self
        record = msgspec.structs.replace(self.record, spec=without_keys(self.record.spec))
        return msgspec.structs.replace(self, record=record)


class ArrayFinished(ArrayEvent, frozen=True, kw_only=True):
    """Its last element has ended."""

    outcome: Outcome
    code: int
    why: str

    def phrase(self) -> str:
        return f"ended, {self.outcome.value}: {self.why}"
