"""GPUs that are held but not used: when a job begins to use them, and when it has to give them
back."""

from __future__ import annotations

from shoal.core.scheduling.sleepers import beforehand
from shoal.core.scheduling.sleeping import doze, why_not
from shoal.core.state.ending import stop
from shoal.core.state.events.runs import JobBegan, JobIdled, JobUsed
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, MemberRef, Phase, SleepCause, StopCause
from shoal.model.report import Began, NodeReport


def learn_startups(round_: Round, inventories: list[NodeReport]) -> None:
    """Nodes say when members with GPUs began to work, for as long as these live; each is noted
    once, when its gang runs."""
    for inventory in inventories:
        new: dict[tuple[str, str], list[Began]] = {}
        for began in inventory.began:
            job = round_.state.jobs[began.ref.job]
            known = job.startup.members if job.startup is not None else ()
            if job.phase is Phase.RUNNING and began.ref.member not in known:
                new.setdefault((job.id, began.by), []).append(began)
        for (job_id, by), some in new.items():
            job = round_.state.jobs[job_id]
            ran_ms = round_.now_ms - (job.running_ms or 0)
            startup_ms = max(0, min(ran_ms, max(one.after_ms for one in some)))
            members = tuple(one.ref.member for one in some)
            told = JobBegan(
                at_ms=round_.now_ms,
                job=job_id,
                attempt=job.attempt,
                members=members,
                startup_ms=startup_ms,
                by=by,
            )
            round_.emit(told)


def reclaim(round_: Round, inventories: list[NodeReport]) -> None:
    """By what nodes report of their members. A gang is idle when all its members are, since the
    last of them became idle or ended. Replicas that wait for requests are left to their service."""
    state, policy = round_.state, round_.policy
    if not policy.idle_warn_ms and not policy.idle_reclaim_ms:
        state.heard.idles.clear()
        return
    _forget_old(state)
    for inventory in inventories:
        if not inventory.idle and not state.heard.idles:
            continue
        told = {idle.ref: round_.now_ms - idle.idle_ms for idle in inventory.idle}
        for ref, job in list(state.placed[inventory.spec.id].items()):
            watched = job.spec.gpus and not job.spec.service and job.phase is Phase.RUNNING
            if watched and (ref in told or job.id in state.heard.idles):
                _hear(round_, job, ref, told.get(ref))


def _forget_old(state: State) -> None:
    for job_id, (attempt, _) in list(state.heard.idles.items()):
        job = state.jobs.get(job_id)
        if job is None or job.attempt != attempt or job.phase is not Phase.RUNNING:
            del state.heard.idles[job_id]


def _hear(round_: Round, job: Job, ref: MemberRef, since_ms: int | None) -> None:
    _, since = round_.state.heard.idles.setdefault(job.id, (job.attempt, {}))
    if since_ms is None:
        since.pop(ref.member, None)
    else:
        since[ref.member] = since_ms
    for number, member in enumerate(job.members):
        if member.over:  # until now it may have worked, and the others may have waited for it
            since.setdefault(number, round_.now_ms)
    if len(since) == len(job.members):
        _judge(round_, job, max(since.values()))
    elif job.idle_since_ms is not None:
        used = JobUsed(
            at_ms=round_.now_ms, job=job.id, attempt=job.attempt, why="it uses its GPUs again"
        )
        round_.emit(used)


def _judge(round_: Round, job: Job, since_ms: int) -> None:
    policy, now_ms = round_.policy, round_.now_ms
    if job.naps and job.awake_ms is not None:  # what woke it must get its chance to use it
        since_ms = max(since_ms, job.awake_ms)
    idle_ms = now_ms - since_ms
    idle = duration_text(idle_ms)
    if policy.idle_reclaim_ms and idle_ms >= policy.idle_reclaim_ms:
        why = f"has not used its GPUs for {idle}"
        if policy.idle_sleeps and not (reason := why_not(round_.state, job)):
            why += f"; wakes when it is used{beforehand(round_.state, job, SleepCause.IDLE)}"
            doze(round_, job, SleepCause.IDLE, why)
        elif policy.idle_sleeps:
            stop(round_, job, StopCause.IDLE, f"{why}, and cannot sleep: {reason}")
        else:
            stop(round_, job, StopCause.IDLE, why)
    elif policy.idle_warn_ms and idle_ms >= policy.idle_warn_ms and job.idle_since_ms is None:
        why = f"has not used its GPUs for {idle}"
        if policy.idle_reclaim_ms:
            left = duration_text(policy.idle_reclaim_ms - idle_ms)
            why += f"; they will be reclaimed in {left}"
        round_.emit(
            JobIdled(at_ms=now_ms, job=job.id, attempt=job.attempt, since_ms=since_ms, why=why)
        )
