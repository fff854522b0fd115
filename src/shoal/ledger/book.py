"""The book turns events and beats into amounts. No millisecond is lost or counted twice.
Pure: the amounts follow from the events and beats alone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache

from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded, JobReturned, JobSettled
from shoal.core.state.events.queue import JobReleased, JobSubmitted
from shoal.core.state.events.runs import (
    JobAdopted,
    JobBegan,
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.services import ReplicaReady
from shoal.ledger import members
from shoal.ledger.accounts import HOUR_MS, Account, Debt, Owed, Place
from shoal.ledger.book_state import BookState, Gap, Job, Member, Owner
from shoal.ledger.members import (
    NODE_HANDLERS,
    SLEEP_HANDLERS,
    Handlers,
    end_nap,
    settle,
    settle_hour,
    unclaim,
    unreserve,
)
from shoal.ledger.postings import (
    Posting,
    Postings,
    leaves,
    settle_naps,
    settle_node,
    settle_nodes,
    stands,
)
from shoal.model.job import Outcome, StopCause
from shoal.model.neighbor import wish_of
from shoal.model.progress import Progress
from shoal.model.report import Report
from shoal.model.service import ServiceLoad

# Events of jobs and replicas: which members hold GPUs, and what happens to their work.


# -- jobs -----------------------------------------------------------------------------------


@lru_cache(maxsize=1_024)
def _owner(tenant: str, user: str, name: str, service: str) -> Owner:
    """Many jobs have the same, and share it in memory."""
    return Owner(tenant, user, name, service)


def _submitted(postings: Postings, event: JobSubmitted) -> None:
    spec = event.spec
    owner = _owner(spec.tenant, spec.user, spec.name or "", spec.service)
    job = postings.cluster.jobs[event.job] = Job(
        owner=owner,
        gpus=0 if spec.cluster and wish_of(spec.cluster).only else spec.gpus,  # that it wants here
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


def _released(postings: Postings, event: JobReleased) -> None:
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


def _placed(postings: Postings, event: JobPlaced) -> None:
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
            held_ms=postings.cluster.now_ms,
        )


def _running(postings: Postings, event: JobRunning) -> None:
    job = postings.cluster.jobs[event.job]
    for member in job.members.values():
        _runs(postings, event.job, job, member)


def _runs(postings: Postings, job_id: str, job: Job, member: Member) -> None:
    now_ms = postings.cluster.now_ms
    members.settle(postings, job_id, job, member, now_ms)
    member.running_ms, member.silent_ms = now_ms, -1
    member.account = Account.STARTUP if job.owner.service else None


def _checkpointed(postings: Postings, event: JobCheckpointed) -> None:
    job = postings.cluster.jobs[event.job]
    if job.attempt == event.attempt:
        for member in job.members.values():
            if member.told is None:
                members.settle(postings, event.job, job, member, postings.cluster.now_ms)
        postings.saved(job)


def _began(postings: Postings, event: JobBegan) -> None:
    """What such a member did before was start-up. Steps of its own say more."""
    job = postings.cluster.jobs[event.job]
    for number in event.members:
        member = job.members.get(number)
        if member is None or member.told is not None or member.running_ms < 0:
            continue
        if member.account in (None, Account.IDLE) and job.attempt == event.attempt:
            until_ms = min(postings.cluster.now_ms, member.running_ms + event.startup_ms)
            startup = [(Account.STARTUP, max(0, until_ms - member.mark_ms), False)]
            postings.book_member(event.job, job, member, startup)
            member.account = None


def _stopping(postings: Postings, event: JobStopping) -> None:
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


def _exited(postings: Postings, event: MemberExited) -> None:
    job = postings.cluster.jobs[event.job]
    cause = job.cause or (StopCause.FAILURE if event.code else None)
    members.release(postings, event.job, job, event.member, cause)


def _vanished(postings: Postings, event: MemberLost) -> None:
    job = postings.cluster.jobs[event.job]
    members.lost(postings, event.job, job, event.member, job.cause or StopCause.NODE_LOSS)


def _requeued(postings: Postings, event: JobRequeued) -> None:
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


def _adopted(postings: Postings, event: JobAdopted) -> None:
    job = postings.cluster.jobs[event.job]
    _no_longer_waits(postings, job)
    _hold(postings, event.job, job)
    for member in job.members.values():
        _runs(postings, event.job, job, member)


def _finished(postings: Postings, event: JobFinished) -> None:
    job = postings.cluster.jobs[event.job]
    _end_attempt(
        postings, event.job, job, StopCause.FAILURE if event.outcome is Outcome.FAILED else None
    )
    _no_longer_waits(postings, job)
    del postings.cluster.jobs[event.job]


# -- at neighbors ---------------------------------------------------------------------------


def _handed(postings: Postings, event: JobHanded) -> None:
    _no_longer_waits(postings, postings.cluster.jobs[event.job])


def _returned(postings: Postings, event: JobReturned) -> None:
    _owe(postings, event)
    job = postings.cluster.jobs[event.job]
    job.waiting, job.not_before_ms = True, 0
    _joins(postings, event.job, job)


def _owe(postings: Postings, event: JobReturned | JobSettled) -> None:
    """It is booked when the neighbor has said it, as one amount."""
    if event.gpu_ms or event.money:
        job, adds = postings.cluster.jobs.get(event.job), postings.adds.owed
        tenant = event.tenant if isinstance(event, JobSettled) else ""
        if job is not None:  # otherwise it has ended, and this was given up before
            tenant = job.owner.tenant
        key = postings.cluster.now_ms // postings.hour_ms, Debt(event.neighbor, tenant)
        adds[key] = adds.get(key, Owed()).plus(Owed(1, event.gpu_ms, event.money))
        postings.cluster.owes = True


# -- services -------------------------------------------------------------------------------


def _replica_ready(postings: Postings, event: ReplicaReady) -> None:
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
    JobSubmitted: _submitted,
    JobReleased: _released,
    JobPlaced: _placed,
    JobRunning: _running,
    MemberExited: _exited,
    MemberLost: _vanished,
    JobBegan: _began,
    JobCheckpointed: _checkpointed,
    JobStopping: _stopping,
    JobRequeued: _requeued,
    JobAdopted: _adopted,
    JobFinished: _finished,
    ReplicaReady: _replica_ready,
    JobHanded: _handed,
    JobReturned: _returned,
    JobSettled: _owe,
}


HANDLERS: Handlers = {**JOB_HANDLERS, **SLEEP_HANDLERS, **NODE_HANDLERS}


class Book:
    def __init__(self, cluster: BookState | None = None, hour_ms: int = HOUR_MS) -> None:
        """`hour_ms`: another length of the hours that it is asked about."""
        self.postings = Postings(cluster, hour_ms)

    @property
    def cluster(self) -> BookState:
        return self.postings.cluster

    def take(self, event: Event) -> None:
        """Take one event, in the order of the log."""
        if type(event) is ControllerStarted:
            members.unheard(self.postings, event.at_ms)
        advance(self.postings, event.at_ms)
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self.postings, event)

    def advance(self, now_ms: int) -> None:
        advance(self.postings, now_ms)

    def stepped(self, report: Report, events: Sequence[Event], now_ms: int) -> None:
        """Take one step: what it heard explains the time before its events."""
        self.advance(now_ms)
        for inventory in report.nodes:
            members.hear_alive(self.postings, inventory.spec.id, inventory.alive)
            self.hear(inventory.progress)
        self.hear((), report.services)
        for event in events:
            self.take(event)
        for inventory in report.nodes:  # after the event that calls idle time start-up
            members.hear_idle(self.postings, inventory.spec.id, inventory.idle)

    def hear(self, progress: Iterable[Progress], loads: Iterable[ServiceLoad] = ()) -> None:
        """Take what members and the gateway report, before the events of the same step."""
        for one in progress:
            members.hear(self.postings, one)
        for load in loads:
            hear_load(self.postings, load)

    def settle(self) -> None:
        """Book everything that is certain by now."""
        settle_nodes(self.postings)
        settle_naps(self.postings)

    def drain(self) -> list[Posting]:
        return self.postings.drain()

    def open(self) -> dict[Place, int]:
        """How members' time since their last beat would be booked now."""
        now_ms = self.cluster.now_ms
        amounts: dict[Place, int] = {}
        for job_id, job in self.cluster.jobs.items():
            for member in job.members.values():
                if member.lent:
                    continue
                mark_ms = member.mark_ms
                for account, ms, _ in members.pending_parts(job, member, now_ms):
                    end_ms = mark_ms + ms
                    while mark_ms < end_ms:
                        hour = mark_ms // self.postings.hour_ms
                        until_ms = min(end_ms, (hour + 1) * self.postings.hour_ms)
                        place = Place(hour, member.node, job_id, account)
                        amount = (until_ms - mark_ms) * member.milli
                        amounts[place] = amounts.get(place, 0) + amount
                        mark_ms = until_ms
        return amounts


