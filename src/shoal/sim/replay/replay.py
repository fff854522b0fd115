"""The replay: the whole `core.step` on virtual time, over a world that follows from its seed.

All that happens in one instant is reported in one step; the step's commands go back to the
world, and its events into the books. Nothing grows with the jobs that have finished, but for
some integers each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.core.answers.why import verify_reasons, waiting_reason
from shoal.core.phases.admit import impossible
from shoal.core.scheduling.order import ORDERINGS
from shoal.core.scheduling.predict import predict
from shoal.core.state.apply_room import add_node
from shoal.core.state.invariants import verify
from shoal.core.state.state import Node, State
from shoal.core.step import Step, step
from shoal.model.events import (
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobSubmitted,
    MemberExited,
    MemberLost,
    NodeLost,
)
from shoal.model.job import Job, JobSpec, Phase
from shoal.model.job import Outcome as JobOutcome
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.prices import PriceList
from shoal.model.report import Refused, Report, Submit
from shoal.sim.replay.clusters import NEVER_MS, Conditions
from shoal.sim.replay.ledger import ReplayLedger
from shoal.sim.replay.metrics import Levels, Outcome
from shoal.sim.replay.traces import Arrival, Trace, TraceError
from shoal.sim.replay.world import Attempt, Key, SimNode, Truth, World

ASKED = 1000  # about so many jobs ask when they will start, if they all have to wait
PROGRESS_STEPS = 256  # how often the caller hears how far it is

Progress = Callable[[int, int], None]  # jobs done, virtual time in ms


def replay(
    trace: Trace,
    nodes: Sequence[NodeSpec],
    policy: Policy,
    conditions: Conditions | None = None,
    *,
    name: str = "",
    seed: int = 0,
    check_every: int = 0,
    progress: Progress | None = None,
    prices: PriceList | None = None,
) -> Outcome:
    """Play the trace to its end. `check_every` so many steps the invariants are checked, too."""
    replay_ = Replay(trace, nodes, policy, conditions or Conditions(), name, seed, prices)
    return replay_.run(check_every, progress)


def too_large(trace: Trace, nodes: Sequence[NodeSpec]) -> dict[int, str]:
    """By row, the jobs that could never start on these nodes, and why."""
    state = State()
    for index, spec in enumerate(nodes):
        add_node(state, Node(spec=spec, index=index, incarnation=1))
    verdicts: dict[int, str] = {}  # by the identity of the spec: equal ones are mostly one
    rows = {}
    for arrival in trace.arrivals:
        key = id(arrival.spec)
        if key not in verdicts:
            problem = impossible(state, arrival.spec)
            verdicts[key] = f"{problem.field} {problem.message}" if problem is not None else ""
        if verdicts[key]:
            rows[arrival.row] = verdicts[key]
    return rows


class Replay:
    def __init__(
        self,
        trace: Trace,
        nodes: Sequence[NodeSpec],
        policy: Policy,
        conditions: Conditions,
        name: str,
        seed: int,
        prices: PriceList | None = None,
    ) -> None:
        self.trace = trace
        # Nodes speak when they have something to say: no silence means anything in this world.
        self.policy = msgspec.structs.replace(
            policy, suspect_after_ms=NEVER_MS, grace_ms=2 * NEVER_MS
        )
        self.state = State()
        self.levels = Levels(nodes)
        self.world = World(nodes, conditions, self.levels, seed)
        self.ledger = ReplayLedger(prices or PriceList(), trace.began_ms, self.policy)
        self.outcome = Outcome(name, self.levels, self.world.failures)
        self.truths: dict[str, Truth] = {}
        self.now_ms = 0
        self.wake_ms = NEVER_MS
        self.next_arrival = 0
        self._told = 0  # arrivals whose acceptance was seen
        self._handlers: dict[type, Callable[[Any], None]] = {
            JobSubmitted: self._job_submitted,
            JobPlaced: self._job_placed,
            JobRequeued: self._job_requeued,
            JobFinished: self._job_finished,
            MemberExited: self._member_over,
            MemberLost: self._member_over,
            NodeLost: self._node_lost,
        }

    def run(self, check_every: int = 0, progress: Progress | None = None) -> Outcome:
        total, steps = len(self.trace.arrivals), 0
        while self.next_arrival < total or self.truths:
            self.now_ms = self._next_time()
            self.levels.advance(self.now_ms)
            done = self._step(self._report())
            steps += 1
            if check_every and steps % check_every == 0:
                verify(self.state)
                if done.wake_ms is None or done.wake_ms > self.now_ms:
                    verify_reasons(self.state, self.policy, self.now_ms)
            if progress is not None and steps % PROGRESS_STEPS == 0:
                progress(len(self.outcome.records), self.now_ms)
        self.outcome.ledger = self.ledger.view(self.now_ms)
        return self.outcome

    def _next_time(self) -> int:
        next_ms = min(self.wake_ms, self.world.next_ms(), self.ledger.next_ms)
        if self.next_arrival < len(self.trace.arrivals):
            next_ms = min(next_ms, self.trace.arrivals[self.next_arrival].submit_ms)
        elif not self.world.attempts and not self.world.broken and self.wake_ms >= NEVER_MS:
            next_ms = NEVER_MS  # only failures are left to come, and they help nobody
        if next_ms >= NEVER_MS:
            raise self._stuck()
        return max(next_ms, self.now_ms)

    def _stuck(self) -> TraceError:
        job = self.state.jobs[next(iter(self.truths))]
        reason = waiting_reason(self.state, job, self.policy, self.now_ms)
        row = self.truths[job.id].arrival.row
        return TraceError(f"{self.trace.name}: row {row}: the job waits for ever: {reason}")

    def _report(self) -> Report:
        nodes, gone = self.world.look(self.now_ms)
        arrivals, first = self.trace.arrivals, self.next_arrival
        end = len(arrivals)
        while self.next_arrival < end and arrivals[self.next_arrival].submit_ms <= self.now_ms:
            self.next_arrival += 1
        requests = [Submit(self._spec(arrival)) for arrival in arrivals[first : self.next_arrival]]
        spendings = self.ledger.spendings(self.now_ms)
        return Report(requests=tuple(requests), nodes=nodes, gone=gone, spendings=spendings)

    def _spec(self, arrival: Arrival) -> JobSpec:
        """A policy that needs to know how long jobs take is told the truth; where jobs save their
        work, they are willing to be stopped."""
        every_ms = arrival.checkpoint_ms
        if every_ms is None:
            every_ms = self.world.conditions.checkpoint_ms
        saves = every_ms < NEVER_MS
        return msgspec.structs.replace(
            arrival.spec,
            preemptible=arrival.spec.preemptible or (saves and not arrival.lived),
            checkpoint_ms=max(1, every_ms) if saves else 0,
            estimate_ms=arrival.work_ms if ORDERINGS[self.policy.order].clairvoyant else 0,
        )

    def _step(self, report: Report) -> Step:
        begin_ns = time.perf_counter_ns()
        done = step(self.state, report, self.policy, self.now_ms)
        self.outcome.step_ns.append(time.perf_counter_ns() - begin_ns)
        for offset, answer in enumerate(done.answers):
            if isinstance(answer, Refused):
                row = self.trace.arrivals[self._told + offset].row
                raise TraceError(f"{self.trace.name}: row {row}: {answer.field} {answer.message}")
        self.ledger.stepped(report, done.events, self.now_ms)
        handlers = self._handlers
        for event in done.events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
        for job in done.finished:
            self._keep(job)
        self._foretell(done)
        self.outcome.events += len(done.events)
        self.world.obey(done.commands)
        self.wake_ms = NEVER_MS if done.wake_ms is None else done.wake_ms
        self.levels.sample()
        return done

    def _foretell(self, done: Step) -> None:
        """Some of those that have to wait ask at once when they will start."""
        every = 1 + len(self.trace.arrivals) // ASKED
        for event in done.events:
            if type(event) is JobSubmitted:
                job = self.state.jobs.get(event.job)
                if job is not None and job.phase is Phase.WAITING and not job.number % every:
                    self.truths[event.job].predicted = predict(self.state, job, self.now_ms)

    # -- the books ------------------------------------------------------------------------

    def _job_submitted(self, event: JobSubmitted) -> None:
        arrival = self.trace.arrivals[self._told]
        self._told += 1
        self.truths[event.job] = truth = Truth(arrival, self.levels.asked(arrival.spec))
        self.levels.waiting += truth.need
        self.levels.live += 1

    def _job_placed(self, event: JobPlaced) -> None:
        truth, levels = self.truths[event.job], self.levels
        if truth.placed_ms < 0:
            truth.placed_ms = self.now_ms
        truth.attempts += 1
        truth.waiting = False
        levels.waiting -= truth.need
        attempt = Attempt(event.job, event.attempt, truth, event.slices, self.now_ms)
        self.world.attempts[event.job] = attempt
        for number, slice_ in enumerate(event.slices):
            self.world.nodes[slice_.node].placed[event.job, event.attempt, number] = attempt
            levels.held += levels.amount(slice_)

    def _job_requeued(self, event: JobRequeued) -> None:
        truth = self.truths[event.job]
        truth.waiting = True
        self.levels.waiting += truth.need
        self.outcome.requeues[event.cause.value] += 1
        del self.world.attempts[event.job]

    def _job_finished(self, event: JobFinished) -> None:
        self.world.attempts.pop(event.job, None)
        self.levels.live -= 1

    def _member_over(self, event: MemberExited | MemberLost) -> None:
        self._release(self.world.nodes[event.node], (event.job, event.attempt, event.member))

    def _node_lost(self, event: NodeLost) -> None:
        node = self.world.nodes[event.node]
        for key in list(node.placed):
            self._release(node, key)

    def _release(self, node: SimNode, key: Key) -> None:
        attempt = node.placed.pop(key)
        slice_ = attempt.slices[key[2]]
        self.levels.held -= self.levels.amount(slice_)
        row = attempt.truth.arrival.row
        self.outcome.segments.add(node.index, slice_, attempt.placed_ms, self.now_ms, row)

    def _keep(self, job: Job) -> None:
        """A job is over: all that is left of it is an entry in the records."""
        truth = self.truths.pop(job.id)
        if truth.waiting:
            self.levels.waiting -= truth.need
        self.outcome.records.add(
            truth.arrival,
            placed_ms=truth.placed_ms,
            finished_ms=self.now_ms,
            amount=truth.need,
            attempts=truth.attempts,
            succeeded=job.outcome is JobOutcome.SUCCEEDED,
            predicted=truth.predicted,
        )
