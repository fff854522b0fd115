"""Makes bars of events: which member held which GPUs from when to when, and why that ended.

Only the events that begin or end a hold matter. The rest of the state's rules are not repeated
here; the storm compares the bars with what the state holds at every moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.state.events.base import EventBase, NodeEvent
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import (
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.runs import (
    JobAdopted,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.sleep import JobAsleep, JobDozing, JobWaking, SleepRefused, WakeRefused
from shoal.core.state.state import State
from shoal.model.health import Standing
from shoal.model.job import Phase
from shoal.model.node import NodeHealth, NodeIntent, node_word
from shoal.model.resources import Slice

# Causes beside those of `StopCause`.
SUCCEEDED, FAILURE, NODE_LOSS = "succeeded", "failure", "node-loss"
LOST, ASLEEP = "lost", "asleep"
SIGNALS = range(128 + 1, 128 + 65)  # exit codes of a member that a signal ended


class Bar(msgspec.Struct):
    """A member held these GPUs of a node. `number` counts them from the first bar on."""

    number: int
    node: str
    gpus: tuple[int, ...]
    milli: int  # the share of each GPU
    job: str
    attempt: int
    member: int
    begin_ms: int
    end_ms: int | None = None
    cause: str = ""
    why: str = ""


class Span(msgspec.Struct):
    """A node was in a state other than ready."""

    number: int
    node: str
    state: str
    begin_ms: int
    end_ms: int | None = None
    why: str = ""


class JobMark(msgspec.Struct):
    """What must be remembered of a job beside its open bars: the GPUs of members that hold none but
    may hold them again (asleep, or given up with their node), and why it is being stopped."""

    away: dict[int, Bar] = {}
    cause: str = ""
    why: str = ""


class NodeMark(msgspec.Struct):
    """What a node's state follows from, and the reasons."""

    health: NodeHealth = NodeHealth.JOINING
    intent: NodeIntent = NodeIntent.OPEN
    standing: Standing = Standing.OK
    leaving: bool = False
    health_why: str = ""
    intent_why: str = ""
    standing_why: str = ""

    @property
    def state(self) -> str:
        return node_word(self.health, self.standing, self.intent)

    @property
    def why(self) -> str:
        if self.health is not NodeHealth.READY:
            return self.health_why
        return self.standing_why if self.state == Standing.QUARANTINED else self.intent_why


class Changed(msgspec.Struct):
    """What has changed since the last `drain`; None: no longer there."""

    bars: list[Bar] = []
    spans: list[Span] = []
    jobs: dict[str, JobMark | None] = {}
    nodes: dict[str, NodeMark] = {}


