"""Where the time of members goes, and what events of nodes and tenants do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from shoal.core.state.events.queue import JobClaimed, JobReserved, JobUnclaimed, JobUnreserved
from shoal.core.state.events.sleep import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    JobWaking,
    WakeRefused,
)
from shoal.ledger.accounts import Account
from shoal.ledger.book_state import Job, LastBeat, Member, Node
from shoal.ledger.energy import hold
from shoal.ledger.postings import (
    Part,
    Postings,
    is_held,
    judge_wants,
    leaves,
    new_node,
    settle_nap,
    settle_node,
    stands,
)
from shoal.model.health import Standing
from shoal.model.job import MemberRef, StopCause
from shoal.model.progress import Beat, Progress
from shoal.model.report import Idle
from shoal.model.resources import Slice

# A node that no controller hears falls silent within this time, whatever the policy says.
UNHEARD_MS = 60 * 60_000
# Reports come every second, so a beat may be this old when it arrives: time that it does not
# explain is left for the next one.
SLACK_MS = 3_000
# A member without a step by then counts as one that never reports steps.
FIRST_BEAT_MS = 30 * 60_000
# A member that reported steps and is silent for this time has stopped using its GPUs.
SILENT_MS = 60 * 60_000
# A member that, by its node, used nothing for this time counts as idle from the start of it.
IDLE_MS = 60_000
# Time between two comparisons of a gang's members, to find the wait that no member causes.
COMPARE_MS = 5_000

# Stops by the cluster, in which a job that saves loses nothing. The others are failures.
OURS = (
    StopCause.PREEMPT,
    StopCause.RESIZE,
    StopCause.MOVE,
    StopCause.DRAIN,
    StopCause.BUDGET,
)
FAULTS = (StopCause.FAILURE, StopCause.NODE_LOSS, StopCause.HANG)


def pending_parts(job: Job, member: Member, until_ms: int) -> list[Part]:
    """How its time since the mark is booked if no more information arrives."""
    ms = until_ms - member.mark_ms
    if ms <= 0:
        return []
    if member.account is not None:
        return [(member.account, ms, False)]
    told = member.told
    if told is None:
        firm_ms = 0
        if job.checkpoint_ms and member.running_ms >= 0:
            ran_ms = until_ms - member.running_ms
            saved_ms = member.running_ms + ran_ms // job.checkpoint_ms * job.checkpoint_ms
            firm_ms = max(0, saved_ms - member.mark_ms)
        return [(Account.USEFUL, firm_ms, True), (Account.USEFUL, ms - firm_ms, False)]
    if not told.steps:
        return [(Account.STARTUP, ms, False)]
    step_ms = ms if told.busy else min(ms, max(SLACK_MS, told.gap_ms))
    return [(Account.USEFUL, step_ms, False), (Account.IDLE, ms - step_ms, False)]


def settle(postings: Postings, job_id: str, job: Job, member: Member, until_ms: int) -> None:
    """Book its time up to then: no more information about it will arrive."""
    postings.book_member(job_id, job, member, pending_parts(job, member, until_ms))


def settle_hour(postings: Postings, job_id: str, job: Job) -> None:
    """At the end of an hour, book what no longer has to wait for a beat."""
    now_ms = postings.cluster.now_ms
    for member in job.members.values():
        told = member.told
        if member.silent_ms >= 0:
            continue  # it may be lost since then
        if member.account is not None:
            settle(postings, job_id, job, member, now_ms)
        elif told is None and now_ms - member.running_ms >= FIRST_BEAT_MS:
            parts = pending_parts(job, member, now_ms)
            # A job that says how often it saves is booked up to its last save.
            postings.book_member(job_id, job, member, parts[:1] if job.checkpoint_ms else parts)
        elif told is not None and now_ms - member.mark_ms >= SILENT_MS:
            settle(postings, job_id, job, member, now_ms)


def unheard(postings: Postings, started_ms: int) -> None:
    """A controller starts. Whether members have lived on without one, their nodes will show; if
    not, they may have been dead since the last controller was seen."""
    cluster = postings.cluster
    cluster.started_ms = started_ms
    for node in cluster.nodes.values():
        node.unheard = True
    for job in cluster.jobs.values():
        for member in job.members.values():
            if member.silent_ms < 0:
                member.silent_ms = cluster.now_ms


def hear_alive(postings: Postings, node_id: str, alive: Iterable[MemberRef]) -> None:
    """The first report of a node to this controller proves that these members have lived on."""
    node = postings.cluster.nodes.get(node_id)
    if node is None or not node.unheard:
        return
    node.unheard = False
    for ref in alive:
        job = postings.cluster.jobs.get(ref.job)
        member = job.members.get(ref.member) if job is not None else None
        if job is not None and job.attempt == ref.attempt and member is not None:
            member.silent_ms = -1


def unknown_since_ms(postings: Postings, member: Member) -> int:
    """Since when nobody knows whether it lives; -1 if somebody does. A book that is written again
    from the log alone hears no reports, but a node that is not heard falls silent within
    `UNHEARD_MS`."""
    cluster, node = postings.cluster, postings.cluster.nodes[member.node]
    late = cluster.now_ms - cluster.started_ms > UNHEARD_MS
    return -1 if node.unheard and late and node.health != "silent" else member.silent_ms


def lost(postings: Postings, job_id: str, job: Job, number: int, cause: StopCause) -> None:
    """It is gone; what it did since nobody knew of it is unknown."""
    member = job.members.get(number)
    since_ms = unknown_since_ms(postings, member) if member is not None else -1
    if member is not None and since_ms >= 0:
        finish_step(postings, job_id, job, member, since_ms, cause)
        member.account = Account.LOST
    release(postings, job_id, job, number, cause)


def hear(postings: Postings, progress: Progress) -> None:
    """A member reports where its time went. A repeated or late beat changes nothing."""
    ref, beat = progress.ref, progress.beat
    job = postings.cluster.jobs.get(ref.job)
    member = job.members.get(ref.member) if job is not None and job.attempt == ref.attempt else None
    if job is None or member is None or member.running_ms < 0 or job.owner.service:
        return
    told = member.told
    if told is None:
        told = member.told = LastBeat()
    if not beat.steps and not told.steps:
        told.busy = beat.busy
        return  # still starting: everything before the first step is start-up
    news = (
        beat.compute_us - told.compute,
        beat.wait_us - told.wait,
        beat.data_us - told.data,
        beat.save_us - told.save,
    )
    if member.account is Account.ASLEEP or told.napped:
        _book_nap(postings, ref.job, job, member, beat)
    elif min(news) >= 0 and sum(news) >= 1000:
        _book_news(postings, ref.job, job, member, beat, news)
    elif min(news) < 0:
        _remember(told, beat)  # it restarted its own count, or an old report came late
    told.busy = beat.busy
    if beat.saved_step >= beat.step > 0 and beat.saved_step > told.saved_step:
        told.saved_step = beat.saved_step
        postings.saved(job)


def hear_idle(postings: Postings, node_id: str, idle: Iterable[Idle]) -> None:
    """Only for members that send no beats: beats say more."""
    node = postings.cluster.nodes.get(node_id)
    if node is None:
        return
    now_ms = postings.cluster.now_ms
    told = {(one.ref.job, one.ref.member): one for one in idle if one.idle_ms >= IDLE_MS}
    for job_id, number in [each for each in node.idle if each not in told]:
        node.idle.remove((job_id, number))
        member = _member(postings, job_id, number)
        if member is not None and member.account is Account.IDLE:
            settle(postings, job_id, postings.cluster.jobs[job_id], member, now_ms)
            member.account = None
    for (job_id, number), one in told.items():
        member = _member(postings, job_id, number)
        if (
            member is not None
            and member.node == node_id
            and member.account is None
            and member.told is None
            and postings.cluster.jobs[job_id].attempt == one.ref.attempt
        ):
            settle(postings, job_id, postings.cluster.jobs[job_id], member, now_ms - one.idle_ms)
            member.account = Account.IDLE
            node.idle.append((job_id, number))


def _member(postings: Postings, job_id: str, number: int) -> Member | None:
    job = postings.cluster.jobs.get(job_id)
    return None if job is None or job.cause is not None else job.members.get(number)


def _book_news(
    postings: Postings, job_id: str, job: Job, member: Member, beat: Beat, news: tuple[int, ...]
) -> None:
    told = member.told
    assert told is not None, "a beat with news is remembered"
    now_ms = postings.cluster.now_ms
    span_ms = now_ms - member.mark_ms
    total_us = sum(news)
    explained_ms = min(total_us // 1000, span_ms)
    rest_ms = span_ms - explained_ms
    job.tellers += not told.steps
    _, wait_us, data_us, save_us = news
    blameless_us = _blameless_us(postings, job, beat, beat.steps - told.steps, told.napped_wait)
    straggler_us = max(0, wait_us - blameless_us)
    late = [
        (Account.STRAGGLER, straggler_us * explained_ms // total_us, False),
        (Account.IDLE, data_us * explained_ms // total_us, False),
        (Account.CHECKPOINT, save_us * explained_ms // total_us, False),
    ]
    useful_ms = explained_ms - sum(ms for _, ms, _ in late)
    parts: list[Part] = []
    if not told.steps:  # imports, connecting, restoring: all before the first step
        late[2] = (Account.STARTUP, late[2][1], False)
        parts.append((Account.STARTUP, rest_ms, False))
    elif rest_ms > SLACK_MS:
        account = member.account or (Account.USEFUL if told.busy else Account.IDLE)
        parts.append((account, rest_ms, False))
    told.gap_ms = max(told.gap_ms, span_ms if told.steps else 0)
    postings.book_member(job_id, job, member, [*parts, *late, (Account.USEFUL, useful_ms, False)])
    _remember(told, beat)


def _book_nap(postings: Postings, job_id: str, job: Job, member: Member, beat: Beat) -> None:
    """It counts time that the member slept, so it says nothing about the time since it is awake.
    Then it worked, because it has just made a step."""
    told = member.told
    assert told is not None, "a beat with news is remembered"
    if beat.steps > told.steps and member.account is not Account.ASLEEP:
        account = Account.USEFUL if told.steps else Account.STARTUP
        span_ms = postings.cluster.now_ms - member.mark_ms
        postings.book_member(job_id, job, member, [(account, span_ms, False)])
        told.napped = False
    job.tellers += not told.steps and beat.steps > 0
    told.napped_wait += max(0, beat.wait_us - told.wait)
    _remember(told, beat)


def _remember(told: LastBeat, beat: Beat) -> None:
    told.steps, told.step = beat.steps, beat.step
    told.compute, told.wait = beat.compute_us, beat.wait_us
    told.data, told.save = beat.data_us, beat.save_us


def _blameless_us(postings: Postings, job: Job, beat: Beat, steps: int, napped_wait: int) -> int:
    """A collective takes time even if all members arrive at once: no member causes the wait that
    even the least waiting member has in a step."""
    now_ms = postings.cluster.now_ms
    if now_ms - job.wait_ms >= COMPARE_MS or job.tellers >= 2 * job.wait_of:
        job.wait_ms, job.wait_of = now_ms, max(1, job.tellers)
        tellers = [m.told for m in job.members.values() if m.told is not None and m.told.steps]
        waits = [max(0, told.wait - told.napped_wait) // told.steps for told in tellers]
        if beat.steps:
            waits.append(max(0, beat.wait_us - napped_wait) // beat.steps)
        job.wait_us = min(waits, default=0)
    return job.wait_us * max(0, steps)


def finish_step(
    postings: Postings,
    job_id: str,
    job: Job,
    member: Member,
    until_ms: int,
    cause: StopCause | None,
) -> None:
    """No beat will explain its time up to then. In a gang that hangs or fails, silence counts as
    part of the failure."""
    parts = pending_parts(job, member, until_ms)
    if cause in FAULTS and member.account is None:
        swap = {Account.IDLE: Account.RECOMPUTE}
        parts = [(swap.get(account, account), ms, firm) for account, ms, firm in parts]
    postings.book_member(job_id, job, member, parts)


def release(
    postings: Postings, job_id: str, job: Job, number: int, cause: StopCause | None
) -> None:
    member = job.members.get(number)
    if member is None:
        return
    node = postings.cluster.nodes[member.node]
    settle_node(postings, member.node, node)
    finish_step(postings, job_id, job, member, postings.cluster.now_ms, cause)
    if job.asleep_ms >= 0:
        settle_nap(postings, job_id, job)
    if not member.lent:
        hold(postings, job_id, member, -1)
    node.whole -= job.whole_nodes
    here = node.members[job_id]
    here.remove(number)
    if not here:
        del node.members[job_id]
    del job.members[number]


# Events of nodes, of GPUs that are set aside, and of tenants without budget left.


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


def _unreserved(postings: Postings, event: JobUnreserved) -> None:
    unreserve(postings, postings.cluster.jobs[event.job])


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
        if unknown_since_ms(postings, member) < 0:
            member.silent_ms = postings.cluster.now_ms
    node.health = "silent"
    _judge_away(node)


def _lost(postings: Postings, event: NodeLost) -> None:
    """What its members did after it fell silent is unknown."""
    node = _changing(postings, event.node)
    for job_id, number in _members_of(node):
        job = postings.cluster.jobs[job_id]
        lost(postings, job_id, job, number, StopCause.NODE_LOSS)
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
    JobUnreserved: _unreserved,
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
        settle(postings, event.job, job, member, now_ms)
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
        settle(postings, event.job, job, member, now_ms)
        hold(postings, event.job, member, -1)
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
        settle(postings, event.job, job, member, now_ms)
        member.gpus = event.gpus[number]
        member.milli, member.lent = len(member.gpus) * member.share, 0
        hold(postings, event.job, member, 1)


def _awake(postings: Postings, event: JobAwake) -> None:
    """The time is not run time: a job that says how often it saves did not save in its sleep."""
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    for member in job.members.values():
        settle(postings, event.job, job, member, now_ms)
        member.account, member.before = member.before, None
        member.running_ms += now_ms - job.dozed_ms
    job.dozed_ms = -1


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
