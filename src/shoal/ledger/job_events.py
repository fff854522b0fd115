"""Events of jobs and replicas: which members hold GPUs, and what happens to their work."""

from __future__ import annotations

import heapq

from shoal.ledger import members
from shoal.ledger.accounts import Account
from shoal.ledger.book_state import Job, Member, Owner
from shoal.ledger.free_time import leaves, settle_node, stands
from shoal.ledger.node_events import Handlers, unclaim, unreserve
from shoal.ledger.postings import Postings
from shoal.ledger.sleep_events import end_nap
from shoal.model import events as ev
from shoal.model.job import Outcome, StopCause
from shoal.model.service import ServiceLoad

# -- jobs -----------------------------------------------------------------------------------


def _submitted(postings: Postings, event: ev.JobSubmitted) -> None:
    spec = event.spec
    owner = Owner(spec.tenant, spec.user, spec.name or "", spec.service)
    job = postings.cluster.jobs[event.job] = Job(
        owner=owner,
        gpus=spec.gpus,
        models=spec.gpu_models,
        memory_mb=spec.gpu_memory_mb,
        checkpoint_ms=spec.checkpoint_ms,
        whole_nodes=spec.whole_nodes,
    )
    if spec.gpus:
        postings.adds.owners[event.job] = owner
    job.awaits = len(event.awaits)
    if spec.begin_ms > event.at_ms:
        job.not_before_ms = spec.begin_ms
    _joins(postings, event.job, job)


def _released(postings: Postings, event: ev.JobReleased) -> None:
    job = postings.cluster.jobs.get(event.job)
    if job is None:
        return  # an array: its elements are booked when they become jobs
    job.awaits -= 1
    _joins(postings, event.job, job)


def _joins(postings: Postings, job_id: str, job: Job) -> None:
    """It wants room from now on, or from a later time on, unless it waits for other jobs."""
    if job.awaits:
        return
    if job.not_before_ms > postings.cluster.now_ms:
        heapq.heappush(postings.cluster.delayed, (job.not_before_ms, job_id))
    else:
        stands(postings.cluster, job)


def _placed(postings: Postings, event: ev.JobPlaced) -> None:
    job = postings.cluster.jobs[event.job]
    _no_longer_waits(postings, job)
    job.attempt, job.slices = event.attempt, event.slices
    job.saved, job.cause = False, None
    _hold(postings, event.job, job)


def _no_longer_waits(postings: Postings, job: Job) -> None:
    leaves(postings.cluster, job)
    job.waiting = False
    unclaim(postings, job)
    unreserve(postings, job)


def _hold(postings: Postings, job_id: str, job: Job) -> None:
    for number, slice_ in enumerate(job.slices):
        node = postings.cluster.nodes[slice_.node]
        if not slice_.gpus and not job.whole_nodes:
            continue
        settle_node(postings, slice_.node, node)
        for gpu in slice_.gpus:
            node.held[gpu] += slice_.gpu_milli
        node.whole += job.whole_nodes
        node.members.setdefault(job_id, []).append(number)
        job.members[number] = Member(
            node=slice_.node,
            milli=len(slice_.gpus) * slice_.gpu_milli,
            gpus=slice_.gpus,
            share=slice_.gpu_milli,
            mark_ms=postings.cluster.now_ms,
        )


def _running(postings: Postings, event: ev.JobRunning) -> None:
    job = postings.cluster.jobs[event.job]
    for member in job.members.values():
        _runs(postings, event.job, job, member)


def _runs(postings: Postings, job_id: str, job: Job, member: Member) -> None:
    now_ms = postings.cluster.now_ms
    members.settle(postings, job_id, job, member, now_ms)
    member.running_ms, member.silent_ms = now_ms, -1
    member.account = Account.STARTUP if job.owner.service else None


def _checkpointed(postings: Postings, event: ev.JobCheckpointed) -> None:
    job = postings.cluster.jobs[event.job]
    if job.attempt == event.attempt:
        for member in job.members.values():
            if member.told is None:
                members.settle(postings, event.job, job, member, postings.cluster.now_ms)
        postings.saved(job)


