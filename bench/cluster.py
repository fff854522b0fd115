"""A cluster for benchmarks of the core: the controller's state and its nodes' books, in memory.

No process runs. Nodes use `NodeBook`, as agents do, so that the timed steps get the same reports as
live ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from shoal.core.nodebook import NodeBook
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.commands import Command, Envelope
from shoal.model.job import Job, JobSpec, MemberRef, Phase
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Cancel, Report, Submit

GPUS_PER_NODE = 8
CPU_MILLI_PER_NODE = 64_000
MEMORY_MB_PER_NODE = 1_024_000
SUBMIT_BATCH = 500

# Little clock time passes in a benchmark, so no node must become silent for missing heartbeats.
POLICY = Policy(silent_after_ms=3_600_000, grace_ms=7_200_000)

# (weight, members, GPUs, CPUs) of a member: most jobs are small, most GPUs belong to large gangs.
SHAPES = (
    (28, 1, 1, 8),
    (6, 1, 1, 6),
    (8, 1, 2, 16),
    (8, 1, 4, 32),
    (12, 1, 8, 64),
    (3, 8, 1, 8),
    (2, 16, 1, 6),
    (2, 4, 2, 16),
    (2, 4, 4, 32),
    (7, 2, 8, 64),
    (6, 4, 8, 64),
    (4, 8, 8, 64),
    (2, 16, 8, 64),
    (1, 32, 8, 64),
    (1, 64, 8, 64),
    (4, 1, 0, 4),
    (2, 1, 0, 16),
    (1, 4, 0, 8),
    (1, 32, 0, 4),
)
CRUMB_CPUS = 2
PRIORITIES = ((80, 0), (15, 10), (5, -10))
# No waiting shape is smaller than these, so once none of them finds room the cluster is full.
# The last is a crumb: smaller than anything that waits.
FILLERS = ((1, 6), (0, 16), (0, 8), (0, 4), (0, CRUMB_CPUS))


class Mix:
    """An endless supply of job specs like those of a busy cluster; it depends only on the seed."""

    def __init__(self, seed: int, *, wide: bool = False, own_shape: bool = False) -> None:
        """`wide`: only gangs that no single node can hold. `own_shape`: no two jobs alike."""
        self._random = random.Random(seed)
        self._own_shape = own_shape
        self._made = 0
        self._shapes = [shape for shape in SHAPES if not wide or _is_wide(*shape[1:])]
        self._weights = [shape[0] for shape in self._shapes]

    def spec(self) -> JobSpec:
        _, members, gpus, cpus = self._random.choices(self._shapes, self._weights)[0]
        weights = [weight for weight, _ in PRIORITIES]
        priority = self._random.choices(PRIORITIES, weights)[0][1]
        self._made += 1
        memory_mb = 4_000 * cpus - (self._made if self._own_shape else 0)
        return job_spec(members, gpus, cpus, priority=priority, memory_mb=memory_mb)

    def specs(self, count: int) -> list[JobSpec]:
        return [self.spec() for _ in range(count)]


def job_spec(
    members: int, gpus: int, cpus: int, *, priority: int = 0, memory_mb: int = 0
) -> JobSpec:
    return JobSpec(
        command=("python", "train.py"),
        members=members,
        gpus=gpus,
        cpu_milli=cpus * 1000,
        memory_mb=memory_mb,
        priority=priority,
        time_limit_ms=86_400_000,
    )


class Cluster:
    """`elapsed_ns` is the CPU time that the last step took: a step never waits, so on an idle
    core that is its whole time, and on a busy one it leaves out what others took. `started`
    holds the specs of the jobs placed since somebody last emptied it."""

    def __init__(self, nodes: int, *, labeled: bool = False) -> None:
        """`labeled`: each node has 20 labels, one of which is its own."""
        self.state = State()
        self.now_ms = 1_000_000
        self.elapsed_ns = 0
        self.started: list[JobSpec] = []
        specs = (_node(index, labeled=labeled) for index in range(nodes))
        self.books = {spec.id: NodeBook(spec, incarnation=1) for spec in specs}
        self._envelopes = 0
        self.step(Report(nodes=tuple(book.report() for book in self.books.values())))

    def step(self, report: Report, policy: Policy = POLICY) -> Step:
        """One timed step; its commands still have to be delivered."""
        self.now_ms += 1
        start_ns = time.thread_time_ns()
        result = step(self.state, report, policy, self.now_ms)
        self.elapsed_ns = time.thread_time_ns() - start_ns
        self.started += [
            self.state.jobs[event.job].spec for event in result.events if type(event) is JobPlaced
        ]
        return result

    def settle(self, result: Step) -> None:
        """Deliver commands and process the nodes' reports until there are no more commands."""
        while result.commands or result.wake_ms == self.now_ms:
            told = self._deliver(result.commands)
            result = self.step(Report(nodes=tuple(self.books[node].report() for node in told)))

    def submit(self, specs: Sequence[JobSpec]) -> int:
        """Returns how many of them were placed at once."""
        waiting = self.state.queue.size
        self.settle(self.step(Report(requests=tuple(map(Submit, specs)))))
        return len(specs) - (self.state.queue.size - waiting)

    def fill(self, mix: Mix) -> None:
        """Run jobs of the mix, and fillers in the gaps they leave, until no filler finds room."""
        while self.submit(mix.specs(SUBMIT_BATCH)) > SUBMIT_BATCH // 2:
            pass
        self.cancel_waiting()
        for gpus, cpus in FILLERS:
            filler = job_spec(1, gpus, cpus)
            while self.submit([filler] * SUBMIT_BATCH) == SUBMIT_BATCH:
                pass
            self.cancel_waiting()
        self.started.clear()

    def refill(self) -> None:
        """For every job that started, a similar one arrives, so that the queue keeps its length."""
        while self.started:
            specs, self.started = self.started, []
            self.submit(specs)

    def end_nodes(self, in_ms: int, every: int = 1) -> None:
        """Every so-manieth node says that it ends in this time."""
        for book in list(self.books.values())[::every]:
            book.ends_in_ms, book.ends_why = in_ms, "time limit"
        self.settle(self.step(Report(nodes=tuple(book.report() for book in self.books.values()))))

    def cancel_waiting(self) -> None:
        waiting = [job.id for job in self.state.jobs.values() if job.phase is Phase.WAITING]
        self.settle(self.step(Report(requests=tuple(map(Cancel, waiting)))))

    def running(self, wanted: Callable[[Job], bool]) -> list[Job]:
        return [
            job for job in self.state.jobs.values() if job.phase is Phase.RUNNING and wanted(job)
        ]

    def end(self, jobs: Iterable[Job]) -> Report:
        """The report that nodes send when all members of the jobs exit 0."""
        nodes: dict[str, None] = {}
        for job in jobs:
            for number, member in enumerate(job.members):
                nodes[member.slice.node] = None
                ref = MemberRef(job.id, job.attempt, number)
                self.books[member.slice.node].exited(ref, 0)
        return Report(nodes=tuple(self.books[node].report() for node in nodes))

    def _deliver(self, commands: list[Command]) -> dict[str, None]:
        """The nodes that got an envelope, in order."""
        by_node: dict[str, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        self._envelopes += 1
        for node, orders in by_node.items():
            self.books[node].take(Envelope(1, self._envelopes, tuple(orders)))
        return dict.fromkeys(by_node)


def _is_wide(members: int, gpus: int, cpus: int) -> bool:
    return members * gpus > GPUS_PER_NODE or members * cpus * 1000 > CPU_MILLI_PER_NODE


def _node(index: int, *, labeled: bool) -> NodeSpec:
    labels = {f"feature-{number}": "true" for number in range(18)}
    labels |= {"host": f"h{index}", "zone": f"z{index % 4}"}
    return NodeSpec(
        id=f"n{index}",
        cpu_milli=CPU_MILLI_PER_NODE,
        memory_mb=MEMORY_MB_PER_NODE,
        gpus=GPUS_PER_NODE,
        gpu_model="h100",
        place=f"b{index // 512}/r{index // 32}",
        address=f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}",
        labels=labels if labeled else {},
    )
