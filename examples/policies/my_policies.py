"""Two functions of one's own, for small_first.yaml: an order and a placement.

Both are pure: they see the state, change nothing, and give the same answer to the same question.
The lower rank or score comes first.
"""

from __future__ import annotations

from shoal.core.scheduling.order import Ordering
from shoal.core.state.room import Level
from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.resources import Kind


def gpus_asked(job: Job) -> int:
    return job.spec.gpus * job.spec.members


# Small gangs first. Priority comes before it, submission decides among equals.
small_first = Ordering(job=gpus_asked, rank=lambda _state, job, _now_ms: (gpus_asked(job),))


def spread(_state: State, _kind: Kind, before: Level, _after: Level) -> tuple[float, ...]:
    """The node with the most free GPUs, so that jobs keep out of each other's way."""
    return (-before.gpus,)
