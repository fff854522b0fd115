"""The part of the client that submits workflows and sets schedules."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from shoal.model.schedule import ScheduleSpec, ScheduleView
from shoal.model.views import Done
from shoal.model.workflow import WorkflowJob, WorkflowSubmission, WorkflowView

Answer = TypeVar("Answer")


class Calls(Protocol):
    """What these calls need of the client."""

    def _call(
        self,
        method: str,
        kind: type[Answer],
        *parts: str,
        body: bytes | None = None,
        **query: Any,
    ) -> Answer: ...


class FlowCalls:
    """`tenant`: an admin may name any; without one it is the sender's own."""

    def submit_workflow(self: Calls, jobs: Sequence[WorkflowJob], key: str = "") -> WorkflowView:
        """All of the jobs or none. The same key again returns the same workflow."""
        wanted = WorkflowSubmission(jobs=tuple(jobs), key=key or secrets.token_hex(16))
        return self._call("POST", WorkflowView, "workflows", body=msgspec.json.encode(wanted))

    def workflow(self: Calls, workflow: str) -> WorkflowView:
        return self._call("GET", WorkflowView, "workflows", workflow)

    def cancel_workflow(self: Calls, workflow: str) -> Done:
        """Cancels those of its jobs that have not ended."""
        return self._call("POST", Done, "workflows", workflow, "cancel")

    def set_schedule(self: Calls, spec: ScheduleSpec) -> ScheduleView:
        """Adds the schedule, or changes it."""
        body = msgspec.json.encode(spec)
        return self._call("PUT", ScheduleView, "schedules", spec.name, body=body)

    def schedules(self: Calls) -> list[ScheduleView]:
        return self._call("GET", list[ScheduleView], "schedules")

    def schedule(self: Calls, name: str, *, tenant: str = "") -> ScheduleView:
        return self._call("GET", ScheduleView, "schedules", name, tenant=tenant)

    def pause_schedule(self: Calls, name: str, *, tenant: str = "") -> Done:
        return self._call("POST", Done, "schedules", name, "pause", tenant=tenant)

    def resume_schedule(self: Calls, name: str, *, tenant: str = "") -> Done:
        return self._call("POST", Done, "schedules", name, "resume", tenant=tenant)

    def run_schedule(self: Calls, name: str, key: str = "", *, tenant: str = "") -> Done:
        """One run now; the answer's id is its job. The same key again returns the same run."""
        once = key or secrets.token_hex(16)
        return self._call("POST", Done, "schedules", name, "run", tenant=tenant, key=once)

    def remove_schedule(self: Calls, name: str, *, tenant: str = "") -> Done:
        return self._call("DELETE", Done, "schedules", name, tenant=tenant)
