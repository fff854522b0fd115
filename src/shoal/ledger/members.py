"""Where the time of a member goes: by its beats while it tells of its work, by its end if not."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.ledger.accounts import Account
from shoal.ledger.mirror import Job, Member, Told
from shoal.ledger.nodes import settle_node
from shoal.ledger.pages import Pages, Part
from shoal.model.job import StopCause
from shoal.model.progress import Beat, Progress
from shoal.model.report import Idle

# Reports come every second, so a beat may be so old when it is heard: time that it does not
# explain is left for the next one.
SLACK_MS = 3_000
# One that has not told of a step by then is taken for one that never will.
FIRST_BEAT_MS = 30 * 60_000
# One that told of steps and says nothing for so long has stopped using its GPUs.
SILENT_MS = 60 * 60_000
# One whose node says that it used nothing for so long is idle, and was from then on.
IDLE_MS = 60_000
# How often the members of a gang are compared to see what waiting is nobody's fault.
COMPARE_MS = 5_000

# Stops of ours, which a job that saves its work survives whole; the others are failures.
OURS = (
    StopCause.PREEMPT,
    StopCause.RESIZE,
    StopCause.MOVE,
    StopCause.DRAIN,
    StopCause.BUDGET,
)
FAULTS = (StopCause.FAILURE, StopCause.NODE_LOSS, StopCause.HANG)


def pending_parts(job: Job, member: Member, until_ms: int) -> list[Part]:
    """What its time since the mark is taken for, as long as nothing more is known."""
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


def settle(pages: Pages, job_id: str, job: Job, member: Member, until_ms: int) -> None:
    """Nothing more will be told of its time up to then."""
    pages.book_member(job_id, job, member, pending_parts(job, member, until_ms))


def settle_hour(pages: Pages, job_id: str, job: Job) -> None:
    """At the end of an hour: what need not wait for a beat any more."""
    now_ms = pages.mirror.now_ms
    for member in job.members.values():
        told = member.told
        if member.account is not None:
            settle(pages, job_id, job, member, now_ms)
        elif told is None and now_ms - member.running_ms >= FIRST_BEAT_MS:
            parts = pending_parts(job, member, now_ms)
            # Who says how often it saves is booked up to its last save: the rest may get lost.
            pages.book_member(job_id, job, member, parts[:1] if job.checkpoint_ms else parts)
        elif told is not None and now_ms - member.mark_ms >= SILENT_MS:
            settle(pages, job_id, job, member, now_ms)


def hear(pages: Pages, progress: Progress) -> None:
    """A member says where its time went. What is heard twice or late tells nothing new."""
    ref, beat = progress.ref, progress.beat
    job = pages.mirror.jobs.get(ref.job)
    member = job.members.get(ref.member) if job is not None and job.attempt == ref.attempt else None
    if job is None or member is None or member.running_ms < 0 or job.owner.service:
        return
    told = member.told
    if told is None:
        told = member.told = Told()
    if not beat.steps and not told.steps:
        told.busy = beat.busy
        return  # it is still starting: all that goes before the first step is start-up
    news = (
        beat.compute_us - told.compute,
        beat.wait_us - told.wait,
        beat.data_us - told.data,
        beat.save_us - told.save,
    )
    if min(news) >= 0 and sum(news) >= 1000:
        _book_news(pages, ref.job, job, member, beat, news)
    elif min(news) < 0:
        _remember(told, beat)  # it began anew within itself, or an old report came late
    told.busy = beat.busy
    if beat.saved_step >= beat.step > 0 and beat.saved_step > told.saved_step:
        told.saved_step = beat.saved_step
        pages.saved(job)


def hear_idle(pages: Pages, node_id: str, idle: Iterable[Idle]) -> None:
    """Only of those that tell nothing themselves: beats say more."""
    node = pages.mirror.nodes.get(node_id)
    if node is None:
        return
    now_ms = pages.mirror.now_ms
    told = {(one.ref.job, one.ref.member): one for one in idle if one.idle_ms >= IDLE_MS}
    for job_id, number in [each for each in node.idle if each not in told]:
        node.idle.remove((job_id, number))
        member = _member(pages, job_id, number)
        if member is not None and member.account is Account.IDLE:
            settle(pages, job_id, pages.mirror.jobs[job_id], member, now_ms)
            member.account = None
    for (job_id, number), one in told.items():
        member = _member(pages, job_id, number)
        if (
            member is not None
            and member.node == node_id
            and member.account is None
            and member.told is None
            and pages.mirror.jobs[job_id].attempt == one.ref.attempt
        ):
            settle(pages, job_id, pages.mirror.jobs[job_id], member, now_ms - one.idle_ms)
            member.account = Account.IDLE
            node.idle.append((job_id, number))


def _member(pages: Pages, job_id: str, number: int) -> Member | None:
    job = pages.mirror.jobs.get(job_id)
    return None if job is None or job.cause is not None else job.members.get(number)


def _book_news(
    pages: Pages, job_id: str, job: Job, member: Member, beat: Beat, news: tuple[int, ...]
) -> None:
    told = member.told
    assert told is not None, "who tells news has told"
    now_ms = pages.mirror.now_ms
    span_ms = now_ms - member.mark_ms
    total_us = sum(news)
    explained_ms = min(total_us // 1000, span_ms)
    rest_ms = span_ms - explained_ms
    job.tellers += not told.steps
    _, wait_us, data_us, save_us = news
    blameless_us = _blameless_us(pages, job, beat, beat.steps - told.steps)
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
    pages.book_member(job_id, job, member, [*parts, *late, (Account.USEFUL, useful_ms, False)])
    _remember(told, beat)


def _remember(told: Told, beat: Beat) -> None:
    told.steps, told.step = beat.steps, beat.step
    told.compute, told.wait = beat.compute_us, beat.wait_us
    told.data, told.save = beat.data_us, beat.save_us


def _blameless_us(pages: Pages, job: Job, beat: Beat, steps: int) -> int:
    """A collective takes its time even when all come at once: what the member that waits least
    waits in a step is nobody's fault."""
    now_ms = pages.mirror.now_ms
    if now_ms - job.wait_ms >= COMPARE_MS or job.tellers >= 2 * job.wait_of:
        job.wait_ms, job.wait_of = now_ms, max(1, job.tellers)
        tellers = [m.told for m in job.members.values() if m.told is not None and m.told.steps]
        waits = [told.wait // told.steps for told in tellers]
        if beat.steps:
            waits.append(beat.wait_us // beat.steps)
        job.wait_us = min(waits, default=0)
    return job.wait_us * max(0, steps)


def finish_step(
    pages: Pages, job_id: str, job: Job, member: Member, until_ms: int, cause: StopCause | None
) -> None:
    """Its beats will not explain the time up to then any more. In a gang that hangs or fails,
    silence is the failure's."""
    parts = pending_parts(job, member, until_ms)
    if cause in FAULTS and member.account is None:
        swap = {Account.IDLE: Account.RECOMPUTE}
        parts = [(swap.get(account, account), ms, firm) for account, ms, firm in parts]
    pages.book_member(job_id, job, member, parts)


def release(pages: Pages, job_id: str, job: Job, number: int, cause: StopCause | None) -> None:
    member = job.members.get(number)
    if member is None:
        return
    node = pages.mirror.nodes[member.node]
    settle_node(pages, member.node, node)
    finish_step(pages, job_id, job, member, pages.mirror.now_ms, cause)
    for gpu in member.gpus:
        node.held[gpu] -= member.share
    node.whole -= job.whole_nodes
    here = node.members[job_id]
    here.remove(number)
    if not here:
        del node.members[job_id]
    del job.members[number]