class Book:
    """Open bars and marks; what has ended is in the store. Events about jobs that it does not know
    are left out, so it can begin anywhere."""

    def __init__(self) -> None:
        self.open: dict[str, dict[int, Bar]] = {}  # by job and member
        self.held: dict[str, dict[tuple[str, int], Bar]] = {}  # the same by node
        self.jobs: dict[str, JobMark] = {}
        self.nodes: dict[str, NodeMark] = {}
        self.spans: dict[str, Span] = {}
        self.next_bar = self.next_span = 1
        self._bars: dict[int, Bar] = {}
        self._spans: dict[int, Span] = {}
        self._marked: dict[str, None] = {}
        self._nodes: dict[str, None] = {}

    def take(self, event: Event) -> None:
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def drain(self) -> Changed:
        """Bars of no length are left out: nobody could see them."""
        told = Changed(
            bars=[bar for bar in self._bars.values() if bar.end_ms != bar.begin_ms],
            spans=[span for span in self._spans.values() if span.end_ms != span.begin_ms],
            jobs={job: self.jobs.get(job) for job in self._marked},
            nodes={node: self.nodes[node] for node in self._nodes},
        )
        self._bars, self._spans, self._marked, self._nodes = {}, {}, {}, {}
        return told

    # -- a beginning -----------------------------------------------------------------------

    def seed(self, state: State, at_ms: int) -> None:
        """Begin with what the state holds, which may have begun earlier."""
        for node in state.order:
            mark = self.nodes[node.id] = NodeMark(
                health=node.health,
                intent=node.intent,
                standing=node.record.standing,
                leaving=node.leaving,
                health_why=node.why,
                standing_why=node.record.why,
            )
            self._nodes[node.id] = None
            self._show(node.id, mark, min(at_ms, node.since_ms or at_ms))
        for job in state.jobs.values():
            for number, member in enumerate(job.members):
                slice_ = member.slice
                if member.over or not slice_.gpus or not job.active:
                    continue
                bar = self._bar(job.id, job.attempt, number, slice_, at_ms)
                if member.lent:
                    self._mark(job.id).away[number] = bar
                else:
                    begin_ms = job.awake_ms if job.naps else job.placed_ms
                    bar.begin_ms = min(at_ms, begin_ms or at_ms)
                    self._hold(bar)
            if job.stop_cause is not None and job.phase is Phase.STOPPING:
                mark_ = self._mark(job.id)
                mark_.cause, mark_.why = job.stop_cause.value, job.why

    def resume(self, bar: Bar) -> None:
        """One that was open when the store was last written."""
        self.open.setdefault(bar.job, {})[bar.member] = bar
        self.held.setdefault(bar.node, {})[bar.job, bar.member] = bar

    # -- bars ------------------------------------------------------------------------------

    def _bar(self, job: str, attempt: int, member: int, slice_: Slice, at_ms: int) -> Bar:
        bar = Bar(
            self.next_bar,
            slice_.node,
            slice_.gpus,
            slice_.gpu_milli,
            job,
            attempt,
            member,
            at_ms,
        )
        self.next_bar += 1
        return bar

    def _hold(self, bar: Bar) -> None:
        self.resume(bar)
        self._bars[bar.number] = bar

    def _again(self, bar: Bar, gpus: tuple[int, ...], at_ms: int) -> None:
        slice_ = Slice(bar.node, gpus=gpus, gpu_milli=bar.milli)
        self._hold(self._bar(bar.job, bar.attempt, bar.member, slice_, at_ms))

    def _end(self, job: str, member: int, at_ms: int, cause: str, why: str) -> Bar | None:
        of_job = self.open.get(job, {})
        bar = of_job.pop(member, None)
        if bar is None:
            return None
        if not of_job:
            del self.open[job]
        del self.held[bar.node][job, member]
        bar.end_ms, bar.cause, bar.why = at_ms, cause, why
        self._bars[bar.number] = bar
        return bar

    def _mark(self, job: str) -> JobMark:
        self._marked[job] = None
        return self.jobs.setdefault(job, JobMark())

    def _forget(self, job: str) -> None:
        if self.jobs.pop(job, None) is not None:
            self._marked[job] = None

    def _stays_away(self, job: str, member: int) -> None:
        mark = self.jobs.get(job)
        if mark is not None and mark.away.pop(member, None) is not None:
            self._marked[job] = None

    # -- events of jobs --------------------------------------------------------------------

    def placed(self, event: JobPlaced) -> None:
        self._forget(event.job)
        for number, slice_ in enumerate(event.slices):
            if slice_.gpus:
                self._hold(self._bar(event.job, event.attempt, number, slice_, event.at_ms))

    def stopping(self, event: JobStopping) -> None:
        if event.job in self.open or event.job in self.jobs:
            mark = self._mark(event.job)
            mark.cause, mark.why = event.cause.value, event.why

    def exited(self, event: MemberExited) -> None:
        self._stays_away(event.job, event.member)
        mark = self.jobs.get(event.job)
        if mark is not None and mark.cause and (event.stopped or event.code):
            cause, why = mark.cause, mark.why
        elif event.code:
            cause, why = FAILURE, _failed(event)
        elif event.stopped:
            cause, why = LOST, event.why or "it was stopped"
        else:
            cause, why = SUCCEEDED, event.why or "succeeded"
        self._end(event.job, event.member, event.at_ms, cause, why)

    def lost(self, event: MemberLost) -> None:
        mark = self.jobs.get(event.job)
        stopped = mark is not None and mark.cause and not event.fault
        cause, why = (mark.cause, mark.why) if mark and stopped else (LOST, event.why)
        self._give_up(event.job, event.member, event.at_ms, cause, why)

    def _give_up(self, job: str, member: int, at_ms: int, cause: str, why: str) -> None:
        """It may turn out to live."""
        bar = self._end(job, member, at_ms, cause, why)
        if bar is not None:
            self._mark(job).away[member] = bar

    def dozing(self, event: JobDozing) -> None:
        if event.job in self.open:
            mark = self._mark(event.job)
            mark.cause, mark.why = ASLEEP, event.why

    def asleep(self, event: JobAsleep | WakeRefused) -> None:
        mark = self._mark(event.job)
        for member in list(self.open.get(event.job, ())):
            bar = self._end(event.job, member, event.at_ms, ASLEEP, mark.why or event.why)
            if bar is not None:
                mark.away[member] = bar
        mark.cause = mark.why = ""

    def stays_awake(self, event: SleepRefused) -> None:
        self._forget(event.job)

    def waking(self, event: JobWaking) -> None:
        mark = self.jobs.get(event.job)
        for member, bar in (mark.away if mark is not None else {}).items():
            self._again(bar, event.gpus[member], event.at_ms)
        self._forget(event.job)

    def adopted(self, event: JobAdopted) -> None:
        mark = self.jobs.get(event.job)
        for bar in mark.away.values() if mark is not None else ():
            self._again(bar, bar.gpus, event.at_ms)
        self._forget(event.job)

    def requeued(self, event: JobRequeued) -> None:
        mark = self.jobs.get(event.job)
        if mark is not None and not mark.away:
            self._forget(event.job)
        elif mark is not None:
            mark.cause = mark.why = ""
            self._marked[event.job] = None

    def finished(self, event: JobFinished) -> None:
        self._forget(event.job)

    # -- events of nodes -------------------------------------------------------------------

    def joined(self, event: NodeJoined) -> None:
        mark = self.nodes.setdefault(event.node, NodeMark())
        if mark.intent is NodeIntent.REMOVED or mark.leaving:
            mark.intent, mark.leaving, mark.intent_why = NodeIntent.OPEN, False, ""
        self._health(event, NodeHealth.JOINING)

    def ready(self, event: NodeReady) -> None:
        self._health(event, NodeHealth.READY)

    def silent(self, event: NodeSilent) -> None:
        self._health(event, NodeHealth.SILENT)

    def node_lost(self, event: NodeLost) -> None:
        self._health(event, NodeHealth.LOST)
        how = "died" if event.dead else "was given up"
        why = f"node {event.node} {how}" + (f": {event.why}" if event.why else "")
        for job, member in list(self.held.get(event.node, ())):
            self._give_up(job, member, event.at_ms, NODE_LOSS, why)

    def intended(self, event: NodeIntended) -> None:
        mark = self.nodes.setdefault(event.node, NodeMark())
        mark.intent, mark.leaving, mark.intent_why = event.intent, event.leaving, event.why
        self._changed(event, mark)

    def judged(self, event: NodeJudged) -> None:
        mark = self.nodes.setdefault(event.node, NodeMark())
        mark.standing, mark.standing_why = event.record.standing, event.record.why or event.why
        self._changed(event, mark)

    def _health(self, event: NodeEvent, health: NodeHealth) -> None:
        mark = self.nodes.setdefault(event.node, NodeMark())
        mark.health, mark.health_why = health, event.why
        self._changed(event, mark)

    def _changed(self, event: NodeEvent, mark: NodeMark) -> None:
        self._nodes[event.node] = None
        self._show(event.node, mark, event.at_ms)

    def _show(self, node: str, mark: NodeMark, at_ms: int) -> None:
        span = self.spans.get(node)
        if span is not None and (span.state, span.why) == (mark.state, mark.why):
            return
        if span is not None:
            span.end_ms = at_ms
            self._spans[span.number] = self.spans.pop(node)
        if mark.state != NodeHealth.READY:
            span = self.spans[node] = Span(self.next_span, node, mark.state, at_ms, why=mark.why)
            self.next_span += 1
            self._spans[span.number] = span


def _failed(event: MemberExited) -> str:
    signal = event.code in SIGNALS
    how = f"ended by signal {event.code - 128}" if signal else f"failed with code {event.code}"
    return how + (f": {event.why}" if event.why else "")


HANDLERS: dict[type[EventBase], Callable[[Book, Any], None]] = {
    JobPlaced: Book.placed,
    JobStopping: Book.stopping,
    MemberExited: Book.exited,
    MemberLost: Book.lost,
    JobDozing: Book.dozing,
    JobAsleep: Book.asleep,
    WakeRefused: Book.asleep,
    SleepRefused: Book.stays_awake,
    JobWaking: Book.waking,
    JobAdopted: Book.adopted,
    JobRequeued: Book.requeued,
    JobFinished: Book.finished,
    NodeJoined: Book.joined,
    NodeReady: Book.ready,
    NodeSilent: Book.silent,
    NodeLost: Book.node_lost,
    NodeIntended: Book.intended,
    NodeJudged: Book.judged,
}
# As the log calls them; a silent node had another name before 0.2.
KINDS = (*(kind.__name__ for kind in HANDLERS), "NodeSuspected")
# Those after which a job holds GPUs.
OPENING = (JobPlaced, JobAdopted, JobWaking)
