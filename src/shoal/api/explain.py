"""Explains what happened to a job, from the log of events, even long after its end."""

from __future__ import annotations

import shlex

from litestar import Controller

from shoal.api.handling import aside, handles
from shoal.api.reach import Reach, seen_events
from shoal.api.views import Samples, bound_of, progress_view, seen_remedies
from shoal.calls.histories import WhyView
from shoal.calls.jobs import JobCalls
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.answers.advice import advise
from shoal.core.answers.explain import attempts_of, learned_of, no_tail
from shoal.core.answers.outlook import outlook
from shoal.core.answers.why import Waits, explain, reason_of
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.log import Recorded, published
from shoal.core.state.events.nodes import NodeChecked, NodeJudged, NodeLost
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.model.explanation import Explanation
from shoal.model.job import Job, MemberRef, Phase

HISTORY_MAX = 20_000  # events of a job that are read
WHY_EVENTS_MAX = 200  # of these, how many are shown
NODES_MAX = 64  # nodes whose events are read
NODE_EVENTS_MAX = 500  # events of each node
TAIL_BYTES = 16 * 1024
COMMAND_CHARACTERS_MAX = 500
AFTER_END_MS = 3_600_000  # what happens to its nodes later than this has other causes


class Explanations(Controller):
    @handles(JobCalls.explanation)
    async def explanation(self, reach: Reach, history: History, job_id: str) -> Explanation:
        loop = reach.loop
        reach.job(job_id)
        read = await aside(lambda: _read(loop, job_id))
        await loop.settled()
        return explanation_of(reach, reach.job(job_id), read, history.newest)


def why_view(
    reach: Reach, job: Job, told: list[Recorded] | None = None, samples: Samples | None = None
) -> WhyView:
    """`told` is the job's history, if it was already read."""
    loop = reach.loop
    now_ms = loop.clock.now_ms()
    seen = outlook(loop.state, job, loop.policy, now_ms)
    told = loop.store.history(job.id, HISTORY_MAX) if told is None else told
    told = seen_events(reach, told, {job.id: job.spec.tenant})
    return WhyView(
        id=job.id,
        state=job.state,
        early_ms=seen.early_ms,
        late_ms=seen.late_ms,
        start=seen.start,
        why=_with_holders(reach, job, reach.text(seen.why), now_ms),
        progress=progress_view(loop, job, samples),
        events=published(told[-WHY_EVENTS_MAX:]),
        attempts=attempts_of((one.event for one in told), no_tail),
        labels=job.spec.labels,
        notes=list(job.notes),
        remedies=seen_remedies(reach, advise(loop.state, job, now_ms)),
    )


def _with_holders(reach: Reach, job: Job, why: str, now_ms: int) -> str:
    """A job that waits for room names the jobs that hold it."""
    if job.phase is not Phase.WAITING or job.elements is not None:
        return why
    reason = reason_of(reach.loop.state, job, reach.loop.policy, now_ms)
    held = reach.holders(job) if reason and reason.kind is Waits.ROOM else ""
    return f"{why}; {held}" if held else why


def _read(loop: ControlLoop, job_id: str) -> tuple[list[Recorded], list[Recorded]]:
    own = loop.store.history(job_id, HISTORY_MAX)
    return own, _with_nodes(loop, own)


def explanation_of(
    reach: Reach,
    job: Job,
    read: tuple[list[Recorded], list[Recorded]] | None = None,
    samples: Samples | None = None,
) -> Explanation:
    loop = reach.loop
    own, around = read or _read(loop, job.id)
    seen = seen_events(reach, around, {job.id: job.spec.tenant})
    events = [recorded.event for recorded in seen]
    now_ms = loop.clock.now_ms()
    until_ms = (job.finished_ms if job.finished_ms is not None else now_ms) + AFTER_END_MS
    events = [event for event in events if event.at_ms <= until_ms]

    def tail(attempt: int, member: int) -> str:
        read = loop.logs.read(MemberRef(job.id, attempt, member), -TAIL_BYTES)
        return read.data.decode("utf-8", "replace")

    attempts = attempts_of(events, tail)
    if attempts and attempts[-1].attempt == job.attempt and job.phase is Phase.RUNNING:
        attempts[-1].bound = bound_of(loop, job, samples or {})
    command = shlex.join(job.spec.command)
    return Explanation(
        id=job.id,
        name=job.spec.name or "",
        tenant=job.spec.tenant,
        state=job.state,
        why=reach.text(explain(loop.state, job, loop.policy, now_ms)),
        command=command[:COMMAND_CHARACTERS_MAX],
        members=job.spec.members,
        submitted_ms=job.submitted_ms,
        finished_ms=job.finished_ms,
        now_ms=now_ms,
        code=job.code,
        complete=bool(own) and isinstance(own[0].event, JobSubmitted | ArraySubmitted),
        attempts=attempts,
        learned=learned_of(events, job.id),
        labels=job.spec.labels,
        notes=list(job.notes),
    )


def _with_nodes(loop: ControlLoop, own: list[Recorded]) -> list[Recorded]:
    """The job's events, and those of its nodes since the job was first placed on them."""
    first: dict[str, int] = {}
    for recorded in own:
        if isinstance(recorded.event, JobPlaced):
            for slice_ in recorded.event.slices:
                first.setdefault(slice_.node, recorded.seq)
    found = list(own)
    for node, seq in list(first.items())[:NODES_MAX]:
        for recorded in loop.store.events(seq, NODE_EVENTS_MAX, node=node):
            if isinstance(recorded.event, NodeLost | NodeChecked | NodeJudged):
                found.append(recorded)
    return sorted(found, key=lambda recorded: recorded.seq)
