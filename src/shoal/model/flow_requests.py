"""Requests about workflows and schedules."""

from __future__ import annotations

import msgspec

from shoal.model.identity import EVERY_TENANT
from shoal.model.schedule import ScheduleSpec
from shoal.model.workflow import WorkflowJob


class SubmitWorkflow(msgspec.Struct, frozen=True):
    """All of these jobs, or none; the answer's id is the first job's, and the workflow's."""

    jobs: tuple[WorkflowJob, ...]
    key: str = ""
    scope: str = EVERY_TENANT


class CancelWorkflow(msgspec.Struct, frozen=True):
    """Cancel those of its jobs that have not ended."""

    workflow: str
    who: str = "a user"


class SetSchedule(msgspec.Struct, frozen=True):
    """Add or change it. `next_ms` is its first due time from now on."""

    spec: ScheduleSpec
    next_ms: int
    owner: str = ""
    who: str = "a user"
    scope: str = EVERY_TENANT


class PauseSchedule(msgspec.Struct, frozen=True):
    """`next_ms` 0 pauses it; otherwise it goes on, and is due then."""

    schedule: str
    next_ms: int = 0
    who: str = "a user"
    scope: str = EVERY_TENANT


class RunSchedule(msgspec.Struct, frozen=True):
    """One run now, once for each key; the answer's id is its job."""

    schedule: str
    key: str = ""
    who: str = "a user"
    scope: str = EVERY_TENANT


class RemoveSchedule(msgspec.Struct, frozen=True):
    schedule: str
    who: str = "a user"
    scope: str = EVERY_TENANT


ScheduleRequest = SetSchedule | PauseSchedule | RunSchedule | RemoveSchedule
