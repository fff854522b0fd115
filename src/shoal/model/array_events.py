"""What happens to arrays. What happens to their elements are events of jobs."""

from __future__ import annotations

from shoal.model.eventbase import JobEvent
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


class ArrayFinished(ArrayEvent, frozen=True, kw_only=True):
    """Its last element has ended."""

    outcome: Outcome
    code: int
    why: str

    def phrase(self) -> str:
        return f"ended, {self.outcome.value}: {self.why}"
