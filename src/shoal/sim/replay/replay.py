"""The replay: the controller's own tick on virtual time, over a cluster that follows from its seed.

Everything that happens in one instant is reported in one step. The step's events go to the
ledger and the records, its commands to the simulated cluster. A finished job leaves only a few
integers and its sums in the ledger.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.control.plugins import PolicyFunctions
from shoal.core.answers.why import waiting_reason
from shoal.core.books.quarantine import wants_check
from shoal.core.features.caps import CLUSTER_JOBS_MAX, share_left, too_many
from shoal.core.phases.admit import impossible
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.scheduling.predict import predict
from shoal.core.state.accounts import Accounts
from shoal.core.state.apply_queue import adopt_policy
from shoal.core.state.apply_room import add_node
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJudged, NodeLost
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    MemberExited,
    MemberLost,
)
from shoal.core.state.state import Node, State
from shoal.core.state.tally import EVERYONE, Tally
from shoal.core.step import Step
from shoal.model.budget import BudgetLevel, BudgetPeriod
from shoal.model.health import Standing
from shoal.model.job import Job, JobSpec, Phase
from shoal.model.job import Outcome as JobOutcome
from shoal.model.ledger import PriceList
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.reason import render
from shoal.model.report import Answer, Ended, Refused, Submit, WakeJob
from shoal.ports import Used
from shoal.sim.replay.attempts import Naps
from shoal.sim.replay.clusters import NEVER_MS, Conditions
from shoal.sim.replay.gateway import Gateway, RecordedGateway
from shoal.sim.replay.ledger import ReplayLedger
from shoal.sim.replay.metrics import Levels, Outcome
from shoal.sim.replay.simulated import Attempt, Key, SimCluster, SimJob, SimNode
from shoal.sim.replay.suppliers import SimSuppliers
from shoal.sim.replay.traces import Arrival, Trace, TraceError
from shoal.tick import Tick, verify_all

ASKED = 1000  # about this many jobs ask when they will start, if they all have to wait
PROGRESS_STEPS = 256  # between two calls of `progress`

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
    """Play the trace to its end. Every `check_every` steps the invariants are verified, too."""
    replay_ = Replay(trace, nodes, policy, conditions or Conditions(), name, seed, prices)
    return replay_.run(check_every, progress)


def too_large(
    trace: Trace, nodes: Sequence[NodeSpec], policy: Policy | None = None
) -> dict[int, str]:
    """By row, the jobs that could never start on these nodes, nor on those that the policy may
    order, and why."""
    state = State()
    adopt_policy(state, policy or Policy())
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
    """Also the tick's log of events: it keeps none, but reads each of them once."""

    def __init__(
        self,
        trace: Trace,
        nodes: Sequence[NodeSpec],
        policy: Policy,
        conditions: Conditions,
        name: str,
        seed: int,
        prices: PriceList | None = None,
        gateway: Gateway | None = None,
    ) -> None:
        self.trace = trace
        # Nodes and members report when they have news: here, silence means nothing.
        self.policy = msgspec.structs.replace(
            policy, silent_after_ms=NEVER_MS, grace_ms=2 * NEVER_MS, hang_after_ms=NEVER_MS
        )
        self.levels = Levels(nodes)
        marks = (policy.idle_warn_ms, policy.idle_reclaim_ms)
        self.cluster = SimCluster(nodes, conditions, self.levels, seed, marks)
        self.gateway = gateway or RecordedGateway(trace.services)
        self.ledger = ReplayLedger(prices or PriceList(), trace.began_ms, self.policy)
        self.outcome = Outcome(name, self.levels, self.cluster.failures)
        self.jobs: dict[str, SimJob] = {}  # that are not finished; replicas are among them
        self.waited_for = 0  # of these, jobs of the trace
        self.now_ms = 0
        self.wake_ms = NEVER_MS
        self.next_arrival = 0
        self._following = Following(trace.arrivals)
        self.ended = self._following.ended
        self._start_ups = {one.name: one.start_up_ms for one in trace.services}
        self._entering: deque[Arrival] = deque()  # submitted, and accepted by the next step
        self._outside = Outside(self.policy)
        self._check_every = 0
        self._naps = Naps(self.cluster, self.levels, self.outcome, self.jobs)
        self._handlers: dict[type, Callable[[Any], None]] = {
            **self._naps.handlers,
            JobSubmitted: self._job_submitted,
            JobPlaced: self._job_placed,
            JobRunning: self._job_running,
            JobRequeued: self._job_requeued,
            JobFinished: self._job_finished,
            MemberExited: self._member_over,
            MemberLost: self._member_over,
            NodeLost: self._node_lost,
            NodeJudged: self._node_judged,
        }
        self.suppliers = SimSuppliers(self.policy, self.cluster, seed)
        self.tick = Tick(self, self.policy, self.cluster.take, verify=self._verify)
        self.tick.functions = PolicyFunctions().load(self.policy)
        self.tick.supply = self.suppliers.take
        self.tick.load()
        self.tick.begin(0)

    @property
    def state(self) -> State:
        return self.tick.state

    def run(self, check_every: int = 0, progress: Progress | None = None) -> Outcome:
        self._check_every = check_every
        while not self._is_over():
            self.now_ms = self._next_time()
            self._step()
            if progress is not None and len(self.outcome.step_ns) % PROGRESS_STEPS == 0:
                progress(len(self.outcome.records), self.now_ms)
        return self._close()

    def _close(self) -> Outcome:
        for node in self.cluster.order:
            for key, attempt in node.holding.items():
                if not attempt.lent:
                    self._naps.draw(attempt, key[2], self.now_ms)
        self.outcome.sleep = self._naps.use()
        self.outcome.ledger = self.ledger.view(self.now_ms)
        self.outcome.supply = self.suppliers.close(self.now_ms)
        return self.outcome

    def _is_over(self) -> bool:
        left = self.waited_for or self.next_arrival < len(self.trace.arrivals) or self._outside
        return not left and self.now_ms >= self.gateway.until_ms

    def _due_ms(self) -> int:
        """When something happens next, if nobody else does anything."""
        suppliers_ms = self.suppliers.next_ms()
        next_ms = min(self.wake_ms, self.cluster.next_ms(), self.gateway.next_ms, suppliers_ms)
        if self.next_arrival < len(self.trace.arrivals):
            next_ms = min(next_ms, self.trace.arrivals[self.next_arrival].submit_ms)
        return max(next_ms, self.now_ms)

    def _is_still(self) -> bool:
        """Only failures are left to come, and they help no job."""
        return (
            self.next_arrival >= len(self.trace.arrivals)
            and self.now_ms >= self.gateway.until_ms
            and not (self.cluster.attempts or self.cluster.broken)
            and min(self.wake_ms, self.suppliers.next_ms()) >= NEVER_MS
        )

    def _next_time(self) -> int:
        next_ms = NEVER_MS if self._is_still() else self._due_ms()
        if next_ms >= NEVER_MS and not self._budgets_renew():
            raise self._stuck()
        return max(min(next_ms, self.ledger.next_ms), self.now_ms)

    def _budgets_renew(self) -> bool:
        """Will a tenant that is held get a new budget with the next month?"""
        levels = self.state.accounts.budgets
        return any(
            levels.get(one.name) is BudgetLevel.HELD and one.budget_period is BudgetPeriod.MONTH
            for one in self.policy.tenants
        )

    def _stuck(self) -> TraceError:
        if not self.waited_for and (kept := self._outside.first()):
            where = f"{self.trace.name}: row {kept.row}"
            return TraceError(f"{where}: services take all jobs that {kept.spec.tenant} may have")
        job = next(self.state.jobs[one] for one, job in self.jobs.items() if job.arrival.row >= 0)
        reason = render(waiting_reason(self.state, job, self.policy, self.now_ms))
        row = self.jobs[job.id].arrival.row
        return TraceError(f"{self.trace.name}: row {row}: the job would wait forever: {reason}")

    # -- one step -------------------------------------------------------------------------

    def _step(self) -> None:
        self.levels.advance(self.now_ms)
        self._collect()
        tick, begin_ns = self.tick, time.perf_counter_ns()
        if tick.receive():
            tick.look_up(self)
        decision = tick.decide(self.now_ms)
        self.outcome.step_ns.append(time.perf_counter_ns() - begin_ns)
        self.ledger.stepped(decision.believed, decision.step.events, self.now_ms)
        tick.commit()
        self._predict(decision.step)
        tick.finish()
        wake_ms = decision.step.wake_ms
        self.wake_ms = NEVER_MS if wake_ms is None else wake_ms
        if self._outside and self._outside.has_room(self.state):
            self.wake_ms = self.now_ms
        self.levels.sample()
        for node_id in self.state.troubled:
            if wants_check(self.state.nodes[node_id].record):
                self.cluster.ask(node_id)

    def _collect(self) -> None:
        """Put everything that has reached the controller by now into the tick's inbox."""
        tick = self.tick
        for supplied in self.suppliers.look(self.state, self.now_ms):
            tick.supplied(supplied)
        reports, gone = self.cluster.look(self.now_ms)
        for report in reports:
            tick.hear(report)
        for one in gone:
            tick.gone(one)
        for request in self.gateway.requests(self.state, self.now_ms):
            tick.ask(request, ReplayReply(self.trace.name))
        while self.cluster.sleepers.touched:
            woken = WakeJob(self.cluster.sleepers.touched.pop(), why="its user came back")
            tick.ask(woken, ReplayReply(self.trace.name, may_fail=True))
        for load in self.gateway.loads(self.state, self.now_ms):
            tick.served(load)
        tick.spent(self.ledger.spendings(self.now_ms))
        arrivals, first = self.trace.arrivals, self.next_arrival
        end = len(arrivals)
        while self.next_arrival < end and arrivals[self.next_arrival].submit_ms <= self.now_ms:
            self.next_arrival += 1
        entering = self._outside.let_in(self.state, arrivals[first : self.next_arrival])
        for arrival in self._following.enter(entering, self.state.next_job):
            reply = ReplayReply(f"{self.trace.name}: row {arrival.row}")
            tick.ask(Submit(self._following.spec(arrival, self._spec(arrival))), reply)
            self._entering.append(arrival)

    def _verify(self, state: State, policy: Policy, done: Step, now_ms: int) -> None:
        if self._check_every and len(self.outcome.step_ns) % self._check_every == 0:
            verify_all(state, policy, done, now_ms)

    def _spec(self, arrival: Arrival) -> JobSpec:
        """A policy that needs run times gets the true ones. A job that saves its work is willing to
        be stopped."""
        spec = arrival.spec
        estimate_ms = (
            arrival.work_ms if self.tick.functions.order(self.policy.order).clairvoyant else 0
        )
        if arrival.lived:
            return msgspec.structs.replace(spec, estimate_ms=estimate_ms)
        every_ms = arrival.checkpoint_ms
        if every_ms is None:
            every_ms = self.cluster.conditions.checkpoint_ms
        saves = every_ms < NEVER_MS
        return msgspec.structs.replace(
            spec,
            preemptible=spec.preemptible or saves,
            checkpoint_ms=max(1, every_ms) if saves else 0,
            estimate_ms=estimate_ms,
        )

    def _predict(self, done: Step) -> None:
        """Some of the jobs that have to wait ask at once when they will start."""
        every = 1 + len(self.trace.arrivals) // ASKED
        for event in done.events:
            if type(event) is JobSubmitted:
                job = self.state.jobs.get(event.job)
                if job is not None and job.phase is Phase.WAITING and not int(job.id[1:]) % every:
                    self.jobs[event.job].predicted = predict(self.state, job, self.now_ms)

    # -- the log of events ----------------------------------------------------------------

    def used(self, next_job: int, epoch: int) -> Used:
        return Used(next_job, epoch)

    def load(self) -> tuple[State, int]:
        return State(FUNCTIONS), 0

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        handlers = self._handlers
        for event in events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
        for job in finished:
            self._record(job)
        self.outcome.events += len(events)
        return self.outcome.events

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        raise NotImplementedError(f"a replay is never loaded again: {seq}, {len(body)} bytes")

    def job(self, _: str) -> Job | None:
        return None  # a replay retries nothing

    def keyed(self, key: str) -> str | None:
        raise NotImplementedError(f"a replay submits nothing twice: {key}")

    # -- what events change ---------------------------------------------------------------

    def _job_submitted(self, event: JobSubmitted) -> None:
        if event.spec.service:
            known_ms = self._start_ups.get(event.spec.service)
            arrival = Arrival(self.now_ms, NEVER_MS, event.spec, row=-1, start_up_ms=known_ms)
        else:
            arrival = self._entering.popleft()
            self.waited_for += 1
            self.levels.live += 1
        self.jobs[event.job] = job = SimJob(arrival, self.levels.asked(arrival.spec))
        self.levels.waiting += job.amount

    def _job_placed(self, event: JobPlaced) -> None:
        job, levels = self.jobs[event.job], self.levels
        if job.placed_ms < 0:
            job.placed_ms = self.now_ms
        job.attempts += 1
        job.waiting = False
        levels.waiting -= job.amount
        attempt = Attempt(event.job, event.attempt, job, event.slices, self.now_ms)
        self.cluster.attempts[event.job] = attempt
        for number, slice_ in enumerate(event.slices):
            self.cluster.nodes[slice_.node].holding[event.job, event.attempt, number] = attempt
            levels.held += levels.amount(slice_)

    def _job_running(self, event: JobRunning) -> None:
        if self.jobs[event.job].arrival.spec.service:
            self.gateway.next_ms = self.now_ms  # its probe answers soon

    def _job_requeued(self, event: JobRequeued) -> None:
        job = self.jobs[event.job]
        self.levels.waiting += 0 if job.waiting else job.amount
        job.waiting = True
        self._naps.over(event.job)
        self.outcome.requeues[event.cause.value] += 1
        del self.cluster.attempts[event.job]

    def _job_finished(self, event: JobFinished) -> None:
        self._naps.over(event.job)
        self.cluster.attempts.pop(event.job, None)

    def _member_over(self, event: MemberExited | MemberLost) -> None:
        self._release(self.cluster.nodes[event.node], (event.job, event.attempt, event.member))

    def _node_lost(self, event: NodeLost) -> None:
        node = self.cluster.nodes[event.node]
        for key in list(node.holding):
            self._release(node, key)

    def _node_judged(self, event: NodeJudged) -> None:
        if event.record.standing is Standing.QUARANTINED:
            self.cluster.mend(event.node)

    def _release(self, node: SimNode, key: Key) -> None:
        attempt = node.holding.pop(key)
        if not attempt.lent:
            self.levels.held -= self.levels.amount(attempt.slices[key[2]])
            self._naps.draw(attempt, key[2], self.now_ms)

    def _record(self, finished: Job) -> None:
        job = self.jobs.pop(finished.id)  # only an entry in the records is left of it
        self._following.over(job.arrival, finished)
        if job.waiting:
            self.levels.waiting -= job.amount
        if finished.spec.service:
            return
        self.waited_for -= 1
        self.levels.live -= 1
        self.outcome.records.add(
            job.arrival,
            placed_ms=job.placed_ms,
            finished_ms=self.now_ms,
            amount=job.amount,
            attempts=job.attempts,
            succeeded=finished.outcome is JobOutcome.SUCCEEDED,
            predicted=job.predicted,
        )


