"""What happens to jobs that sleep."""

from __future__ import annotations

from shoal.model.eventbase import JobEvent
from shoal.model.job import SleepCause


class JobDozing(JobEvent, frozen=True, kw_only=True):
    """The job is being put to sleep. `host_mb`: memory of the node that is set aside for each
    member's state, as far as it is known."""

    attempt: int
    cause: SleepCause
    host_mb: tuple[int, ...]
    why: str


class MembersAsleep(JobEvent, frozen=True, kw_only=True):
    """Some members sleep; others do not yet. `host_mb`: what each of them has moved."""

    attempt: int
    members: tuple[int, ...]
    host_mb: tuple[int, ...]


class JobAsleep(JobEvent, frozen=True, kw_only=True):
    """Every member sleeps: the job holds no GPU. `took_ms`: of the slowest member."""

    attempt: int
    took_ms: int
    memory_mb: int  # the most that one of them has moved
    why: str


class SleepRefused(JobEvent, frozen=True, kw_only=True):
    """A member could not be put to sleep, so all are woken; the job holds its GPUs as before."""

    attempt: int
    member: int
    node: str
    why: str


class JobTouched(JobEvent, frozen=True, kw_only=True):
    """Somebody needs the sleeper: it is woken as soon as there is room. Without `wants`, it stays
    asleep until somebody does."""

    attempt: int
    why: str
    wants: bool = True


class JobWaking(JobEvent, frozen=True, kw_only=True):
    """The sleeper holds GPUs again, perhaps others of its nodes: member i gets the GPUs of i."""

    attempt: int
    gpus: tuple[tuple[int, ...], ...]
    why: str


class WakeRefused(JobEvent, frozen=True, kw_only=True):
    """Its GPU has no room for what it had there, so it sleeps as before and holds no GPU. It is
    tried again at `again_ms`."""

    attempt: int
    member: int
    node: str
    again_ms: int
    why: str


class MembersAwake(JobEvent, frozen=True, kw_only=True):
    attempt: int
    members: tuple[int, ...]


class JobAwake(JobEvent, frozen=True, kw_only=True):
    """Every member is awake: the job goes on where it stopped. `took_ms`: of the slowest."""

    attempt: int
    took_ms: int
    why: str
