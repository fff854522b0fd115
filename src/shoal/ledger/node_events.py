"""Events of nodes, of GPUs that are set aside, and of tenants without budget left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.state.events.base import EventBase
from shoal.core.state.events.budgets import BudgetFreed, BudgetHeld
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.nodes import (
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.queue import JobClaimed, JobReserved, JobUnclaimed
from shoal.core.state.events.sleep import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    WakeRefused,
)
from shoal.ledger import members
from shoal.ledger.accounts import Account
from shoal.ledger.book_state import Job, Member, Node
from shoal.ledger.free_time import is_held, judge_wants, leaves, new_node, settle_node, stands
from shoal.ledger.postings import Postings, settle_nap
from shoal.model.health import Standing
from shoal.model.job import StopCause
from shoal.model.resources import Slice

Handlers = dict[type[EventBase], Callable[[Postings, Any], None]]


# -- room that is set aside -----------------------------------------------------------------


def _claimed(postings: Postings, event: JobClaimed) -> None:
    job = postings.cluster.jobs[event.job]
    unclaim(postings, job)
    leaves(postings.cluster, job)
    job.claimed = event.slices
    _change_claim(postings, event.slices, 1)


def _unclaimed(postings: Postings, event: JobUnclaimed) -> None:
    _let_claim_go(postings, postings.cluster.jobs[event.job])


def _let_claim_go(postings: Postings, job: Job) -> None:
    unclaim(postings, job)
    if job.waiting and not job.awaits and job.not_before_ms <= postings.cluster.now_ms:
        stands(postings.cluster, job)


def unclaim(postings: Postings, job: Job) -> None:
    _change_claim(postings, job.claimed, -1)
    job.claimed = ()


def _change_claim(postings: Postings, slices: tuple[Slice, ...], sign: int) -> None:
    for slice_ in slices:
        node = postings.cluster.nodes[slice_.node]
        settle_node(postings, slice_.node, node)
        for gpu in slice_.gpus:
            node.claimed[gpu] += sign * slice_.gpu_milli


def _reserved(postings: Postings, event: JobReserved) -> None:
    job = postings.cluster.jobs[event.job]
    unreserve(postings, job)
    job.reserved = event.nodes
    _change_reserved(postings, event.nodes, 1)


def unreserve(postings: Postings, job: Job) -> None:
    _change_reserved(postings, job.reserved, -1)
    job.reserved = ()


def _change_reserved(postings: Postings, nodes: tuple[str, ...], change: int) -> None:
    for node_id in nodes:
        node = postings.cluster.nodes[node_id]
        settle_node(postings, node_id, node)
        node.reserved += change


# -- nodes ----------------------------------------------------------------------------------


def _joined(postings: Postings, event: NodeJoined) -> None:
    nodes = postings.cluster.nodes
    for name in (event.node, event.instead):
        if name in nodes:
            settle_node(postings, name, nodes[name])
    nodes.pop(event.instead, None)
    spec = event.spec
    node = new_node(postings, event.node, spec.gpu_model, spec.gpus, spec.gpu_memory_mb)
    _judge_away(node)


def _ready(postings: Postings, event: NodeReady) -> None:
    node = _changing(postings, event.node)
    node.health = "ready"
    _judge_away(node)
    for job_id, number in _members_of(node):
        postings.cluster.jobs[job_id].members[number].silent_ms = -1


def _silent(postings: Postings, event: NodeSilent) -> None:
    node = _changing(postings, event.node)
    for job_id, number in _members_of(node):
        member = postings.cluster.jobs[job_id].members[number]
        if members.unknown_since_ms(postings, member) < 0:
            member.silent_ms = postings.cluster.now_ms
    node.health = "silent"
    _judge_away(node)


def _lost(postings: Postings, event: NodeLost) -> None:
    """What its members did after it fell silent is unknown."""
    node = _changing(postings, event.node)
    for job_id, number in _members_of(node):
        job = postings.cluster.jobs[job_id]
        members.lost(postings, job_id, job, number, StopCause.NODE_LOSS)
    node.health = "lost"
    _judge_away(node)
    _drop_claims(postings, event.node)


def _intended(postings: Postings, event: NodeIntended) -> None:
    node = _changing(postings, event.node)
    node.intent = event.intent.value
    node.known = node.intent != "removed"
    _judge_away(node)


def _judged(postings: Postings, event: NodeJudged) -> None:
    node = _changing(postings, event.node)
    node.quarantined = event.record.standing is Standing.QUARANTINED
    _judge_away(node)
    if node.quarantined:
        _drop_claims(postings, event.node)


def _changing(postings: Postings, node_id: str) -> Node:
    node = postings.cluster.nodes[node_id]
    settle_node(postings, node_id, node)
    return node


def _judge_away(node: Node) -> None:
    """The first reason why its free GPUs cannot be used; None if they can."""
    if node.health != "ready":
        node.away = Account.LOST
    elif node.quarantined:
        node.away = Account.QUARANTINED
    else:
        node.away = None if node.intent == "open" else Account.CLOSED


def _members_of(node: Node) -> list[tuple[str, int]]:
    return [(job_id, number) for job_id, numbers in node.members.items() for number in numbers]


def _drop_claims(postings: Postings, node_id: str) -> None:
    for job in postings.cluster.jobs.values():
        if any(slice_.node == node_id for slice_ in job.claimed):
            _let_claim_go(postings, job)


# -- budgets --------------------------------------------------------------------------------


def _policy(postings: Postings, event: PolicyChanged) -> None:
    postings.cluster.parents = {one.name: one.parent for one in event.policy.tenants if one.parent}
    _drop_held(postings)


def _budget_held(postings: Postings, event: BudgetHeld) -> None:
    postings.cluster.held.append(event.tenant)
    _drop_held(postings)


def _budget_freed(postings: Postings, event: BudgetFreed) -> None:
    if event.tenant in postings.cluster.held:  # otherwise it was only warned
        postings.cluster.held.remove(event.tenant)
        judge_wants(postings.cluster)


def _drop_held(postings: Postings) -> None:
    """Nothing is set aside for a tenant that is held."""
    for job in postings.cluster.jobs.values() if postings.cluster.held else ():
        if (job.waiting or job.asleep_ms >= 0) and is_held(postings.cluster, job.owner.tenant):
            _let_claim_go(postings, job)
            unreserve(postings, job)
    judge_wants(postings.cluster)


NODE_HANDLERS: Handlers = {
    JobReserved: _reserved,
    JobClaimed: _claimed,
    JobUnclaimed: _unclaimed,
    NodeJoined: _joined,
    NodeReady: _ready,
    NodeSilent: _silent,
    NodeLost: _lost,
    NodeIntended: _intended,
    NodeJudged: _judged,
    PolicyChanged: _policy,
    BudgetHeld: _budget_held,
    BudgetFreed: _budget_freed,
}


# Jobs that sleep: they hold GPUs without work while they fall asleep and wake, and none between.
#
# How long a job slept, and how much GPU time it lent out by that, is a memo: others hold that time,
# or it is free, so it is not part of any sum.


def _dozing(postings: Postings, event: JobDozing) -> None:
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    job.dozed_ms = now_ms
    for number, member in job.members.items():
        members.settle(postings, event.job, job, member, now_ms)
        # A service's replica goes on as it was; another job's beats say what it does.
        member.before = member.account if job.owner.service else None
        member.account = Account.ASLEEP
        if member.told is not None:
            member.told.napped = True
        node = postings.cluster.nodes[member.node]
        node.idle = [each for each in node.idle if each != (event.job, number)]


def _asleep(postings: Postings, event: JobAsleep | WakeRefused) -> None:
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    for member in job.members.values():
        members.settle(postings, event.job, job, member, now_ms)
        _hold(postings, member, -1)
        member.lent, member.milli = member.milli, 0
    job.asleep_ms = now_ms


def _touched(postings: Postings, event: JobTouched) -> None:
    if not event.wants:
        unclaim(postings, postings.cluster.jobs[event.job])


def _waking(postings: Postings, event: JobWaking) -> None:
    """It may hold other GPUs than before."""
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    settle_nap(postings, event.job, job)
    job.asleep_ms = -1
    unclaim(postings, job)
    job.slices = tuple(
        msgspec.structs.replace(slice_, gpus=gpus)
        for slice_, gpus in zip(job.slices, event.gpus, strict=True)
    )
    for number, member in job.members.items():
        members.settle(postings, event.job, job, member, now_ms)
        member.gpus = event.gpus[number]
        member.milli, member.lent = len(member.gpus) * member.share, 0
        _hold(postings, member, 1)


def _awake(postings: Postings, event: JobAwake) -> None:
    """The time is not run time: a job that says how often it saves did not save in its sleep."""
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    for member in job.members.values():
        members.settle(postings, event.job, job, member, now_ms)
        member.account, member.before = member.before, None
        member.running_ms += now_ms - job.dozed_ms
    job.dozed_ms = -1


def _hold(postings: Postings, member: Member, sign: int) -> None:
    node = postings.cluster.nodes[member.node]
    settle_node(postings, member.node, node)
    for gpu in member.gpus:
        node.held[gpu] += sign * member.share


def end_nap(postings: Postings, job_id: str, job: Job) -> None:
    """It is stopped, or its attempt is over: what is set aside for it to wake is not needed."""
    if job.asleep_ms >= 0:
        settle_nap(postings, job_id, job)
        unclaim(postings, job)
    job.dozed_ms = job.asleep_ms = -1


SLEEP_HANDLERS: Handlers = {
    JobDozing: _dozing,
    JobAsleep: _asleep,
    JobTouched: _touched,
    JobWaking: _waking,
    WakeRefused: _asleep,
    JobAwake: _awake,
}
