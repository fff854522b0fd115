"""Schedules: jobs that are submitted at certain times, again and again."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.workflow import WORKFLOW_JOBS_MAX, WorkflowJob

SCHEDULES_MAX = 1_000  # of one tenant
NEXT_SHOWN = 5
COUNTED_MAX = 1_000  # due times that were missed and are counted one by one


class Overlap(enum.StrEnum):
    """What to do when a run is due while the last one has not ended."""

    SKIP = "skip"
    ALLOW = "allow"


class Missed(enum.StrEnum):
    """What to do about times that passed while no controller ran."""

    RUN = "run"  # one run for all of them
    SKIP = "skip"


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job, or the jobs of a workflow. Times are in UTC without a `timezone`."""

    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
    cron: Annotated[str, msgspec.Meta(max_length=200)]
    timezone: Annotated[str, msgspec.Meta(max_length=64)] = ""
    overlap: Overlap = Overlap.SKIP
    missed: Missed = Missed.RUN
    jobs: Annotated[
        tuple[WorkflowJob, ...], msgspec.Meta(min_length=1, max_length=WORKFLOW_JOBS_MAX)
    ]
    workflow: bool = False  # the jobs came from a workflow file, even if there is only one

    @property
    def tenant(self) -> str:
        return self.jobs[0].spec.tenant

    @property
    def user(self) -> str:
        return self.jobs[0].spec.user

    @property
    def key(self) -> str:
        """Names are each tenant's own."""
        return f"{self.tenant}/{self.name}"


class Schedule(msgspec.Struct, kw_only=True):
    """Only `apply` changes it. `next_ms` 0: it is paused, and `paused` says why."""

    spec: ScheduleSpec
    since_ms: int
    next_ms: int
    owner: str = ""  # the user whose token set it; empty: the operator
    paused: str = ""
    runs: int = 0
    missed: int = 0  # due times without a run, because no controller ran then
    skipped: int = 0  # due times without a run for another reason
    last_ms: int = 0  # the newest due time that had a run
    last_job: str = ""
    note: str = ""  # the newest thing that went otherwise than planned


class Due(msgspec.Struct, frozen=True):
    """A schedule whose time has come, worked out outside of the pure core because it needs time
    zones: its due times from `first_ms` on, the one before the newest, the newest, the next."""

    schedule: str
    count: int
    first_ms: int
    before_ms: int
    newest_ms: int
    next_ms: int


class ScheduleView(msgspec.Struct, kw_only=True):
    name: str
    tenant: str
    user: str
    cron: str
    timezone: str
    overlap: str
    missed_rule: str
    state: str  # active or paused
    why: str
    next_ms: list[int]
    runs: int
    missed: int
    skipped: int
    last_ms: int
    last_job: str
    last_state: str
    command: str
    spec: ScheduleSpec
