"""What happens to jobs that sleep."""

from __future__ import annotations

from shoal.model.durations import duration_text
from shoal.model.eventbase import JobEvent
from shoal.model.job import SleepCause
from shoal.model.resources import plural


class JobDozing(JobEvent, frozen=True, kw_only=True):
    """The job is being put to sleep. `host_mb`: memory of the node that is set aside for each
    member's state, as far as it is known."""

    attempt: int
    cause: SleepCause
    host_mb: tuple[int, ...]
    why: str

    def phrase(self) -> str:
        put = "put to sleep"
        return f"is being {self.why if self.why.startswith(put) else f'{put}: {self.why}'}"


class MembersAsleep(JobEvent, frozen=True, kw_only=True):
    """Some members sleep; others do not yet. `host_mb`: what each of them has moved."""

    attempt: int
    members: tuple[int, ...]
    host_mb: tuple[int, ...]

    def phrase(self) -> str:
        return f"has {plural(len(self.members), 'member')} asleep"


class JobAsleep(JobEvent, frozen=True, kw_only=True):
    """Every member sleeps: the job holds no GPU. `took_ms`: of the slowest member."""

    attempt: int
    took_ms: int
    memory_mb: int  # the most that one of them has moved
    why: str

    def phrase(self) -> str:
        took = f", after {duration_text(self.took_ms)}" if self.took_ms else ""
        moved = f", {self.memory_mb} MB of GPU memory per member" if self.memory_mb else ""
        return f"is asleep and holds no GPU{took}{moved}"


class SleepRefused(JobEvent, frozen=True, kw_only=True):
    """A member could not be put to sleep, so all are woken; the job holds its GPUs as before."""

    attempt: int
    member: int
    node: str
    why: str

    def phrase(self) -> str:
        return f"goes on: {self.why}"


class JobTouched(JobEvent, frozen=True, kw_only=True):
    """Somebody needs the sleeper: it is woken as soon as there is room. Without `wants`, it stays
    asleep until somebody does."""

    attempt: int
    why: str
    wants: bool = True

    def phrase(self) -> str:
        return self.why if self.wants else f"stays asleep: {self.why}"


class JobWaking(JobEvent, frozen=True, kw_only=True):
    """The sleeper holds GPUs again, perhaps others of its nodes: member i gets the GPUs of i."""

    attempt: int
    gpus: tuple[tuple[int, ...], ...]
    why: str

    def phrase(self) -> str:
        return self.why


class WakeRefused(JobEvent, frozen=True, kw_only=True):
    """Its GPU has no room for what it had there, so it sleeps as before and holds no GPU. It is
    tried again at `again_ms`."""

    attempt: int
    member: int
    node: str
    again_ms: int
    why: str

    def phrase(self) -> str:
        return self.why


class MembersAwake(JobEvent, frozen=True, kw_only=True):
    attempt: int
    members: tuple[int, ...]

    def phrase(self) -> str:
        return f"has {plural(len(self.members), 'member')} awake"


class JobAwake(JobEvent, frozen=True, kw_only=True):
    """Every member is awake: the job goes on where it stopped. `took_ms`: of the slowest."""

    attempt: int
    took_ms: int
    why: str

    def phrase(self) -> str:
        took = f" (waking took {duration_text(self.took_ms)})" if self.took_ms else ""
        return f"{self.why}{took}"
