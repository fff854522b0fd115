"""What happens to arrays. What happens to their elements are events of jobs."""

from __future__ import annotations

from shoal.model.eventbase import JobEvent
from shoal.model.job import Job, JobSpec, Outcome


class ArrayEvent(JobEvent, frozen=True, kw_only=True):
    """`job` is the array's id."""


class ArraySubmitted(ArrayEvent, frozen=True, kw_only=True):
    """`spec` is the template of its elements."""

    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # as for a job


class ArrayCancelled(ArrayEvent, frozen=True, kw_only=True):
    """No further element begins; those that run are stopped by events of their own."""

    why: str


class ArrayRetried(ArrayEvent, frozen=True, kw_only=True):
    """Elements that ended without success are pending again: that with this index, or all of them
    (None). `record`: the array had finished and comes back as it was stored."""

    index: int | None
    why: str
    record: Job | None = None


class ArrayFinished(ArrayEvent, frozen=True, kw_only=True):
    """Its last element has ended."""

    outcome: Outcome
    code: int
    why: str