def _stopping(postings: Postings, event: ev.JobStopping) -> None:
    job = postings.cluster.jobs[event.job]
    job.cause = event.cause
    end_nap(postings, event.job, job)
    account = _stop_account(job, event.cause)
    for member in job.members.values():
        members.finish_step(postings, event.job, job, member, postings.cluster.now_ms, event.cause)
        member.account = account


def _stop_account(job: Job, cause: StopCause) -> Account:
    """The account for the time that a job takes to end."""
    if job.owner.service:
        return Account.WARM
    if cause in members.FAULTS:
        return Account.RECOMPUTE
    return Account.PREEMPTED if cause in members.OURS else Account.IDLE


def _exited(postings: Postings, event: ev.MemberExited) -> None:
    job = postings.cluster.jobs[event.job]
    cause = job.cause or (StopCause.FAILURE if event.code else None)
    members.release(postings, event.job, job, event.member, cause)


def _vanished(postings: Postings, event: ev.MemberLost) -> None:
    job = postings.cluster.jobs[event.job]
    members.lost(postings, event.job, job, event.member, job.cause or StopCause.NODE_LOSS)


def _requeued(postings: Postings, event: ev.JobRequeued) -> None:
    job = postings.cluster.jobs[event.job]
    _end_attempt(postings, event.job, job, event.cause)
    job.waiting, job.not_before_ms = True, event.not_before_ms
    if not job.claimed or event.not_before_ms > postings.cluster.now_ms:
        _joins(postings, event.job, job)


def _end_attempt(postings: Postings, job_id: str, job: Job, cause: StopCause | None) -> None:
    """A job that saves has saved its work if it was asked to stop; a failure loses the work."""
    end_nap(postings, job_id, job)
    for number in list(job.members):
        members.release(postings, job_id, job, number, cause)
    if cause in members.FAULTS:
        postings.undone(job_id, job, Account.RECOMPUTE)
    elif cause in members.OURS and not (job.saved or job.checkpoint_ms):
        postings.undone(job_id, job, Account.PREEMPTED)
    else:
        postings.saved(job)
    job.saved, job.cause, job.wait_us, job.wait_ms = False, None, 0, 0
    job.wait_of = job.tellers = 0


def _adopted(postings: Postings, event: ev.JobAdopted) -> None:
    job = postings.cluster.jobs[event.job]
    _no_longer_waits(postings, job)
    _hold(postings, event.job, job)
    for member in job.members.values():
        _runs(postings, event.job, job, member)


def _finished(postings: Postings, event: ev.JobFinished) -> None:
    job = postings.cluster.jobs[event.job]
    _end_attempt(
        postings, event.job, job, StopCause.FAILURE if event.outcome is Outcome.FAILED else None
    )
    _no_longer_waits(postings, job)
    del postings.cluster.jobs[event.job]


# -- services -------------------------------------------------------------------------------


def _replica_ready(postings: Postings, event: ev.ReplicaReady) -> None:
    _serve_as(postings, event.job, Account.WARM)


def hear_load(postings: Postings, load: ServiceLoad) -> None:
    """A replica is busy from one look to the next if it had requests at the first."""
    if load.tells:
        for job_id, replica in load.replicas.items():
            _serve_as(postings, job_id, Account.SERVING if replica.in_flight else Account.WARM)


def _serve_as(postings: Postings, job_id: str, account: Account) -> None:
    job = postings.cluster.jobs.get(job_id)
    if job is None or job.cause is not None:
        return
    for member in job.members.values():
        if member.account is Account.ASLEEP:
            if account is Account.WARM:
                member.before = account
            continue
        ready = account is Account.WARM or member.account is not Account.STARTUP
        if member.running_ms >= 0 and member.account is not account and ready:
            members.settle(postings, job_id, job, member, postings.cluster.now_ms)
            member.account = account


JOB_HANDLERS: Handlers = {
    ev.JobSubmitted: _submitted,
    ev.JobReleased: _released,
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
