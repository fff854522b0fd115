"""Which blocked jobs hold the queue."""

from __future__ import annotations

from shoal.core.scheduling.again import kept_when_empty
from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.scheduling.order import takes_turns
from shoal.core.state.queue import gang_of
from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.policy import Policy


def holds_queue(state: State, job: Job, policy: Policy, now_ms: int) -> bool:
    """Is this job blocked at the front of the queue, or late on its promised start, for longer than
    the policy's patience, so that no job may overtake it? Only if the open nodes could hold it: a
    job that waits for a node to return holds up no other, nor does one that has a claim, or stands
    behind another of its lane."""
    held = state.reservations.get(job.id)
    if held is None or not state.queue.leads(job):
        return False
    if state.ordering.elders and takes_turns(job) and not job.elder:
        return False  # its turn will come
    if policy.patience_ms and now_ms - held.promised_ms < policy.patience_ms:
        return False  # without patience no job overtakes, not even into a gap
    return could_ever(state, job, now_ms)


def could_ever(state: State, job: Job, now_ms: int) -> bool:
    """Would the gang fit on the open nodes if they were empty, except those kept from it?"""
    gang = gang_of(job)
    avoid = kept_when_empty(state, job, now_ms)
    return held_when_empty(state, gang, open_only=True, avoid=avoid) >= gang.members
