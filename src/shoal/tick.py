"""One tick of a controller: collect what came in, decide, store, and only then answer and send.

    load -> begin -> (hear, ask, ...) -> receive, look_up -> decide -> commit -> finish -> ...
      ^                                                        |         |
      +---------------- fail <---------------------------------+---------+

The live loop, the storm, the replay and the tests all drive this class. It does not read a clock,
start a thread or wait. `load`, `look_up` and `commit` block, and may run in a thread; no other
method has a store that it could read. While one of them does, requests and reports may come in,
and the requests may be received, so that one visit to the thread stores a step and looks up what
the next one is asked.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from shoal.core.answers.why import verify_reasons
from shoal.core.invariants import verify, verify_touched
from shoal.core.phases.timekeeping import JUMP_MS
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state import image
from shoal.core.state.apply import apply
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.state import Functions, State
from shoal.core.step import Step, step
from shoal.cron import dues_of
from shoal.model.after import conditions
from shoal.model.budget import Spending
from shoal.model.commands import Command, Envelope
from shoal.model.durations import duration_text
from shoal.model.ids import array_of
from shoal.model.kept import Copied
from shoal.model.neighbor import NeighborReport
from shoal.model.node import NodeHealth
from shoal.model.policy import Policy
from shoal.model.report import (
    Accepted,
    Answer,
    Ended,
    NodeGone,
    NodeReport,
    Report,
    Request,
    Retry,
    RunSchedule,
    Still,
    Submit,
    SubmitWorkflow,
)
from shoal.model.service import ServiceLoad
from shoal.model.supply import SupplyCommand, SupplyReport
from shoal.ports import EventLog, LoopLog

ASKED_ABOUT = (Submit, SubmitWorkflow, RunSchedule, Retry)  # the store knows more of these

NAMES_KEPT = 1_000  # of nodes that the state does not know

Send = Callable[[str, Envelope], None]
Supply = Callable[[Sequence[SupplyCommand]], None]
Verify = Callable[[State, Policy, Step, int], None]


class Reply(Protocol):
    """Takes the answer to one request. An `asyncio.Future` is one."""

    def done(self) -> bool:
        """It was answered, or the client went away."""

    def set_result(self, answer: Answer, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class Stage(enum.Enum):
    """Whether `Tick.state` is what is stored. In the first and the last stage it may not be."""

    UNLOADED = "nothing was loaded, or a step or its commit failed: only `load` helps"
    LOADED = "as it is stored, but no epoch was stored for this controller yet"
    READY = "as it is stored, and the next step may be decided"
    DECIDED = "a step was applied to the state, but its events are not known to be stored"


class Looked(NamedTuple):
    """A request with what the store knows of it. `answer`: no step has to see it."""

    request: Request
    reply: Reply
    answer: Answer | Exception | None = None


class Decision(msgspec.Struct, frozen=True):
    """A step on its way to the store, its input, and where its answers go."""

    report: Report
    step: Step
    replies: list[Reply]

    @property
    def believed(self) -> Report:
        """With what the nodes reported of their own members, as far as it was new."""
        return msgspec.structs.replace(self.report, nodes=tuple(self.step.reports))


def verify_step(state: State, _: Policy, done: Step, __: int) -> None:
    """Cheap: looks only at what the step touched."""
    verify_touched(state, done.events)


def verify_all(state: State, policy: Policy, done: Step, now_ms: int) -> None:
    """Looks at the whole state."""
    verify(state)
    verify_touched(state, done.events)
    verify_waits(state, policy, done, now_ms)


def verify_waits(state: State, policy: Policy, done: Step, now_ms: int) -> None:
    """A look at the queue that is due now is left to the next step."""
    due_ms = state.agenda.look_ms
    if done.wake_ms != now_ms and (due_ms is None or due_ms > now_ms):
        verify_reasons(state, policy, now_ms)


def verify_nothing(*_: object) -> None:
    """For a storm in which only the witness checks."""


class Tick:
    """Owns the state, the inbox, and the numbers of epochs and envelopes.

    A node's newest report replaces one that no step has seen, because a report is complete."""

    def __init__(
        self,
        log: LoopLog,
        policy: Policy | None,
        send: Send,
        *,
        fences: bool = False,
        verify: Verify = verify_step,
    ) -> None:
        """`policy` None: the one in the state that is loaded."""
        self.state = State()
        self.functions: Functions = FUNCTIONS  # of policies
        self.last_seq = 0  # of the newest event that is stored
        self.stage = Stage.UNLOADED
        self.fences = fences  # the engine can end nodes that do not answer
        self._log = log
        self._policy = policy
        self._send = send
        self.draw: Callable[[], int] = int  # random bits, for ports; here 0
        self.supply: Supply = verify_nothing  # gets the commands for those who bring nodes
        self._verify = verify
        self._envelopes = 0  # sent in this epoch
        self._decision: Decision | None = None
        self._stored_seq = 0
        self.doubts = Doubts()
        self._asked: deque[tuple[Request, Reply]] = deque()  # one thread adds, another may take
        self._received: list[tuple[Request, Reply]] = []  # for the next step: nobody adds to it
        self._looked_up: list[Looked] = []
        self._reports: dict[str, NodeReport] = {}
        self._newest: dict[str, tuple[int, int]] = {}  # incarnation and sequence, by node
        self._gone: dict[tuple[str, int], NodeGone] = {}
        self._still: dict[str, Still] = {}
        self._loads: dict[str, ServiceLoad] = {}
        self._supplies: dict[str, SupplyReport] = {}
        self._neighbors: dict[str, NeighborReport] = {}
        self._spendings: tuple[Spending, ...] = ()
        self._copied: dict[str, Copied] = {}
        self._drift_ms: int | None = None
        self._ends: dict[str, Ended] = {}  # jobs that new ones name, and that are over

    @property
    def settled(self) -> bool:
        """The state is exactly what is stored, so it may be shown."""
        return self.stage in (Stage.LOADED, Stage.READY)

    @property
    def policy(self) -> Policy:
        """What the next step obeys: one that was set here and is not stored yet, or the state's."""
        return self._policy or self.state.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    # -- the inbox -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many requests no step has seen yet."""
        return len(self._asked) + len(self._received) + len(self._looked_up)

    def ask(self, request: Request, reply: Reply, *more: tuple[Request, Reply]) -> None:
        """Answered when its effect is stored. One step takes all: no thread sees a part of them."""
        self._asked.extend(((request, reply), *more))

    def hear(self, report: NodeReport) -> None:
        """A late report is dropped here, because a load makes the state forget what it heard."""
        node, number = report.spec.id, (report.incarnation, report.sequence)
        if len(self._newest) > 2 * len(self.state.nodes) + NAMES_KEPT:  # most are forgotten
            self._newest = {
                one: self._newest[one] for one in self._newest if one in self.state.nodes
            }
        if number >= self._newest.get(node, number):
            self._newest[node] = number
            self._reports[node] = report

    def still(self, still: Still) -> bool:
        """Kept for the next step, which need not come sooner for it. False: the state does not have
        the report that this one refers to, so the node should report in full."""
        if self.doubts.holds(still.node):
            return True  # it did, and is not believed for now
        node = self.state.nodes.get(still.node)
        said = self.state.heard.said.get(still.node)
        ready = node is not None and node.health is NodeHealth.READY
        if ready and said == (still.incarnation, still.sequence):
            self._still[still.node] = still
            return True
        return still.node in self._reports  # a complete report waits for the same step

    def gone(self, gone: NodeGone) -> None:
        self._gone[gone.node, gone.incarnation] = gone

    def served(self, load: ServiceLoad) -> bool:
        """What the gateway sees of a service; returns whether that is news."""
        self._loads[load.service] = load
        return self.state.heard.loads.get(load.service) != load

    def neighbors(self, reports: Iterable[NeighborReport]) -> None:
        """What they say at one time: their offers are compared."""
        self._neighbors |= {report.name: report for report in reports}

    def supplied(self, report: SupplyReport) -> None:
        """Everything that an engine has for us: its newest report replaces the one before."""
        self._supplies[report.engine] = report

    def spent(self, spendings: tuple[Spending, ...]) -> None:
        """What the ledger says all tenants have spent, where the policy sets budgets."""
        self._spendings = spendings

    def copied(self, copied: Copied) -> None:
        """Kept for the next step, which need not come sooner for it."""
        self._copied[copied.job] = copied

    def drifted(self, drift_ms: int) -> bool:
        """How far the machine's clock is off; returns whether that is news."""
        self._drift_ms = drift_ms
        return abs(drift_ms - self.state.drift_ms) >= JUMP_MS

    def refuse(self, error: Exception) -> None:
        """Answer all requests that no step has seen with this error."""
        asked = [reply for _, reply in (*self._received, *self._asked)]
        asked += [one.reply for one in self._looked_up]
        self._asked, self._received, self._looked_up = deque(), [], []
        _refuse(asked, error)

    # -- start and recovery ----------------------------------------------------------------

    def load(self) -> None:
        """Take the state from the store. What was not stored did not happen."""
        self.stage = Stage.UNLOADED
        self._decision = None
        looked = [(one.request, one.reply) for one in self._looked_up]  # in another state
        self._asked.extendleft(reversed(looked + self._received))
        self._received, self._looked_up = [], []
        self.state, self.last_seq = self._log.load()
        self.stage = Stage.LOADED

    def begin(self, now_ms: int) -> None:
        """Store a new epoch before using it: otherwise another controller could use the same
        one."""
        self.begun(self.store_epoch(now_ms))

    def store_epoch(self, now_ms: int) -> ControllerStarted:
        """It changes nothing but the store, so it may run in a thread of its own."""
        assert self.stage is Stage.LOADED, self.stage
        used = self._log.used(self.state.next_job, self.state.epoch)
        event = ControllerStarted(
            at_ms=now_ms,
            epoch=used.epoch + 1,
            first_job=used.first_job,
            first_attempt=used.first_attempt,
            first_order=used.first_order,
        )
        try:
            self._stored_seq = self._log.commit([event], [])
        except Exception:
            self.stage = Stage.UNLOADED  # it may have been stored anyway
            raise
        return event

    def begun(self, event: ControllerStarted) -> None:
        """The epoch is stored."""
        self.last_seq = self._stored_seq
        apply(self.state, event)
        self._envelopes = 0
        self.stage = Stage.READY

    # -- one tick --------------------------------------------------------------------------

    def run(self, now_ms: int, log: EventLog) -> Decision:
        """All parts in a row, where nothing else can happen in between."""
        if self.receive():
            self.look_up(log)
        decision = self.decide(now_ms)
        try:
            self.commit()
        except Exception as error:
            self.fail(error)
            raise
        self.finish()
        return decision

    def receive(self) -> bool:
        """Take the requests for the next step. True: the store has to be asked about some of them,
        by `look_up`. A step that tries a node's report takes none."""
        if self.doubts.trial is not None:
            return False
        while self._asked:
            self._received.append(self._asked.popleft())
        if any(isinstance(request, ASKED_ABOUT) for request, _ in self._received):
            return True
        self._looked_up += [Looked(request, reply) for request, reply in self._received]
        self._received = []
        return False

    def look_up(self, log: EventLog) -> None:
        """Ask the store about the requests that were received. It reads the state, so no step may
        run meanwhile; but it answers nobody, so it may run in a thread of its own."""
        received, self._received = self._received, []
        for request, reply in received:
            try:
                self._looked_up.append(self._known(log, request, reply))
            except Exception as error:
                self._looked_up.append(Looked(request, reply, error))

    def decide(self, now_ms: int) -> Decision:
        """Empty the inbox into one step, with the requests that were received. If that fails, the
        next goes without these reports: only if it fails, too, the requests get the error."""
        assert self.stage is Stage.READY, self.stage
        assert not self._received, "the store has to be asked about these requests first"
        report, asked = self._collect(now_ms)
        replies = [reply for _, reply in asked]
        spoke = list(dict.fromkeys([one.spec.id for one in report.nodes]))
        spoke += [one.node for one in report.gone if one.node not in spoke]
        self.stage = Stage.DECIDED
        try:
            done = step(self.state, report, self.policy, now_ms, self.functions)
            self._verify(self.state, self.state.policy, done, now_ms)
        except Exception as error:
            if self.doubts.failed(spoke, error, now_ms):
                self._put_back(report, asked)
                replies = []
            self.fail(error, replies)
            raise
        self.doubts.passed(spoke)
        self._decision = Decision(report, done, replies)
        return self._decision

    def commit(self) -> None:
        """The barrier: nothing is sent or answered before this returns. It only reads the decision,
        so it may run in a thread of its own. If it raises, call `fail`."""
        assert self._decision is not None
        done = self._decision.step
        self._stored_seq = self.last_seq
        if done.events:
            self._stored_seq = self._log.commit(done.events, done.finished)

    def fail(self, error: Exception, replies: list[Reply] | None = None) -> None:
        """The step's fate is unknown, so its state may not be used, and only `load` helps. Clients
        that get the error and ask again with the same key get the same job."""
        if replies is None and self._decision is not None:
            replies = self._decision.replies
        self._decision = None
        self.stage = Stage.UNLOADED
        _refuse(replies or [], error)

    def finish(self) -> None:
        """The step is stored, so it has happened: answer, then send."""
        assert self._decision is not None
        decision, self._decision = self._decision, None
        self.last_seq = self._stored_seq
        self.stage = Stage.READY
        self._policy = None  # it is stored; from now on, requests may change it
        for reply, answer in zip(decision.replies, decision.step.answers, strict=True):
            if not reply.done():
                reply.set_result(answer)
        self.send(decision.step.commands)
        if decision.step.supplies:
            self.supply(decision.step.supplies)

    def send(self, commands: Sequence[Command]) -> None:
        """One envelope for each node. A node refuses one that is older than its last."""
        by_node: dict[str, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        for node, of_node in by_node.items():
            self._envelopes += 1
            self._send(node, Envelope(self.state.epoch, self._envelopes, tuple(of_node)))

    def snapshot(self) -> tuple[int, bytes]:
        """For `LoopLog.snapshot`: the newest stored event, and the state after it."""
        assert self.settled, self.stage
        return self.last_seq, image.encoded(self.state.snapshot())

    def _collect(self, now_ms: int) -> tuple[Report, list[tuple[Request, Reply]]]:
        trial = self.doubts.trial
        if trial is not None:
            return self._of_nodes(trial), []
        looked, self._looked_up = self._looked_up, []
        kept = [(one.request, one.reply) for one in looked if _is_open(one)]
        spoke = {*self._reports, *(node for node, _ in self._gone)}
        heard = self._of_nodes(spoke - self.doubts.unheard(now_ms))
        report = msgspec.structs.replace(
            heard,
            requests=tuple(request for request, _ in kept),
            ended=tuple(self._ends.values()),
            dues=dues_of(self.state, now_ms),
            still=tuple(self._still.values()),
            services=tuple(self._loads.values()),
            supplies=tuple(self._supplies.values()),
            neighbors=tuple(self._neighbors.values()),
            spendings=self._spendings,
            copied=tuple(self._copied.values()),
        )
        self._spendings, self._ends, self._loads = (), {}, {}
        self._supplies, self._neighbors, self._still, self._copied = {}, {}, {}, {}
        return report, kept

    def _of_nodes(self, nodes: Container[str]) -> Report:
        """What these have reported, in the order in which it came."""
        reports = [one for node, one in self._reports.items() if node in nodes]
        gone = [one for one in self._gone.values() if one.node in nodes]
        for report in reports:
            del self._reports[report.spec.id]
        for one in gone:
            del self._gone[one.node, one.incarnation]
        return Report(
            nodes=tuple(reports),
            gone=tuple(gone),
            port_seed=self.draw(),
            drift_ms=self._drift_ms,
            fences=self.fences,
        )

    def _put_back(self, report: Report, asked: list[tuple[Request, Reply]]) -> None:
        """The step that took it has failed, and nothing of it is stored."""
        self._asked.extendleft(reversed(asked))
        self._reports |= {one.spec.id: one for one in report.nodes}
        self._gone |= {(one.node, one.incarnation): one for one in report.gone}
        self._loads |= {one.service: one for one in report.services}
        self._supplies |= {one.engine: one for one in report.supplies}
        self._copied |= {one.job: one for one in report.copied}
        self._spendings = self._spendings or report.spendings

    def _known(self, log: EventLog, request: Request, reply: Reply) -> Looked:
        """The state knows the keys of jobs that live, the store those of jobs that have ended."""
        if reply.done() or not isinstance(request, ASKED_ABOUT):  # done: the client went away
            return Looked(request, reply)
        if isinstance(request, Retry):
            return Looked(self._with_record(log, request), reply)
        unknown = request.key and request.key not in self.state.keys
        job_id = log.keyed(request.key) if unknown else None
        if not isinstance(request, RunSchedule):
            self._look_up_ends(log, request)
        if job_id is None:
            return Looked(request, reply)
        return Looked(request, reply, Accepted(job_id, "this submission was already accepted"))

    def _look_up_ends(self, log: EventLog, request: Submit | SubmitWorkflow) -> None:
        """How jobs ended that a new one is to wait for. The state knows those that live, and no
        job can end between this look and the step."""
        jobs = request.jobs if isinstance(request, SubmitWorkflow) else (request,)
        for job in jobs:
            for one in conditions(job.spec.after):
                known = self.state.live(one.job) is not None or self.state.pending(one.job)
                asked = not known and one.job not in self._ends
                if asked and (ended := log.ended(one.job)) is not None:
                    self._ends[one.job] = ended

    def _with_record(self, log: EventLog, request: Retry) -> Retry:
        """An array that has finished is in the store; only here it is certain that it still is."""
        array = array_of(request.job) or request.job
        live = array in self.state.arrays
        return request if live else msgspec.structs.replace(request, record=log.job(array))


def _is_open(looked: Looked) -> bool:
    """A step has to see it. Others are answered here."""
    if looked.reply.done():
        return False
    match looked.answer:
        case None:
            return True
        case Exception():
            looked.reply.set_exception(looked.answer)
        case _:
            looked.reply.set_result(looked.answer)
    return False


def _refuse(replies: list[Reply], error: Exception) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(error)


# Nodes whose reports break a step: found by halves, and set aside for a while, by name.
# The state may be different soon, and the grace time of its jobs should not be over before it is
# tried again; but a node that breaks a step each time must not do so often.
ASIDE_FIRST_MS = 10_000
ASIDE_MS_MAX = 600_000
ERROR_CHARACTERS_MAX = 200


class Aside(msgspec.Struct, frozen=True):
    """`for_ms`: twice as long as the last time, unless a step has taken its report since."""

    until_ms: int
    for_ms: int
    error: str

    @property
    def why(self) -> str:
        time = duration_text(self.for_ms)
        return f"set aside for {time}, because its report breaks a step: {self.error}"


class Doubts:
    """Which nodes the next step hears. After a step that failed, the next goes without the reports
    of that one. If it goes well, they are tried in groups, alone, and a group that fails is halved.
    A step without them comes before each try, so that nobody waits for the search."""

    def __init__(self) -> None:
        self.aside: dict[str, Aside] = {}
        self._groups: list[list[str]] = []  # of nodes in doubt; the last is tried next
        self._safe = False  # a step has gone well without them since one failed

    @property
    def open(self) -> bool:
        """Another step should come soon: some nodes wait to be heard."""
        return bool(self._groups)

    @property
    def trial(self) -> list[str] | None:
        """The only nodes that the next step hears, and it hears nothing else; None: it is a usual
        step."""
        return self._groups[-1] if self._safe and self._groups else None

    def unheard(self, now_ms: int) -> set[str]:
        """Nodes that a usual step does not hear."""
        late = {node for node, aside in self.aside.items() if now_ms < aside.until_ms}
        return late.union(*self._groups)

    def holds(self, node: str) -> bool:
        return node in self.aside or any(node in group for group in self._groups)

    def passed(self, nodes: Iterable[str]) -> None:
        """A step has heard these."""
        if self.trial is not None:
            self._groups.pop()
        else:
            self._safe = True
        for node in nodes:
            self.aside.pop(node, None)

    def failed(self, nodes: list[str], error: Exception, now_ms: int) -> bool:
        """A step that has heard these has failed. False: it heard none, so no node is to blame."""
        group = self.trial
        if group is None and not nodes:
            self._groups = []
            return False
        if group is None:
            self._groups.insert(0, nodes)
        elif len(self._groups.pop()) == 1:
            self._set_aside(group[0], error, now_ms)
        else:
            half = len(group) // 2
            self._groups += [group[half:], group[:half]]
        self._safe = False
        return True

    def absolve(self) -> None:
        """Something else was to blame."""
        self.aside, self._groups = {}, []

    def _set_aside(self, node: str, error: Exception, now_ms: int) -> None:
        before = self.aside.get(node)
        for_ms = min(2 * before.for_ms, ASIDE_MS_MAX) if before is not None else ASIDE_FIRST_MS
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        self.aside[node] = Aside(now_ms + for_ms, for_ms, text)

    def alarm(self) -> str:
        return "; ".join(f"{node} is {aside.why}" for node, aside in sorted(self.aside.items()))
