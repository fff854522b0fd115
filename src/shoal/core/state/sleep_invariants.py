"""The invariants of jobs that sleep, in code that shares nothing with the code it verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.model.events import Event, JobDozing, PolicyChanged
from shoal.model.job import Job, Member, MemberStatus, Phase

if TYPE_CHECKING:
    from shoal.core.state.state import State

OVER = (MemberStatus.EXITED, MemberStatus.LOST)
NAPPING = (Phase.DOZING, Phase.ASLEEP, Phase.WAKING)


def sleeper_problem(job: Job) -> str:
    """What is wrong with one job's sleep; empty if nothing is."""
    napping = job.phase in NAPPING
    if napping != (job.dozed_ms is not None):
        return f"is {job.phase.value}, but the time since when it sleeps is {job.dozed_ms}"
    if napping != (job.sleep_cause is not None):
        return f"is {job.phase.value}, but the cause of its sleep is {job.sleep_cause}"
    if job.wants and (not napping or job.wanted_ms is None):
        return f"is {job.phase.value} and is to wake, but since when?"
    living = [member for member in job.members if member.status not in OVER]
    if job.phase in (Phase.STARTING, Phase.RUNNING) and any(
        member.lent or member.asleep or member.host_mb for member in living
    ):
        return f"is {job.phase.value}, but a member of it sleeps"
    if job.phase is Phase.DOZING and living and all(member.asleep for member in living):
        return "is dozing, but all of it sleeps"
    if job.phase is Phase.WAKING and living and not any(member.asleep for member in living):
        return "is waking, but none of it sleeps"
    return ""


def member_problem(job: Job, member: Member) -> str:
    """What is wrong with a member that lives; empty if nothing is."""
    if member.lent and job.phase not in (Phase.ASLEEP, Phase.STOPPING):
        return f"is {job.phase.value} without its GPUs"
    if job.phase is Phase.ASLEEP and not (member.lent and member.asleep):
        return "was not seen asleep, or holds GPUs in its sleep"
    return ""


def doze_problem(state: State, events: Iterable[Event]) -> str:
    """When a job is put to sleep, its nodes stay within the policy's bounds on sleepers. Later the
    policy may have changed, and members may take more or less than was expected."""
    nodes: dict[str, None] = {}
    for event in events:
        if isinstance(event, PolicyChanged):
            nodes = {}  # also in the same step
        elif isinstance(event, JobDozing):
            job = state.jobs.get(event.job)
            if job is not None and job.phase is Phase.DOZING:
                nodes.update(dict.fromkeys(member.slice.node for member in job.members))
    for node_id in nodes:
        here = [
            job.members[ref.member]
            for ref, job in state.placed[node_id].items()
            if job.phase in NAPPING
        ]
        most_mb = state.nodes[node_id].spec.memory_mb * state.policy.sleep_memory_percent // 100
        taken_mb = sum(member.host_mb for member in here)
        if taken_mb > most_mb:
            return f"{node_id} lends {taken_mb} MB to sleepers; the policy allows {most_mb} MB"
        if len(here) > state.policy.sleepers_max:
            return f"{len(here)} members sleep on {node_id}, more than the policy allows"
    return ""


def sleep_problem(state: State) -> str:
    """The indexes of sleepers, and what tenants hold."""
    jobs = state.jobs.values()
    if set(state.napping) != {job.id for job in jobs if job.phase in NAPPING}:
        return "the index of sleepers does not match the jobs"
    if set(state.wakeful) != {job.id for job in jobs if job.phase is Phase.ASLEEP and job.wants}:
        return "the index of sleepers that are to wake does not match the jobs"
    running = {job.id for job in jobs if job.phase is Phase.RUNNING and job.awake_ms is not None}
    if set(state.awake) != running:
        return "the index of jobs that are awake does not match the jobs"
    since = [state.jobs[job_id].awake_ms or 0 for job_id in state.awake]
    if since != sorted(since):
        return "jobs that are awake are not in the order in which they woke"
    if not set(state.agenda.beds) <= set(state.wakeful):
        return "a job has a bed, but is not to wake"
    shares: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for job in jobs:
        for member in job.members:
            if member.status not in OVER and not member.lent:
                shares[job.spec.tenant] += job.share
                first = job.members[0].slice  # all are charged alike
                gpus[job.spec.tenant] += len(first.gpus) * first.gpu_milli
    for name, account in state.accounts.own.items():
        if (account.share, account.gpu_milli) != (shares[name], gpus[name]):
            return f"{name} is charged for {account.gpu_milli} of {gpus[name]} GPU-thousandths"
    return ""
