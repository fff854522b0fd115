"""What events say of jobs and replicas: who holds GPUs, and what becomes of the work."""

from __future__ import annotations

import heapq

from shoal.ledger import members
from shoal.ledger.accounts import Account
from shoal.ledger.mirror import Job, Member, Owner
from shoal.ledger.nodes import leaves, settle_node, stands
from shoal.ledger.pages import Pages
from shoal.ledger.rooms import Handlers, unclaim, unreserve
from shoal.model import events as ev
from shoal.model.job import Outcome, StopCause
from shoal.model.service import ServiceLoad

# -- jobs -----------------------------------------------------------------------------------


def _submitted(pages: Pages, event: ev.JobSubmitted) -> None:
    spec = event.spec
    owner = Owner(spec.tenant, spec.user, spec.name or "", spec.service)
    job = pages.mirror.jobs[event.job] = Job(
        owner=owner,
        gpus=spec.gpus,
        models=spec.gpu_models,
        memory_mb=spec.gpu_memory_mb,
        checkpoint_ms=spec.checkpoint_ms,
        whole_nodes=spec.whole_nodes,
    )
    if spec.gpus:
        pages.adds.owners[event.job] = owner
    stands(pages.mirror, job)


def _placed(pages: Pages, event: ev.JobPlaced) -> None:
    job = pages.mirror.jobs[event.job]
    _no_longer_waits(pages, job)
    job.attempt, job.slices = event.attempt, event.slices
    job.saved, job.cause = False, None
    _hold(pages, event.job, job)


def _no_longer_waits(pages: Pages, job: Job) -> None:
    leaves(pages.mirror, job)
    job.waiting = False
    unclaim(pages, job)
    unreserve(pages, job)


def _hold(pages: Pages, job_id: str, job: Job) -> None:
    for number, slice_ in enumerate(job.slices):
        node = pages.mirror.nodes[slice_.node]
        if not slice_.gpus and not job.whole_nodes:
            continue
        settle_node(pages, slice_.node, node)
        for gpu in slice_.gpus:
            node.held[gpu] += slice_.gpu_milli
        node.whole += job.whole_nodes
        node.members.setdefault(job_id, []).append(number)
        job.members[number] = Member(
            node=slice_.node,
            milli=len(slice_.gpus) * slice_.gpu_milli,
            gpus=slice_.gpus,
            share=slice_.gpu_milli,
            mark_ms=pages.mirror.now_ms,
        )


def _running(pages: Pages, event: ev.JobRunning) -> None:
    job = pages.mirror.jobs[event.job]
    for member in job.members.values():
        _runs(pages, event.job, job, member)


def _runs(pages: Pages, job_id: str, job: Job, member: Member) -> None:
    now_ms = pages.mirror.now_ms
    members.settle(pages, job_id, job, member, now_ms)
    member.running_ms = now_ms
    member.account = Account.STARTUP if job.owner.service else None


def _checkpointed(pages: Pages, event: ev.JobCheckpointed) -> None:
    job = pages.mirror.jobs[event.job]
    if job.attempt == event.attempt:
        for member in job.members.values():
            if member.told is None:
                members.settle(pages, event.job, job, member, pages.mirror.now_ms)
        pages.saved(job)


def _stopping(pages: Pages, event: ev.JobStopping) -> None:
    job = pages.mirror.jobs[event.job]
    job.cause = event.cause
    account = _stop_account(job, event.cause)
    for member in job.members.values():
        members.finish_step(pages, event.job, job, member, pages.mirror.now_ms, event.cause)
        member.account = account


def _stop_account(job: Job, cause: StopCause) -> Account:
    """Where the time goes that a job takes to end."""
    if job.owner.service:
        return Account.WARM
    if cause in members.FAULTS:
        return Account.RECOMPUTE
    return Account.PREEMPTED if cause in members.OURS else Account.IDLE


def _exited(pages: Pages, event: ev.MemberExited) -> None:
    job = pages.mirror.jobs[event.job]
    cause = job.cause or (StopCause.FAILURE if event.code else None)
    members.release(pages, event.job, job, event.member, cause)


def _vanished(pages: Pages, event: ev.MemberLost) -> None:
    job = pages.mirror.jobs[event.job]
    members.release(pages, event.job, job, event.member, job.cause or StopCause.NODE_LOSS)


def _requeued(pages: Pages, event: ev.JobRequeued) -> None:
    job = pages.mirror.jobs[event.job]
    _end_attempt(pages, event.job, job, event.cause)
    job.waiting, job.not_before_ms = True, event.not_before_ms
    if event.not_before_ms > pages.mirror.now_ms:
        heapq.heappush(pages.mirror.delayed, (event.not_before_ms, event.job))
    elif not job.claimed:
        stands(pages.mirror, job)


def _end_attempt(pages: Pages, job_id: str, job: Job, cause: StopCause | None) -> None:
    """Who was asked to stop has saved its work, if it ever does; who fails goes back."""
    for number in list(job.members):
        members.release(pages, job_id, job, number, cause)
    if cause in members.FAULTS:
        pages.undone(job_id, job, Account.RECOMPUTE)
    elif cause in members.OURS and not (job.saved or job.checkpoint_ms):
        pages.undone(job_id, job, Account.PREEMPTED)
    else:
        pages.saved(job)
    job.saved, job.cause, job.wait_us, job.wait_ms = False, None, 0, 0
    job.wait_of = job.tellers = 0


def _adopted(pages: Pages, event: ev.JobAdopted) -> None:
    job = pages.mirror.jobs[event.job]
    _no_longer_waits(pages, job)
    _hold(pages, event.job, job)
    for member in job.members.values():
        _runs(pages, event.job, job, member)


def _finished(pages: Pages, event: ev.JobFinished) -> None:
    job = pages.mirror.jobs[event.job]
    _end_attempt(
        pages, event.job, job, StopCause.FAILURE if event.outcome is Outcome.FAILED else None
    )
    _no_longer_waits(pages, job)
    del pages.mirror.jobs[event.job]


# -- services -------------------------------------------------------------------------------


def _replica_ready(pages: Pages, event: ev.ReplicaReady) -> None:
    _serve_as(pages, event.job, Account.WARM)


def hear_load(pages: Pages, load: ServiceLoad) -> None:
    """A replica is busy from one look to the next if it had requests at the first."""
    if load.tells:
        for job_id, replica in load.replicas.items():
            _serve_as(pages, job_id, Account.SERVING if replica.in_flight else Account.WARM)


def _serve_as(pages: Pages, job_id: str, account: Account) -> None:
    job = pages.mirror.jobs.get(job_id)
    if job is None or job.cause is not None:
        return
    for member in job.members.values():
        ready = account is Account.WARM or member.account is not Account.STARTUP
        if member.running_ms >= 0 and member.account is not account and ready:
            members.settle(pages, job_id, job, member, pages.mirror.now_ms)
            member.account = account


JOBS: Handlers = {
    ev.JobSubmitted: _submitted,
    ev.JobPlaced: _placed,
    ev.JobRunning: _running,
    ev.MemberExited: _exited,
    ev.MemberLost: _vanished,
    ev.JobCheckpointed: _checkpointed,
    ev.JobStopping: _stopping,
    ev.JobRequeued: _requeued,
    ev.JobAdopted: _adopted,
    ev.JobFinished: _finished,
    ev.ReplicaReady: _replica_ready,
}
