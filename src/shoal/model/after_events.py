"""Events of jobs that wait for other jobs."""

from __future__ import annotations

from shoal.model.eventbase import JobEvent


class JobReleased(JobEvent, frozen=True, kw_only=True):
    """The job `by` has ended as this job needs it. With the last such end, it joins the queue."""

    by: str
    why: str

    def phrase(self) -> str:
        return f"no longer waits for {self.by}: {self.why}"
