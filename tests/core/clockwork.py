"""A cluster without faults that runs by itself: jobs come when planned, run for as long as they
run, and stop when they are told to. Every step is checked."""

from __future__ import annotations

import heapq
import random
from typing import Any

import msgspec

from shoal.core.nodebook import NodeBook
from shoal.core.policies import SHIPPED
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobClaimed, JobReserved, JobUnclaimed
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobStopping
from shoal.model.commands import Check, Dismiss, Launch, Prepare
from shoal.model.health import CheckResult
from shoal.model.job import MemberRef, StopCause
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Preempt, Tenant
from shoal.model.report import Accepted, Submit
from tests.core.build import Cluster, job_spec, node_spec

NEVER_MS = 10**11  # nobody is silent here
TERMINATED_CODE = 143


class Clockwork(Cluster):
    """Commands take no time. A job that checkpoints goes on where it was; others start over."""

    def __init__(
        self, policy: Policy, *nodes: NodeSpec, stop_ms: int = 0, tick_ms: int = 0
    ) -> None:
        """`tick_ms`: a step is taken so often even if nothing happens, as heartbeats do."""
        super().__init__(
            msgspec.structs.replace(policy, silent_after_ms=NEVER_MS, grace_ms=NEVER_MS)
        )
        self.stop_ms = stop_ms
        self.tick_ms = tick_ms
        self.run_ms: dict[str, int] = {}  # how long each job runs in all
        self._plans: list[tuple[int, int, int, dict[str, Any]]] = []
        self._ends: list[tuple[int, MemberRef, str, int]] = []
        for spec in nodes:
            self.books[spec.id] = NodeBook(spec, incarnation=1)
            self.hear(spec.id)

    def plan(self, at_ms: int, run_ms: int, **fields: Any) -> None:
        heapq.heappush(self._plans, (at_ms, len(self._plans), run_ms, fields))

    def go_on(self, until_ms: int = NEVER_MS) -> None:
        """Until then, or until nothing is left to happen."""
        while (next_ms := self._next_ms()) <= until_ms and next_ms < NEVER_MS:
            self.now_ms = max(self.now_ms, next_ms)
            self._turn()
        if until_ms < NEVER_MS:
            self.now_ms = until_ms

    def _next_ms(self) -> int:
        times = [NEVER_MS if self.last.wake_ms is None else self.last.wake_ms]
        times += [heap[0][0] for heap in (self._plans, self._ends) if heap]
        if self.tick_ms and self.state.jobs:
            times.append(self.now_ms - self.now_ms % self.tick_ms + self.tick_ms)
        return min(times)

    def _turn(self) -> None:
        plans: list[tuple[int, dict[str, Any]]] = []
        touched: dict[str, None] = {}
        while self._plans and self._plans[0][0] <= self.now_ms:
            plans.append(heapq.heappop(self._plans)[2:])
        while self._ends and self._ends[0][0] <= self.now_ms:
            _, ref, node, code = heapq.heappop(self._ends)
            if ref in self.books[node].alive:
                self.books[node].exited(ref, code)
                touched[node] = None
        requests = tuple(Submit(job_spec(**fields)) for _, fields in plans)
        self.step(requests=requests, nodes=tuple(self.books[node].report() for node in touched))
        for (run_ms, _), answer in zip(plans, self.last.answers, strict=True):
            assert isinstance(answer, Accepted), answer
            self.run_ms[answer.id] = run_ms
        self._obey()

    def _obey(self) -> None:
        """Commands are obeyed and reported until there are none left."""
        while commands := self.last.commands:
            for order in self.deliver():
                if isinstance(order, Check):
                    self.books[order.node].measured(CheckResult(id=order.id))
                    continue
                if isinstance(order, (Prepare, Dismiss)):
                    continue
                if isinstance(order, Launch):
                    left_ms = self.run_ms[order.ref.job] - self.job(order.ref.job).attained_ms
                    end = (self.now_ms + max(1, left_ms), order.ref, order.node, 0)
                else:
                    end = (self.now_ms + self.stop_ms, order.ref, order.node, TERMINATED_CODE)
                if end[0] > self.now_ms:
                    heapq.heappush(self._ends, end)
                else:
                    self.books[order.node].exited(order.ref, TERMINATED_CODE)
            self.hear(*dict.fromkeys(command.node for command in commands))

    # -- what happened ---------------------------------------------------------------------

    def events_of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.log if isinstance(event, kinds)]

    @property
    def starts(self) -> dict[str, int]:
        """When each job was first placed."""
        starts: dict[str, int] = {}
        for event in self.events_of(JobPlaced):
            starts.setdefault(event.job, event.at_ms)
        return starts

    @property
    def ends(self) -> dict[str, int]:
        return {event.job: event.at_ms for event in self.events_of(JobFinished)}

    @property
    def promises(self) -> dict[str, int]:
        """The start that each reserved job was promised first."""
        promises: dict[str, int] = {}
        for event in self.events_of(JobReserved):
            promises.setdefault(event.job, event.start_ms)
        return promises

    @property
    def preemptions(self) -> list[tuple[str, str]]:
        """Pairs of (who it was for, who was stopped), in order."""
        return [pair for pairs in preemptions(self.log) for pair in pairs]


