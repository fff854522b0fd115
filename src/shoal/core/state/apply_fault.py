"""What is recorded about a member that its node could not run."""

from __future__ import annotations

from shoal.core.books.failures import Failure, failed
from shoal.core.state.state import State
from shoal.model.events import MemberLost
from shoal.model.job import Fault, Job

MISSING_CODE = 127  # as a shell reports a command that is not there


def note_fault(state: State, job: Job, event: MemberLost) -> None:
    """A missing program counts as a failure on this node: if the job runs well elsewhere, the node
    is blamed."""
    if not event.fault:
        return
    job.fault, job.faults = event.why, job.faults + 1
    if event.fault is Fault.MISSING:
        job.missing_on = (*job.missing_on, event.node)
        failed(
            state.failures,
            job.id,
            Failure(
                at_ms=event.at_ms,
                node=event.node,
                member=event.member,
                code=MISSING_CODE,
                owner=job.spec.owner,
            ),
        )
