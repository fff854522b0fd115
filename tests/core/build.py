"""A cluster in a test's hands: one step at a time, every step checked, every node a real book."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import settings

from shoal.core.nodebook import NodeBook, Order
from shoal.core.state.invariants import verify, verify_touched
from shoal.core.state.state import Node, State
from shoal.core.step import Step, step
from shoal.model.commands import Command, Envelope
from shoal.model.events import Event
from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import (
    Accepted,
    Answer,
    Cancel,
    NodeGone,
    NodeReport,
    Report,
    Request,
    SetIntent,
    Submit,
)

# The same examples each time, and no clock: a slow machine is no reason to fail.
examples = settings(max_examples=150, deadline=None, derandomize=True)

POLICY = Policy(suspect_after_ms=5_000, grace_ms=60_000)


def node_spec(
    name: str, *, gpus: int = 0, cpus: int = 8, memory_mb: int = 1000, **rest: Any
) -> NodeSpec:
    """`rest`: the GPUs' model and memory, and the node's place."""
    return NodeSpec(
        id=name,
        gpus=gpus,
        cpu_milli=cpus * 1000,
        memory_mb=memory_mb,
        address=f"{name}.test",
        **rest,
    )


def job_spec(**fields: Any) -> JobSpec:
    """As it would come from outside: validated, and words turned into what they name."""
    return msgspec.convert({"command": ("work",), **fields}, JobSpec)


class Cluster:
    """Nothing is sent by itself: `deliver` hands the last step's commands to the nodes' books,
    `hear` lets nodes report, and time passes only by `wait`."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.policy = policy
        self.state = State()
        self.now_ms = 1_000
        self.books: dict[str, NodeBook] = {}
        self.log: list[Event] = []
        self.finished: dict[str, Job] = {}
        self.last = Step([], [], [], [], None)
        self._number = 0

    # -- the controller's side -------------------------------------------------------------

    def step(self, **report: Any) -> Step:
        self.last = step(self.state, Report(**report), self.policy, self.now_ms)
        verify(self.state, self.policy, self.now_ms, settled=self.last.wake_ms != self.now_ms)
        verify_touched(self.state, self.last.events)
        self.log += self.last.events
        self.finished.update({job.id: job for job in self.last.finished})
        return self.last

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
        return self.finished.get(job_id) or self.state.jobs[job_id]

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

    def hear(self, *names: str) -> Step:
        return self.step(nodes=tuple(self.books[name].report() for name in names))

    def hear_reports(self, *reports: NodeReport) -> Step:
        return self.step(nodes=reports)

    def learn_gone(self, name: str) -> Step:
        book = self.books[name]
        exits = tuple(book.exits.values())
        return self.step(gone=(NodeGone(name, book.incarnation, "its agent died", exits),))

    def deliver(self, *names: str) -> list[Order]:
        """The commands of the last step reach these nodes, or all; returns what they do."""
        by_node: dict[str, list[Command]] = {}
        for command in self.last.commands:
            by_node.setdefault(command.node, []).append(command)
        done: list[Order] = []
        for name, commands in by_node.items():
            if name in (names or self.books):
                done += self.send(name, commands)
        return done

    def send(self, name: str, commands: Sequence[Command]) -> list[Order]:
        self._number += 1
        return self.books[name].take(Envelope(1, self._number, tuple(commands)))

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
