"""The book: events and beats in, amounts out; no millisecond is forgotten and none counts twice.
Pure: what it says follows from what it was told."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from shoal.ledger import clock, members
from shoal.ledger.accounts import HOUR_MS, Account, Place
from shoal.ledger.mirror import Job, Member, Mirror, Node, Owner
from shoal.ledger.nodes import leaves, new_node, settle_node, settle_nodes, stands
from shoal.ledger.pages import Entry, Pages
from shoal.model import events as ev
from shoal.model.health import Standing
from shoal.model.job import Outcome, StopCause
from shoal.model.progress import Progress
from shoal.model.resources import Slice
from shoal.model.service import ServiceLoad

# Stops of ours, which a job that saves its work survives whole; the others are failures.
OURS = (StopCause.PREEMPT, StopCause.RESIZE, StopCause.MOVE, StopCause.DRAIN)
FAULTS = (StopCause.FAILURE, StopCause.NODE_LOSS, StopCause.HANG)


class Book:
    def __init__(self, mirror: Mirror | None = None) -> None:
        self.pages = Pages(mirror)

    @property
    def mirror(self) -> Mirror:
        return self.pages.mirror

    def take(self, event: ev.Event) -> None:
        """What happened, in the order of the log."""
        clock.advance(self.pages, event.at_ms)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self.pages, event)

    def advance(self, now_ms: int) -> None:
        clock.advance(self.pages, now_ms)

    def hear(self, progress: Iterable[Progress], loads: Iterable[ServiceLoad] = ()) -> None:
        """What members and the gateway say; to be heard before the events of the same step."""
        for one in progress:
            members.hear(self.pages, one)
        for load in loads:
            _hear_load(self.pages, load)

    def settle(self) -> None:
        """Book all that is certain by now."""
        settle_nodes(self.pages)

    def drain(self) -> list[Entry]:
        return self.pages.drain()

    def open(self) -> dict[Place, int]:
        """What members' time since their last beat is taken for until they tell, up to now."""
        now_ms = self.mirror.now_ms
        amounts: dict[Place, int] = {}
        for job_id, job in self.mirror.jobs.items():
            for member in job.members.values():
                mark_ms = member.mark_ms
                for account, ms, _ in members.pending_parts(job, member, now_ms):
                    end_ms = mark_ms + ms
                    while mark_ms < end_ms:
                        hour = mark_ms // HOUR_MS
                        until_ms = min(end_ms, (hour + 1) * HOUR_MS)
                        place = Place(hour, member.node, job_id, account)
                        amount = (until_ms - mark_ms) * member.milli
                        amounts[place] = amounts.get(place, 0) + amount
                        mark_ms = until_ms
        return amounts


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
    _unclaim(pages, job)
    _unreserve(pages, job)


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
        _finish_step(pages, event.job, job, member, pages.mirror.now_ms, event.cause)
        member.account = account


def _stop_account(job: Job, cause: StopCause) -> Account:
    """Where the time goes that a job takes to end."""
    if job.owner.service:
        return Account.WARM
    if cause in FAULTS:
        return Account.RECOMPUTE
    return Account.PREEMPTED if cause in OURS else Account.IDLE


def _finish_step(
    pages: Pages, job_id: str, job: Job, member: Member, until_ms: int, cause: StopCause | None
) -> None:
    """Its beats will not explain the time up to then any more. In a gang that hangs or fails,
    silence is the failure's."""
    parts = members.pending_parts(job, member, until_ms)
    if cause in FAULTS and member.account is None:
        swap = {Account.IDLE: Account.RECOMPUTE}
        parts = [(swap.get(account, account), ms, firm) for account, ms, firm in parts]
    pages.book_member(job_id, job, member, parts)


def _exited(pages: Pages, event: ev.MemberExited) -> None:
    job = pages.mirror.jobs[event.job]
    cause = job.cause or (StopCause.FAILURE if event.code else None)
    _release(pages, event.job, job, event.member, cause)


def _vanished(pages: Pages, event: ev.MemberLost) -> None:
    job = pages.mirror.jobs[event.job]
    _release(pages, event.job, job, event.member, job.cause or StopCause.NODE_LOSS)


def _release(pages: Pages, job_id: str, job: Job, number: int, cause: StopCause | None) -> None:
    member = job.members.get(number)
    if member is None:
        return
    node = pages.mirror.nodes[member.node]
    settle_node(pages, member.node, node)
    _finish_step(pages, job_id, job, member, pages.mirror.now_ms, cause)
    for gpu in member.gpus:
        node.held[gpu] -= member.share
    node.whole -= job.whole_nodes
    here = node.members[job_id]
    here.remove(number)
    if not here:
        del node.members[job_id]
    del job.members[number]


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
        _release(pages, job_id, job, number, cause)
    if cause in FAULTS:
        pages.undone(job_id, job, Account.RECOMPUTE)
    elif cause in OURS and not (job.saved or job.checkpoint_ms):
        pages.undone(job_id, job, Account.PREEMPTED)
    else:
        pages.saved(job)
    job.saved, job.cause, job.wait_us, job.wait_ms = False, None, 0, 0


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


# -- room that is set aside -----------------------------------------------------------------


def _claimed(pages: Pages, event: ev.JobClaimed) -> None:
    job = pages.mirror.jobs[event.job]
    _unclaim(pages, job)
    leaves(pages.mirror, job)
    job.claimed = event.slices
    _change_claim(pages, event.slices, 1)


