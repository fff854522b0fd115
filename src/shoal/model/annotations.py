"""Labels and notes of a job: how events change its record, whether it lives or has ended."""

from __future__ import annotations

import msgspec

from shoal.model.job import NOTES_MAX, Job, JobSpec, Note
from shoal.model.notice_events import JobLabelled, JobNoted

Annotation = JobLabelled | JobNoted


def spec_after(spec: JobSpec, event: JobLabelled) -> JobSpec:
    return msgspec.structs.replace(spec, labels=event.labels)


def notes_after(notes: tuple[Note, ...], event: JobNoted) -> tuple[Note, ...]:
    """The oldest notes make room for new ones; the log still has them."""
    return (*notes, Note(event.at_ms, event.who, event.text))[-NOTES_MAX:] if event.text else ()


def job_after(job: Job, event: Annotation) -> Job:
    """The record of a job that has ended."""
    if isinstance(event, JobLabelled):
        return msgspec.structs.replace(job, spec=spec_after(job.spec, event))
    return msgspec.structs.replace(job, notes=notes_after(job.notes, event))
