"""What events say of nodes, of room that is set aside, and of tenants that are held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.ledger import members
from shoal.ledger.accounts import Account
from shoal.ledger.mirror import Job, Node
from shoal.ledger.nodes import is_held, judge_wants, leaves, new_node, settle_node, stands
from shoal.ledger.pages import Pages
from shoal.model import events as ev
from shoal.model.health import Standing
from shoal.model.job import StopCause
from shoal.model.resources import Slice

Handlers = dict[type[ev.EventBase], Callable[[Pages, Any], None]]


# -- room that is set aside -----------------------------------------------------------------


def _claimed(pages: Pages, event: ev.JobClaimed) -> None:
    job = pages.mirror.jobs[event.job]
    unclaim(pages, job)
    leaves(pages.mirror, job)
    job.claimed = event.slices
    _change_claim(pages, event.slices, 1)


def _unclaimed(pages: Pages, event: ev.JobUnclaimed) -> None:
    _let_claim_go(pages, pages.mirror.jobs[event.job])


def _let_claim_go(pages: Pages, job: Job) -> None:
    unclaim(pages, job)
    if job.waiting and job.not_before_ms <= pages.mirror.now_ms:
        stands(pages.mirror, job)


def unclaim(pages: Pages, job: Job) -> None:
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
    unreserve(pages, job)
    job.reserved = event.nodes
    _change_reserved(pages, event.nodes, 1)


def unreserve(pages: Pages, job: Job) -> None:
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
        pages.mirror.jobs[job_id].members[number].silent_ms = -1


def _silent(pages: Pages, event: ev.NodeSilent) -> None:
    node = _changing(pages, event.node)
    node.health = "silent"
    _judge_away(node)
    for job_id, number in _members_of(node):
        pages.mirror.jobs[job_id].members[number].silent_ms = pages.mirror.now_ms


def _lost(pages: Pages, event: ev.NodeLost) -> None:
    """From when it was last thought to be there, its members did nothing that is known."""
    node = _changing(pages, event.node)
    node.health = "lost"
    _judge_away(node)
    _drop_claims(pages, event.node)
    for job_id, number in _members_of(node):
        job = pages.mirror.jobs[job_id]
        member = job.members[number]
        if member.silent_ms >= 0:
            members.finish_step(pages, job_id, job, member, member.silent_ms, StopCause.NODE_LOSS)
            member.account = Account.LOST
        members.release(pages, job_id, job, number, StopCause.NODE_LOSS)


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


# -- budgets --------------------------------------------------------------------------------


def _policy(pages: Pages, event: ev.PolicyChanged) -> None:
    pages.mirror.parents = {one.name: one.parent for one in event.policy.tenants if one.parent}
    _drop_held(pages)


def _budget_held(pages: Pages, event: ev.BudgetHeld) -> None:
    pages.mirror.held.append(event.tenant)
    _drop_held(pages)


def _budget_freed(pages: Pages, event: ev.BudgetFreed) -> None:
    if event.tenant in pages.mirror.held:  # else it was only warned
        pages.mirror.held.remove(event.tenant)
        judge_wants(pages.mirror)


def _drop_held(pages: Pages) -> None:
    """Nothing is set aside for who is held."""
    for job in pages.mirror.jobs.values() if pages.mirror.held else ():
        if job.waiting and is_held(pages.mirror, job.owner.tenant):
            _let_claim_go(pages, job)
            unreserve(pages, job)
    judge_wants(pages.mirror)


ROOMS: Handlers = {
    ev.JobReserved: _reserved,
    ev.JobClaimed: _claimed,
    ev.JobUnclaimed: _unclaimed,
    ev.NodeJoined: _joined,
    ev.NodeReady: _ready,
    ev.NodeSilent: _silent,
    ev.NodeLost: _lost,
    ev.NodeIntended: _intended,
    ev.NodeJudged: _judged,
    ev.PolicyChanged: _policy,
    ev.BudgetHeld: _budget_held,
    ev.BudgetFreed: _budget_freed,
}