# Jobs of a trace that wait for others, under the ids that a replay gives them.


class Following:
    """Whatever became of the other job, the one that waits for it ran: so in a replay any end of
    the other lets it start. What is not in the trace, or was kept out of it, is not waited for."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._awaited = {job for arrival in arrivals for job in arrival.after}
        self._ids: dict[str, str] = {}  # id in the trace -> id in the replay
        self._ends: dict[str, Ended] = {}

    def enter(self, arrivals: Sequence[Arrival], first: int) -> Sequence[Arrival]:
        """They will be accepted in this order, with numbers from `first` on."""
        for number, arrival in enumerate(arrivals, first):
            if arrival.job in self._awaited:
                self._ids[arrival.job] = f"j{number}"
        return arrivals

    def spec(self, arrival: Arrival, spec: JobSpec) -> JobSpec:
        if not arrival.after and not arrival.begin_ms:
            return spec
        after = tuple(f"{self._ids[one]}:any" for one in arrival.after if one in self._ids)
        begin_ms = arrival.submit_ms + arrival.begin_ms if arrival.begin_ms else 0
        return msgspec.structs.replace(spec, after=after, begin_ms=begin_ms)

    def over(self, arrival: Arrival, job: Job) -> None:
        if arrival.job in self._awaited and job.outcome is not None:
            self._ends[job.id] = Ended(job.id, job.spec.tenant, job.outcome)

    def ended(self, job_id: str) -> Ended | None:
        return self._ends.get(job_id)


# Jobs of a trace that are over a cap: their users submit them again when there is room.


class Outside:
    """The jobs of each tenant stay in the order of the trace."""

    def __init__(self, policy: Policy) -> None:
        self._capped = any(one.jobs_max or one.waiting_max for one in policy.tenants)
        self._accounts = Accounts(policy)  # the state has this tree from the first step on
        self._lines: dict[str, deque[Arrival]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def first(self) -> Arrival | None:
        return next((line[0] for line in self._lines.values()), None)

    def let_in(self, state: State, come: Sequence[Arrival]) -> list[Arrival]:
        """Those that have room now, of those who come and those who are outside already."""
        live = state.tally.live.get(EVERYONE, 0)
        room = share_left(CLUSTER_JOBS_MAX, live, live)  # if all of them are one tenant's
        if not (self._capped or self._lines or len(come) > room):
            return list(come)
        for arrival in come:
            self._lines.setdefault(arrival.spec.tenant, deque()).append(arrival)
        # What this step will have accepted counts for the next one in line.
        tally, entering = msgspec.structs.replace(state.tally), []
        tally.live, tally.waiting = dict(tally.live), dict(tally.waiting)
        for tenant, line in list(self._lines.items()):
            while line and self._room(tally, tenant):
                entering.append(line.popleft())
                spec = entering[-1].spec
                tally.job(self._accounts, Job(id="", number=0, spec=spec, submitted_ms=0), 1)
            if not line:
                del self._lines[tenant]
        return entering

    def has_room(self, state: State) -> bool:
        return any(self._room(state.tally, tenant) for tenant in self._lines)

    def _room(self, tally: Tally, tenant: str) -> bool:
        return too_many(tally, self._accounts, tenant, 1, waiting=1) is None


# Where the answers to a replay's requests go.


class ReplayReply:
    """A job that is refused ends the replay. `may_fail`: a wish that came too late does not."""

    def __init__(self, where: str, *, may_fail: bool = False) -> None:
        self._where = where
        self._may_fail = may_fail

    def done(self) -> bool:
        return False

    def set_result(self, answer: Answer) -> None:
        if isinstance(answer, Refused) and not self._may_fail:
            raise TraceError(f"{self._where}: {answer.field} {answer.message}")

    def set_exception(self, error: Exception) -> None:
        raise error
