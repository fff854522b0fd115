"""Jobs that sleep: they hold GPUs without work while they fall asleep and wake, and none between.

How long a job slept, and how much GPU time it lent out by that, is a memo: others hold that time,
or it is free, so it is not part of any sum.
"""

from __future__ import annotations

import msgspec

from shoal.ledger import members
from shoal.ledger.accounts import Account
from shoal.ledger.book_state import Job, Member
from shoal.ledger.free_time import settle_node
from shoal.ledger.naps import settle_nap
from shoal.ledger.node_events import Handlers, unclaim
from shoal.ledger.postings import Postings
from shoal.model import events as ev


def _dozing(postings: Postings, event: ev.JobDozing) -> None:
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


def _asleep(postings: Postings, event: ev.JobAsleep | ev.WakeRefused) -> None:
    job, now_ms = postings.cluster.jobs[event.job], postings.cluster.now_ms
    for member in job.members.values():
        members.settle(postings, event.job, job, member, now_ms)
        _hold(postings, member, -1)
        member.lent, member.milli = member.milli, 0
    job.asleep_ms = now_ms


def _touched(postings: Postings, event: ev.JobTouched) -> None:
    if not event.wants:
        unclaim(postings, postings.cluster.jobs[event.job])


def _waking(postings: Postings, event: ev.JobWaking) -> None:
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


def _awake(postings: Postings, event: ev.JobAwake) -> None:
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
    ev.JobDozing: _dozing,
    ev.JobAsleep: _asleep,
    ev.JobTouched: _touched,
    ev.JobWaking: _waking,
    ev.WakeRefused: _asleep,
    ev.JobAwake: _awake,
}