def _unclaimed(pages: Pages, event: ev.JobUnclaimed) -> None:
    _let_claim_go(pages, pages.mirror.jobs[event.job])


def _let_claim_go(pages: Pages, job: Job) -> None:
    _unclaim(pages, job)
    if job.waiting and job.not_before_ms <= pages.mirror.now_ms:
        stands(pages.mirror, job)


def _unclaim(pages: Pages, job: Job) -> None:
    _change_claim(pages, job.claimed, -1)
    job.claimed = ()


def _change_claim(pages: Pages, slices: tuple[Slice, ...], sign: int) -> None:
    for slice_ in slices:
        node = pages.mirror.nodes[slice_.node]
        settle_node(pages, slice_.node, node)
        for gpu in slice_.gpus:
            node.claimed[gpu] += sign * slice_.gpu_milli


def _reserved(pages: Pages, event: ev.JobReserved) -> None:
    job = pages.mirror.jobs[event.job]
    _unreserve(pages, job)
    job.reserved = event.nodes
    _change_reserved(pages, event.nodes, 1)


def _unreserve(pages: Pages, job: Job) -> None:
    _change_reserved(pages, job.reserved, -1)
    job.reserved = ()


def _change_reserved(pages: Pages, nodes: tuple[str, ...], change: int) -> None:
    for node_id in nodes:
        node = pages.mirror.nodes[node_id]
        settle_node(pages, node_id, node)
        node.reserved += change


# -- nodes ----------------------------------------------------------------------------------


def _joined(pages: Pages, event: ev.NodeJoined) -> None:
    before = pages.mirror.nodes.get(event.node)
    if before is not None:
        settle_node(pages, event.node, before)
    spec = event.spec
    node = new_node(pages, event.node, spec.gpu_model, spec.gpus, spec.gpu_memory_mb)
    _judge_away(node)


def _ready(pages: Pages, event: ev.NodeReady) -> None:
    node = _changing(pages, event.node)
    node.health = "ready"
    _judge_away(node)
    for job_id, number in _members_of(node):
        pages.mirror.jobs[job_id].members[number].suspect_ms = -1


def _suspected(pages: Pages, event: ev.NodeSuspected) -> None:
    node = _changing(pages, event.node)
    node.health = "suspect"
    _judge_away(node)
    for job_id, number in _members_of(node):
        pages.mirror.jobs[job_id].members[number].suspect_ms = pages.mirror.now_ms


def _lost(pages: Pages, event: ev.NodeLost) -> None:
    """From when it was last thought to be there, its members did nothing that is known."""
    node = _changing(pages, event.node)
    node.health = "lost"
    _judge_away(node)
    _drop_claims(pages, event.node)
    for job_id, number in _members_of(node):
        job = pages.mirror.jobs[job_id]
        member = job.members[number]
        if member.suspect_ms >= 0:
            _finish_step(pages, job_id, job, member, member.suspect_ms, StopCause.NODE_LOSS)
            member.account = Account.LOST
        _release(pages, job_id, job, number, StopCause.NODE_LOSS)


def _intended(pages: Pages, event: ev.NodeIntended) -> None:
    node = _changing(pages, event.node)
    node.intent = event.intent.value
    node.known = node.intent != "removed"
    _judge_away(node)


def _judged(pages: Pages, event: ev.NodeJudged) -> None:
    node = _changing(pages, event.node)
    node.quarantined = event.record.standing is Standing.QUARANTINED
    _judge_away(node)
    if node.quarantined:
        _drop_claims(pages, event.node)


def _changing(pages: Pages, node_id: str) -> Node:
    node = pages.mirror.nodes[node_id]
    settle_node(pages, node_id, node)
    return node


def _judge_away(node: Node) -> None:
    """Why what is free on it cannot be used, if it cannot: the first of these that holds."""
    if node.health != "ready":
        node.away = Account.LOST
    elif node.quarantined:
        node.away = Account.QUARANTINED
    else:
        node.away = None if node.intent == "open" else Account.CLOSED


def _members_of(node: Node) -> list[tuple[str, int]]:
    return [(job_id, number) for job_id, numbers in node.members.items() for number in numbers]


def _drop_claims(pages: Pages, node_id: str) -> None:
    for job in pages.mirror.jobs.values():
        if any(slice_.node == node_id for slice_ in job.claimed):
            _let_claim_go(pages, job)


# -- services -------------------------------------------------------------------------------


def _replica_ready(pages: Pages, event: ev.ReplicaReady) -> None:
    _serve_as(pages, event.job, Account.WARM)


def _hear_load(pages: Pages, load: ServiceLoad) -> None:
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


_HANDLERS: dict[type[ev.EventBase], Callable[[Pages, Any], None]] = {
    ev.JobSubmitted: _submitted,
    ev.JobPlaced: _placed,
    ev.JobReserved: _reserved,
    ev.JobClaimed: _claimed,
    ev.JobUnclaimed: _unclaimed,
    ev.JobRunning: _running,
    ev.MemberExited: _exited,
    ev.MemberLost: _vanished,
    ev.JobCheckpointed: _checkpointed,
    ev.JobStopping: _stopping,
    ev.JobRequeued: _requeued,
    ev.JobAdopted: _adopted,
    ev.JobFinished: _finished,
    ev.NodeJoined: _joined,
    ev.NodeReady: _ready,
    ev.NodeSuspected: _suspected,
    ev.NodeLost: _lost,
    ev.NodeIntended: _intended,
    ev.NodeJudged: _judged,
    ev.ReplicaReady: _replica_ready,
}
