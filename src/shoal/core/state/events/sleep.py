"""What happens to jobs that sleep."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.state.apply_job import account, end_nap, not_served
from shoal.core.state.apply_queue import heed, runs_no_more, runs_on, unclaim
from shoal.core.state.apply_room import change
from shoal.core.state.events.base import JobEvent
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Member, Phase, SleepCause
from shoal.model.resources import plural


class JobDozing(JobEvent, frozen=True, kw_only=True):
    """The job is being put to sleep. `host_mb`: memory of the node that is set aside for each
    member's state, as far as it is known."""

    attempt: int
    cause: SleepCause
    host_mb: tuple[int, ...]
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        not_served(state, job)
        job.phase = Phase.DOZING
        job.sleep_cause, job.wants = self.cause, self.cause.wants
        job.dozed_ms, job.why = self.at_ms, self.why
        job.wanted_ms = self.at_ms if job.wants else None
        job.idle_since_ms = None
        job.naps += 1
        state.napping[job.id] = None
        state.heard.watches.pop(job.id, None)
        state.agenda.stoppable.drop(job.id)
        state.awake.pop(job.id, None)
        runs_no_more(state)
        for member, host_mb in zip(job.members, self.host_mb, strict=True):
            _rehold(state, job, member, host_mb=host_mb)

    def phrase(self) -> str:
        put = "put to sleep"
        return f"is being {self.why if self.why.startswith(put) else f'{put}: {self.why}'}"


class MembersAsleep(JobEvent, frozen=True, kw_only=True):
    """Some members sleep; others do not yet. `host_mb`: what each of them has moved."""

    attempt: int
    members: tuple[int, ...]
    host_mb: tuple[int, ...]

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        for number, host_mb in zip(self.members, self.host_mb, strict=True):
            _rehold(state, job, job.members[number], host_mb=host_mb, asleep=True)

    def phrase(self) -> str:
        return f"has {plural(len(self.members), 'member')} asleep"


class JobAsleep(JobEvent, frozen=True, kw_only=True):
    """Every member sleeps: the job holds no GPU. `took_ms`: of the slowest member."""

    attempt: int
    took_ms: int
    memory_mb: int  # the most that one of them has moved
    why: str

    def apply(self, state: State) -> None:
        """It holds nothing but memory."""
        job = state.jobs[self.job]
        job.phase = Phase.ASLEEP
        job.sleep_mb, job.why = self.memory_mb, self.why
        if job.dozed_ms is not None:  # its GPUs were of no use for as long as this
            job.sleep_cost_ms = max(self.took_ms, self.at_ms - job.dozed_ms)
        account(state, job, -_living(job), self.at_ms)
        for member in job.members:
            _rehold(state, job, member, lent=True)
        heed(state, job)
        for member in job.members:
            node = state.nodes[member.slice.node]
            node.sleep_mb_s = _rate(self.memory_mb, self.took_ms) or node.sleep_mb_s

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

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.phase = Phase.WAKING
        job.refused, job.why = self.why, self.why
        job.awake_ms = self.at_ms
        for member in job.members:
            member.asleep = not member.over

    def phrase(self) -> str:
        return f"goes on: {self.why}"


class JobTouched(JobEvent, frozen=True, kw_only=True):
    """Somebody needs the sleeper: it is woken as soon as there is room. Without `wants`, it stays
    asleep until somebody does."""

    attempt: int
    why: str
    wants: bool = True

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.wants, job.why = self.wants, self.why
        job.wanted_ms = self.at_ms if self.wants else None
        heed(state, job)
        if not self.wants and job.id in state.claims:
            unclaim(state, job)

    def phrase(self) -> str:
        return self.why if self.wants else f"stays asleep: {self.why}"


class JobWaking(JobEvent, frozen=True, kw_only=True):
    """The sleeper holds GPUs again, perhaps others of its nodes: member i gets the GPUs of i."""

    attempt: int
    gpus: tuple[tuple[int, ...], ...]
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        if job.id in state.claims:
            for slice_ in state.claims.pop(job.id):
                change(state, slice_, +1, exclusive=job.spec.whole_nodes)
        job.phase = Phase.WAKING
        job.wants, job.why = False, self.why
        job.awake_ms = self.at_ms
        heed(state, job)
        state.agenda.other_gaps()  # its nodes may have been kept for it
        for member, gpus in zip(job.members, self.gpus, strict=True):
            slice_ = msgspec.structs.replace(member.slice, gpus=gpus)
            _rehold(state, job, member, slice=slice_, lent=False)
        account(state, job, _living(job), self.at_ms)
        job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)

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

    def apply(self, state: State) -> None:
        """It has lent its GPUs again, and is still to wake."""
        job = state.jobs[self.job]
        job.phase = Phase.ASLEEP
        job.wants, job.why, job.full_ms = True, self.why, self.again_ms
        job.wanted_ms = self.at_ms if job.wanted_ms is None else job.wanted_ms
        account(state, job, -_living(job), self.at_ms)
        for member in job.members:
            _rehold(state, job, member, lent=True)
        heed(state, job)
        state.agenda.attention[job.id] = None  # its node may be draining by now

    def phrase(self) -> str:
        return self.why


class MembersAwake(JobEvent, frozen=True, kw_only=True):
    attempt: int
    members: tuple[int, ...]

    def apply(self, state: State) -> None:
        for number in self.members:
            state.jobs[self.job].members[number].asleep = False

    def phrase(self) -> str:
        return f"has {plural(len(self.members), 'member')} awake"


class JobAwake(JobEvent, frozen=True, kw_only=True):
    """Every member is awake: the job goes on where it stopped. `took_ms`: of the slowest."""

    attempt: int
    took_ms: int
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.phase = Phase.RUNNING
        if job.awake_ms is not None and not job.refused:
            job.wake_cost_ms = max(self.took_ms, self.at_ms - job.awake_ms)
        job.awake_ms, job.why = self.at_ms, self.why
        for member in job.members:
            node = state.nodes[member.slice.node]
            node.wake_mb_s = _rate(job.sleep_mb, self.took_ms) or node.wake_mb_s
            _rehold(state, job, member, host_mb=0, asleep=False)
        end_nap(state, job, self.at_ms)
        runs_on(state, job)
        state.agenda.attention[job.id] = None  # its node may be draining by now
        state.agenda.look_ms = 0  # it may be stopped for those in front again

    def phrase(self) -> str:
        took = f" (waking took {duration_text(self.took_ms)})" if self.took_ms else ""
        return f"{self.why}{took}"


def _living(job: Job) -> int:
    return sum(not member.over for member in job.members)


def _rate(memory_mb: int, took_ms: int) -> int:
    return memory_mb * 1000 // took_ms if memory_mb >= 1000 and took_ms else 0


def _rehold(state: State, job: Job, member: Member, **fields: Any) -> None:
    """Set these fields of the member; what it holds of its node changes with them."""
    if member.over:
        return
    before, lent, whole = member.held, member.lent, job.spec.whole_nodes
    for name, value in fields.items():
        setattr(member, name, value)
    if (member.held, member.lent) == (before, lent):
        return
    change(state, before, +1, exclusive=whole and not lent, asleep=lent)
    change(state, member.held, -1, exclusive=whole and not member.lent, asleep=member.lent)