# Time in the book: it never goes back, and gaps are noted for the report.


# After a longer time without a controller, that time is unknown and is not booked.
UNSEEN_MS_MAX = 7 * 24 * HOUR_MS
# Shorter pauses or steps back of the clock are not noted.
NOTED_GAP_MS = 600_000
NOTED_BACK_MS = 1_000
GAPS_KEPT = 100


def advance(postings: Postings, now_ms: int) -> None:
    """Time has passed, and nothing else has changed."""
    cluster = postings.cluster
    if cluster.began_ms < 0:
        cluster.now_ms = cluster.began_ms = now_ms
        return
    if now_ms <= cluster.now_ms:
        _went_back(postings, cluster.now_ms - now_ms)
        return
    cluster.back_ms = 0
    if now_ms - cluster.now_ms > NOTED_GAP_MS:
        _unseen(postings, now_ms)
    while cluster.now_ms < now_ms:
        hour_ms = (cluster.now_ms // postings.hour_ms + 1) * postings.hour_ms
        due_ms = cluster.delayed[0][0] if cluster.delayed else now_ms
        _pass(postings, min(now_ms, hour_ms, max(due_ms, cluster.now_ms + 1)))
        if cluster.now_ms == hour_ms:
            _close_hour(postings)
        _end_delays(postings)


def _pass(postings: Postings, now_ms: int) -> None:
    passed_ms = now_ms - postings.cluster.now_ms
    for kind in postings.cluster.kinds.values():
        if kind.wanted:
            kind.wanted_ms += passed_ms
    postings.cluster.now_ms = now_ms


def _went_back(postings: Postings, back_ms: int) -> None:
    """Time stands still in the book until the clock has caught up: nothing counts twice."""
    cluster = postings.cluster
    if back_ms >= NOTED_BACK_MS and not cluster.back_ms:
        _note(postings, Gap(cluster.now_ms, -back_ms, booked=False))
        cluster.back_ms = back_ms


def _unseen(postings: Postings, now_ms: int) -> None:
    cluster = postings.cluster
    gap_ms = now_ms - cluster.now_ms
    booked = gap_ms <= UNSEEN_MS_MAX
    _note(postings, Gap(cluster.now_ms, gap_ms, booked=booked))
    if booked:
        return
    settle_nodes(postings)
    settle_naps(postings)
    for node in cluster.nodes.values():
        node.mark_ms = now_ms
    for job_id, job in cluster.jobs.items():
        for member in job.members.values():
            settle(postings, job_id, job, member, cluster.now_ms)
            member.mark_ms = now_ms
        job.asleep_ms = now_ms if job.asleep_ms >= 0 else -1
    cluster.now_ms = now_ms


def _note(postings: Postings, gap: Gap) -> None:
    postings.cluster.gaps = [*postings.cluster.gaps, gap][-GAPS_KEPT:]


def _end_delays(postings: Postings) -> None:
    cluster = postings.cluster
    while cluster.delayed and cluster.delayed[0][0] <= cluster.now_ms:
        due_ms, job_id = heapq.heappop(cluster.delayed)
        job = cluster.jobs.get(job_id)
        if job is not None and job.waiting and job.not_before_ms == due_ms and not job.claimed:
            stands(cluster, job)


def _close_hour(postings: Postings) -> None:
    settle_nodes(postings)
    settle_naps(postings)
    for job_id, job in postings.cluster.jobs.items():
        if job.members:
            settle_hour(postings, job_id, job)
