"""Where a member's time goes: by its beats if it sends any, otherwise by its end."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.ledger.accounts import Account
from shoal.ledger.book_state import Job, LastBeat, Member
from shoal.ledger.free_time import settle_node
from shoal.ledger.postings import Part, Postings, settle_nap
from shoal.model.job import MemberRef, StopCause
from shoal.model.progress import Beat, Progress
from shoal.model.report import Idle

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
    for gpu in member.gpus if not member.lent else ():
        node.held[gpu] -= member.share
    node.whole -= job.whole_nodes
    here = node.members[job_id]
    here.remove(number)
    if not here:
        del node.members[job_id]
    del job.members[number]
