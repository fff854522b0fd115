"""A cluster in a test's hands: one step at a time, every step checked, every node a real book."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from hypothesis import settings

from shoal.core.nodebook import Action, NodeBook
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply import replay
from shoal.core.state.events.log import Event
from shoal.core.state.state import Node, State
from shoal.core.step import Step
from shoal.model.budget import Spending
from shoal.model.commands import Command, Envelope
from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.neighbor import NeighborReport
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import (
    Accepted,
    Answer,
    Cancel,
    Ended,
    NodeGone,
    NodeReport,
    Request,
    SetIntent,
    Submit,
)
from shoal.model.service import ServiceLoad
from shoal.model.supply import SupplyReport
from shoal.ports import Used
from shoal.tick import Tick, verify_all

# The same examples each time, and no clock: a slow machine is no reason to fail.
examples = settings(max_examples=150, deadline=None, derandomize=True)

POLICY = Policy(silent_after_ms=5_000, grace_ms=60_000)


def node_spec(
    name: str, *, gpus: int = 0, cpus: int = 8, memory_mb: int = 1000, **rest: Any
) -> NodeSpec:
    """`rest`: the GPUs' model and memory, and the node's place."""
    return NodeSpec(
        id=name,
        gpus=gpus,
        cpu_milli=cpus * 1000,
        memory_mb=memory_mb,
        **{"address": f"{name}.test", **rest},
    )


def job_spec(**fields: Any) -> JobSpec:
    """As it would come from outside: validated, and words turned into what they name."""
    return msgspec.convert({"command": ("work",), **fields}, JobSpec)


class Kept:
    """An event log in memory."""

    def __init__(self) -> None:
        self.log: list[Event] = []
        self.finished: dict[str, Job] = {}

    def used(self, next_job: int, epoch: int) -> Used:
        return Used(next_job, epoch)

    def load(self) -> tuple[State, int]:
        return replay(State(), self.log), len(self.log)

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        self.log += events
        self.finished.update({job.id: job for job in finished})
        return len(self.log)

    def snapshot(self, _seq: int, _body: bytes) -> list[str]:
        return []

    def job(self, job_id: str) -> Job | None:
        return self.finished.get(job_id)

    def keyed(self, key: str) -> str | None:
        return next((job.id for job in self.finished.values() if job.key == key), None)

    def ended(self, job_id: str) -> Ended | None:
        job = self.finished.get(job_id)
        if job is None or job.outcome is None:
            return None
        return Ended(job.id, job.spec.tenant, job.outcome, job.why, job.spec.name or "")


class Cluster:
    """Nothing is sent by itself: `deliver` hands the last step's commands to the nodes' books,
    `hear` lets nodes report, and time passes only by `wait`."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.now_ms = 1_000
        self.books: dict[str, NodeBook] = {}
        kept = self._kept = Kept()
        self.log, self.finished = kept.log, kept.finished
        self.last = Step([], [], [], [], None)
        self._outbox: dict[str, Envelope] = {}  # of the last step
        self.controller = Tick(kept, policy, self._outbox.__setitem__, verify=verify_all)
        self.controller.functions = FUNCTIONS._replace(suppliers={"slurm": "Slurm"})
        self.controller.load()
        self.controller.begin(self.now_ms)

    # -- the controller's side -------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.controller.state

    @state.setter
    def state(self, state: State) -> None:
        self.controller.state = state

    @property
    def policy(self) -> Policy:
        return self.controller.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.controller.policy = policy

    def step(
        self,
        requests: Sequence[Request] = (),
        nodes: Sequence[NodeReport] = (),
        gone: Sequence[NodeGone] = (),
        services: Sequence[ServiceLoad] = (),
        spendings: tuple[Spending, ...] = (),
        drift_ms: int | None = None,
        fences: bool = False,
        supplies: Sequence[SupplyReport] = (),
        neighbors: Sequence[NeighborReport] = (),
    ) -> Step:
        tick = self.controller
        tick.neighbors(neighbors)
        for supplied in supplies:
            tick.supplied(supplied)
        for request in requests:
            tick.ask(request, Future())
        for report in nodes:
            tick.hear(report)
        for one in gone:
            tick.gone(one)
        for load in services:
            tick.served(load)
        tick.spent(spendings)
        if drift_ms is not None:
            tick.drifted(drift_ms)
        tick.fences = fences
        self._outbox.clear()
        self.last = tick.run(self.now_ms, self._kept).step
        return self.last

    def draw(self, seed: int) -> None:
        """The random bits of every later step."""
        self.controller.draw = lambda: seed

    def take_over(self) -> None:
        """Another controller begins, and knows what was stored."""
        self.controller.load()
        self.controller.begin(self.now_ms)

    def ask(self, request: Request) -> Answer:
        (answer,) = self.step(requests=(request,)).answers
        return answer

    def submit(self, **fields: Any) -> str:
        answer = self.ask(Submit(job_spec(**fields)))
        assert isinstance(answer, Accepted), answer
        return answer.id

    def cancel(self, job_id: str) -> Answer:
        return self.ask(Cancel(job_id))

    def intend(self, node: str, intent: NodeIntent) -> Answer:
        return self.ask(SetIntent(node, intent))

    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    def job(self, job_id: str) -> Job:
        return self.state.jobs.get(job_id) or self.finished[job_id]

    def node(self, name: str) -> Node:
        return self.state.nodes[name]

    # -- the nodes' side -------------------------------------------------------------------

    def join(self, name: str, **fields: Any) -> None:
        self.books[name] = NodeBook(node_spec(name, **fields), incarnation=1)
        self.hear(name)

    def reboot(self, name: str, spec: NodeSpec | None = None) -> None:
        """The node's agent starts anew; nobody has been told yet. Its exits are on its disk."""
        old = self.books[name]
        exits = tuple(old.exits.values())
        self.books[name] = NodeBook(spec or old.spec, old.incarnation + 1, exits)

    def bring(self, spec: NodeSpec) -> None:
        """Another machine under a name that may have been used before."""
        before = self.state.nodes.get(spec.id)
        self.books[spec.id] = NodeBook(spec, before.incarnation + 1 if before else 1)
        self.hear(spec.id)

    def hear(self, *names: str) -> Step:
        return self.step(nodes=tuple(self.books[name].report() for name in names))

    def hear_reports(self, *reports: NodeReport) -> Step:
        return self.step(nodes=reports)

    def learn_gone(self, name: str) -> Step:
        book = self.books[name]
        exits = tuple(book.exits.values())
        return self.step(gone=(NodeGone(name, book.incarnation, "its agent died", exits),))

    def deliver(self, *names: str) -> list[Action]:
        """The commands of the last step reach these nodes, or all; returns what they do."""
        reached = [name for name in self._outbox if name in (names or self.books)]
        return [order for name in reached for order in self.books[name].take(self._outbox[name])]

    def send(self, name: str, commands: Sequence[Command]) -> list[Action]:
        self.controller.send(commands)
        return self.deliver(name)

    def run(self, **fields: Any) -> str:
        """Submit a job that fits, and see it alive on all its nodes."""
        job_id = self.submit(**fields)
        self.deliver()
        self.hear(*dict.fromkeys(member.slice.node for member in self.job(job_id).members))
        return job_id

    def exit(self, job_id: str, code: int = 0, member: int = 0, why: str = "") -> None:
        """A member's process ends; its node has not reported it yet."""
        job = self.job(job_id)
        ref = MemberRef(job_id, job.attempt, member)
        self.books[job.members[member].slice.node].exited(ref, code, why)

    def end(self, job_id: str, code: int = 0, member: int = 0, why: str = "") -> Step:
        """A member's process ends, and its node says so."""
        self.exit(job_id, code, member, why)
        return self.hear(self.job(job_id).members[member].slice.node)


def eventful() -> Cluster:
    """A cluster to which nearly everything has happened."""
    cluster = Cluster()
    cluster.join("a", gpus=2)
    cluster.join("b", gpus=2)
    failing = cluster.run(gpus=1, restart="on-failure", retries=3, backoff_ms=500)
    cluster.run(gpus=1, time_limit_ms=9_000)
    cluster.run(gpus=1, members=2)
    cluster.submit(gpus=2, members=2, name="waits")
    cluster.end(failing, code=1)
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.reboot("b")
    cluster.hear("b")
    cluster.wait(5_000)
    cluster.hear("b")
    return cluster


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]