def preemptions(log: list[Event]) -> list[list[tuple[str, str]]]:
    """One list for each job that others were stopped for: those who only shrank are in it."""
    found: list[list[tuple[str, str]]] = []
    victims: list[str] = []
    for event in log:
        if isinstance(event, JobStopping) and event.cause in (StopCause.PREEMPT, StopCause.RESIZE):
            victims.append(event.job)
        elif isinstance(event, JobClaimed) and event.job not in victims:
            found.append([(event.job, victim) for victim in victims])
            victims = []
        elif isinstance(event, JobClaimed) and "grows" in event.why:
            victims = []
    return found


def claims(log: list[Event]) -> dict[str, list[str]]:
    """What became of each job's claims: `placed`, `given up` or, at the end of the log, `open`."""
    found: dict[str, list[str]] = {}
    for event in log:
        if isinstance(event, JobClaimed):
            found.setdefault(event.job, []).append("open")
        elif (
            isinstance(event, (JobPlaced, JobUnclaimed))
            and found.get(event.job, [""])[-1] == "open"
        ):
            found[event.job][-1] = "placed" if isinstance(event, JobPlaced) else "given up"
    return found


def random_history(seed: int, policy: Policy) -> Clockwork:
    """A few nodes and a few jobs of all kinds, some of which may be stopped, shrink or grow."""
    rng = random.Random(seed)
    sizes = [rng.choice((2, 4)) for _ in range(rng.randint(1, 3))]
    nodes = [node_spec(f"n{number}", gpus=gpus) for number, gpus in enumerate(sizes)]
    cluster = Clockwork(policy, *nodes, stop_ms=rng.choice((0, 0, 300)))
    for _ in range(rng.randint(4, 16)):
        gpus, members = rng.choice((0, 1, 1, 2)), rng.choice((1, 1, 2, 3))
        if gpus:
            members = min(members, sum(size // gpus for size in sizes))
        cluster.plan(
            1_000 + rng.randrange(40_000),
            rng.choice((500, 5_000, 20_000)),
            gpus=gpus,
            members=members,
            members_max=rng.choice((0, 0, members + 2)),
            cpu_milli=rng.choice((0, 1_000)),
            priority=rng.choice((0, 0, 5, 10)),
            tenant=rng.choice("abc"),
            preemptible=rng.random() < 0.7,
            checkpoint_ms=rng.choice((0, 1_000)),
            estimate_ms=rng.choice((0, 500, 5_000, 20_000)),
        )
    cluster.go_on()
    return cluster


TREES: tuple[tuple[Tenant, ...], ...] = (
    (),
    (Tenant(name="a", quota_gpus=2),),
    (Tenant(name="a", quota_gpus=2), Tenant(name="b", quota_gpus=2, weight=2)),
    (
        Tenant(name="z", quota_gpus=3),
        Tenant(name="a", parent="z"),
        Tenant(name="b", parent="z", quota_gpus=1),
    ),
)


def random_policy(seed: int) -> Policy:
    rng = random.Random(f"policy {seed}")
    return msgspec.structs.replace(
        rng.choice([p for p in SHIPPED.values() if p.preempt is not Preempt.NEVER]),
        tenants=rng.choice(TREES),
        run_ms_min=rng.choice((0, 500, 3_000)),
        move_cost_ms=rng.choice((0, 60_000)),
    )
