"""What a step costs does not grow with nodes and jobs that it is not about: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from shoal.core.nodebook import NodeBook
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.commands import Envelope
from shoal.model.job import JobSpec, MemberRef, Phase
from shoal.model.policy import Policy
from shoal.model.report import Report, Submit
from tests.core.build import job_spec, node_spec

# Both above `NODES_MAX` of backfill.py, which bounds the search for an opening.
FEW, MANY = 1_100, 5_500
WAITING = 20
# Trees and heaps of five times as many things are a little deeper.
GROWTH_MAX = 1.05

POLICY = Policy(silent_after_ms=10**9, grace_ms=10**10)
WHOLE_NODE = job_spec(gpus=8, cpu_milli=8_000)


class Full:
    """A cluster in which a job fills each node, some jobs wait, and one node is empty."""

    def __init__(self, nodes: int) -> None:
        self.state = State(FUNCTIONS)
        self.policy = POLICY
        self.now_ms = 1_000
        self.envelopes = 0
        specs = (
            node_spec(f"n{number}", gpus=8, place=f"b{number // 512}/r{number // 32}")
            for number in range(nodes)
        )
        self.books = {spec.id: NodeBook(spec, incarnation=1) for spec in specs}
        self.step(Report(nodes=tuple(book.report() for book in self.books.values())))
        self.submit(*[WHOLE_NODE] * nodes)
        self.submit(*[WHOLE_NODE] * WAITING)
        assert all(room.level.gpus == 0 for room in self.state.rooms)

    def step(self, report: Report) -> Step:
        self.now_ms += 1
        return step(self.state, report, self.policy, self.now_ms, FUNCTIONS)

    def settle(self, done: Step) -> None:
        """Until no node has anything more to do or to say."""
        while done.commands or done.wake_ms == self.now_ms:
            self.envelopes += 1
            told: dict[str, list[Any]] = {}
            for command in done.commands:
                told.setdefault(command.node, []).append(command)
            for node, commands in told.items():
                self.books[node].take(Envelope(1, self.envelopes, tuple(commands)))
            done = self.step(Report(nodes=tuple(self.books[node].report() for node in told)))

    def submit(self, *specs: JobSpec) -> None:
        self.settle(self.step(Report(requests=tuple(map(Submit, specs)))))

    def end_one(self) -> Report:
        """The report of the node on which the first running job has ended."""
        job = next(job for job in self.state.jobs.values() if job.phase is Phase.RUNNING)
        book = self.books[job.members[0].slice.node]
        book.exited(MemberRef(job.id, job.attempt, 0), 0)
        return Report(nodes=(book.report(),))


def submission(cluster: Full) -> Report:
    return Report(requests=(Submit(WHOLE_NODE),))


def another_shape(cluster: Full) -> Report:
    return Report(requests=(Submit(job_spec(gpus=3, memory_mb=77)),))


def heartbeat(cluster: Full) -> Report:
    return Report(nodes=(cluster.books["n7"].report(),))


def end(cluster: Full) -> Report:
    return cluster.end_one()


def another_policy(cluster: Full) -> Report:
    most = cluster.policy.placements_per_step_max + 1
    cluster.policy = msgspec.structs.replace(cluster.policy, placements_per_step_max=most)
    return Report()


def work(cluster: Full, report: Report) -> int:
    """How many instructions of Python one step takes, after one like it."""
    executed = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        done = cluster.step(report)
    finally:
        sys.settrace(before)
    cluster.settle(done)
    return executed


# Instructions of a step, a quarter more than Python 3.11 takes. When a job ends and the next one
# starts, the first opening for the one behind it is sought among 1,025 nodes.
MOST: dict[Callable[[Full], Report], int] = {
    heartbeat: 3_000,
    submission: 5_500,
    another_shape: 6_500,
    another_policy: 5_000,
    end: 175_000,
}


@pytest.fixture(scope="module")
def clusters() -> tuple[Full, Full]:
    return Full(FEW), Full(MANY)


@pytest.mark.parametrize("report", MOST)
def test_a_step_takes_no_longer_in_a_large_cluster(
    clusters: tuple[Full, Full], report: Callable[[Full], Report]
) -> None:
    small, large = clusters
    for cluster in clusters:  # what is looked at for the first time is not counted
        cluster.settle(cluster.step(report(cluster)))
    few, many = work(small, report(small)), work(large, report(large))
    assert 100 < few <= MOST[report], f"{few} instructions with {FEW} nodes"
    assert many <= GROWTH_MAX * few, f"{few} instructions with {FEW} nodes, {many} with {MANY}"
