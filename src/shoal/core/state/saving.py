"""How much of an attempt's work survives it."""

from __future__ import annotations

from shoal.model.job import Job, StopCause


def worked_until_ms(job: Job, now_ms: int) -> int:
    """When it last worked: now, or when it was put to sleep."""
    return now_ms if job.dozed_ms is None else job.dozed_ms


def kept_ms(job: Job, cause: StopCause, at_ms: int) -> int:
    """How much of the attempt's run time is kept. A job that was asked to stop has saved its work;
    one that lost a node, or was ended in its sleep, rolls back to its last checkpoint."""
    if job.running_ms is None or (job.spec.checkpoint_ms == 0 and job.saved_ms is None):
        return 0
    ran_ms = worked_until_ms(job, at_ms) - job.running_ms
    asleep = any(member.lent or member.asleep for member in job.members)
    if asleep or cause in (StopCause.NODE_LOSS, StopCause.FAILURE, StopCause.HANG):
        ran_ms -= unsaved_ms(job, at_ms)
    return ran_ms


def unsaved_ms(job: Job, now_ms: int) -> int:
    """What a running job would lose by going back to its last checkpoint: from its beats, else from
    its stated checkpoint interval."""
    if job.running_ms is None:
        return 0
    now_ms = worked_until_ms(job, now_ms)
    if job.saved_ms is not None:
        return now_ms - job.saved_ms
    ran_ms = now_ms - job.running_ms
    return ran_ms % job.spec.checkpoint_ms if job.spec.checkpoint_ms else ran_ms
