"""The cases of Kubernetes' `scheduler_perf` on the pure step, beside the rates that it publishes.

    python -m bench.scheduler_perf [--quick] [CASE ...]

A case makes nodes, fills them with what its description says, and then measures how many members
per second of CPU time one core admits, places and commands. The published figures are thresholds
in pods per second, from kubernetes/kubernetes, test/integration/scheduler_perf/*/performance-
config.yaml: what that project's own machines must reach with an API server and etcd behind the
scheduler. So the ratios compare shapes, not machines, and the pure step stores and sends nothing.
`--quick` measures a tenth of the pods, on all of the nodes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from bench.figures import machine, table
from shoal.core.nodebook import NodeBook
from shoal.core.policies import SHIPPED
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.commands import Command, Envelope, Stop
from shoal.model.job import JobSpec, MemberRef, Phase, Within
from shoal.model.labels import NODE
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, NodeGone, Refused, Report, Request, Submit

GOAL = 10  # times the published rate
BATCH = 200  # requests in a step, about what a busy controller collects in one
NODES_PER_RACK, NODES_PER_BLOCK = 20, 500
ZONES = 3
POLICY: Policy = msgspec.structs.replace(
    SHIPPED["fair"], grace_ms=10**12, silent_after_ms=10**11, run_ms_min=0
)


def pod(members: int = 1, **fields: object) -> JobSpec:
    """The default pod: a tenth of a CPU and 500 MB."""
    known = {"command": ("pause",), "cpu_milli": 100, "memory_mb": 500, "members": members}
    return msgspec.convert({**known, **fields}, JobSpec)


POD = pod()
LOW = pod(cpu_milli=900, preemptible=True, checkpoint_ms=60_000, priority=-10)
HIGH = pod(cpu_milli=3_000, priority=10)
TOO_LARGE = pod(cpu_milli=9_000, priority=10)  # no node has as many CPUs


class Case(msgspec.Struct, frozen=True):
    """`means`: what the case is here. `aside`: what happens beside each `every` measured jobs."""

    name: str
    means: str
    published: int | None  # pods per second
    jobs: Sequence[JobSpec]
    nodes: int = 5_000
    before: Sequence[JobSpec] = ()
    aside: Callable[[World, int], Report] | None = None
    every: int = 100
    tainted: int = 0  # of the nodes
    gpus: int = 0  # on each node
    large: bool = False  # one node more, which holds everything


class World:
    """The controller's state and its nodes' books. Only steps that place measured jobs count."""

    def __init__(self, case: Case) -> None:
        self.state = State(FUNCTIONS)
        self.now_ms = 1_000
        self.placed = 0  # members
        self.spent_ns = 0
        self.envelopes = 0
        specs = [_node(number, case) for number in range(case.nodes)]
        if case.large:
            specs.append(NodeSpec(id="large", cpu_milli=10_000_000, memory_mb=500_000_000))
        self.books = {spec.id: NodeBook(spec, incarnation=1) for spec in specs}
        self.step(Report(nodes=tuple(book.report() for book in self.books.values())))

    def step(self, report: Report) -> Step:
        self.now_ms += 1
        started_ns = time.thread_time_ns()
        done = step(self.state, report, POLICY, self.now_ms, FUNCTIONS)
        self.spent_ns += time.thread_time_ns() - started_ns
        for event in done.events:
            if type(event) is JobPlaced:
                self.placed += len(event.slices)
        return done

    def submit(self, specs: Iterable[Request]) -> Step:
        """Until as much is placed as can be."""
        done = self.step(Report(requests=tuple(specs)))
        commands = done.commands
        while done.wake_ms == self.now_ms:
            done = self.step(Report())
            commands += done.commands
        return msgspec.structs.replace(done, commands=commands)

    def settle(self, commands: list[Command]) -> None:
        """Nodes carry out their commands and report; this is not measured."""
        spent_ns, placed = self.spent_ns, self.placed
        while commands:
            by_node: dict[str, list[Command]] = {}
            for command in commands:
                by_node.setdefault(command.node, []).append(command)
            self.envelopes += 1
            for node, orders in by_node.items():
                book = self.books[node]
                for action in book.take(Envelope(1, self.envelopes, tuple(orders))):
                    if isinstance(action, Stop):
                        book.exited(action.ref, 143)
            told = tuple(self.books[node].report() for node in by_node)
            commands = self.step(Report(nodes=told)).commands
        self.spent_ns, self.placed = spent_ns, placed


def _node(number: int, case: Case) -> NodeSpec:
    rack, block = number // NODES_PER_RACK, number // NODES_PER_BLOCK
    return NodeSpec(
        id=f"n{number}",
        cpu_milli=4_000,
        memory_mb=32_000,
        gpus=case.gpus,
        place=f"b{block}/r{rack}",
        labels={"zone": f"z{number % ZONES}"},
        taints=("keep-out",) if number < case.tainted else (),
    )


def churn(_: World, round_: int) -> Report:
    """A node comes, the one before it goes, and a job comes that no node can hold."""
    book = NodeBook(NodeSpec(id=f"extra{round_}", cpu_milli=4_000, memory_mb=32_000), incarnation=1)
    gone = (NodeGone(f"extra{round_ - 1}", 1, "it was deleted"),) if round_ else ()
    return Report(nodes=(book.report(),), gone=gone, requests=(Submit(TOO_LARGE),))


def one_ends(world: World, _: int) -> Report:
    jobs = (job for job in world.state.jobs.values() if job.phase is Phase.RUNNING)
    next(jobs)  # the others wait for this one
    job = next(jobs)
    book = world.books[job.members[0].slice.node]
    book.exited(MemberRef(job.id, job.attempt, 0), 0)
    return Report(nodes=(book.report(),))


def asks(spec: JobSpec) -> Callable[[World, int], Report]:
    return lambda _world, _round: Report(requests=(Submit(spec),))


CASES = (
    Case("SchedulingBasic/5000Nodes_10000Pods", "jobs of one member", 680, [POD] * 10_000,
         before=[POD] * 1_000),
    Case("SchedulingBasic/5000Nodes_50000Pods", "jobs of one member", 810, [POD] * 50_000,
         before=[POD] * 5_000),
    Case("SchedulingDaemonset/15000Nodes", "--where node=NAME", 1_100,
         [pod(cpu_milli=1, memory_mb=1, where=(f"{NODE}=large",))] * 30_000, nodes=15_000,
         large=True),
    Case("SchedulingNodeAffinity/5000Nodes_10000Pods", "--where zone=z1", 220,
         [pod(where=("zone=z1",))] * 10_000, before=[pod(where=("zone=z1",))] * 5_000),
    Case("SchedulingPodAffinity/5000Nodes_5000Pods", "gangs of 100 with --together zone", 35,
         [pod(100, together="zone")] * 50, before=[pod(100, together="zone")] * 50),
    Case("SchedulingPodAntiAffinity/5000Nodes_2000Pods",
         "gangs of 100 with one member per node; gangs may meet on a node", 60,
         [pod(100, members_per_node=1)] * 20, before=[pod(100, members_per_node=1)] * 10),
    Case("TopologySpreading/5000Nodes_5000Pods", "gangs of 100 with --spread zone", 460,
         [pod(100, spread="zone")] * 50, before=[POD] * 5_000),
    Case("PreferredTopologySpreading/5000Nodes_5000Pods",
         "the same: --spread is as even as possible", 340, [pod(100, spread="zone")] * 50,
         before=[POD] * 5_000),
    Case("SchedulingWithNodeInclusionPolicy/5000Nodes",
         "1,000 nodes have a taint; gangs of 100 with one member per node", 270,
         [pod(100, members_per_node=1)] * 40, tainted=1_000),
    Case("PreemptionAsync/5000Nodes",
         "1 of 101 jobs stops three that yield, on nodes that are nine tenths full", 570,
         [POD] * 5_000, before=[LOW] * 20_000, aside=asks(HIGH)),
    Case("Unschedulable/5kNodes/100Init/10kPods", "1 of 101 jobs is too large and is refused", 590,
         [POD] * 10_000, before=[POD] * 100, aside=asks(TOO_LARGE)),
    Case("Unschedulable/5kNodes/20kInit/10kPods", "1 of 101 jobs is too large and is refused", 600,
         [POD] * 10_000, before=[POD] * 20_000, aside=asks(TOO_LARGE)),
    Case("SchedulingWithMixedChurn/5000Nodes_10000Pods",
         "every 700 jobs a node comes, one goes, and a job is refused", 710, [POD] * 10_000,
         aside=churn, every=700),
    Case("SchedulingWhileGated/1Node_10000GatedPods",
         "9,999 jobs wait for another (--after), one ends for each 18; 1,000 nodes, because a node "
         "of Shoal reports all that it holds", 910, [POD] * 20_000, nodes=1_000,
         before=[POD, *[pod(after=("j1",))] * 9_999, *[POD] * 2_000], aside=one_ends, every=18),
    Case("SchedulingWithExtendedResource/5000pods_5000nodes", "--gpus 1", 180,
         [pod(gpus=1)] * 5_000, gpus=1),
    Case("GangScheduling/5000Nodes_3000Gangs_9000Pods", "gangs of 3", None, [pod(3)] * 3_000),
    Case("GangScheduling/5000Nodes_9Gangs_9000Pods_1000PerGroup", "gangs of 1,000", None,
         [pod(1_000)] * 9),
    Case("TopologyAwareScheduling/5000Nodes_2250Gangs_9000Pods",
         "gangs of 4 that must stay in one rack", None,
         [pod(4, within=Within.RACK, within_required=True)] * 2_250),
    Case("TopologyAwareScheduling/5000Nodes_9Gangs_9000Pods_1000PerGroup",
         "gangs of 1,000 that must stay in one block", None,
         [pod(1_000, within=Within.BLOCK, within_required=True)] * 9),
)  # fmt: skip
NO_COUNTERPART = {
    "SchedulingPreferredPodAffinity, ...AntiAffinity, MixedSchedulingBasePod": (
        "wishes of one job about others that are not in its gang"
    ),
    "...WithNSSelector": "the same, by labels of tenants",
    "DefaultTopologySpreading": "a spread that nobody asked for",
    "SchedulingDeletedPodsWithFinalizers": "jobs that are deleted and stay",
    "SchedulingCSIPVs, SchedulingSecrets, ...": "objects that Shoal does not have",
    "CPG*": "gangs of gangs",
}


class Rate(msgspec.Struct, frozen=True):
    case: str
    means: str
    members: int
    members_per_s: int
    published: int | None
    ratio: float | None


def measure(case: Case, part: int) -> Rate:
    """Of one part of its jobs."""
    world = World(case)
    for batch in _batches(case.before):
        world.settle(world.submit(map(Submit, batch)).commands)
    gc.collect()
    gc.freeze()
    world.placed = world.spent_ns = rounds = since = 0
    jobs = case.jobs[: max(1, len(case.jobs) // part)]
    wanted = sum(spec.members for spec in jobs)
    for batch in _batches(jobs):
        done = world.submit(map(Submit, batch))
        assert all(isinstance(answer, Accepted) for answer in done.answers), done.answers[:1]
        commands = done.commands
        since += len(batch)
        while case.aside is not None and since >= case.every:
            since -= case.every
            placed = world.placed
            aside = world.step(case.aside(world, rounds))
            assert all(isinstance(one, Accepted | Refused) for one in aside.answers)
            commands += aside.commands
            world.placed = placed  # it takes time, but is not what is measured
            rounds += 1
        world.settle(commands)
    gc.unfreeze()
    assert world.placed == wanted, f"{case.name}: {world.placed} of {wanted} found room"
    rate = world.placed / (world.spent_ns / 1e9)
    ratio = None if case.published is None else round(rate / case.published, 1)
    return Rate(case.name, case.means, wanted, round(rate), case.published, ratio)


def _batches(jobs: Sequence[JobSpec]) -> Iterator[Sequence[JobSpec]]:
    for start in range(0, len(jobs), BATCH):
        yield jobs[start : start + BATCH]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the pods")
    arguments = parser.parse_args()
    gc.set_threshold(50_000, 20, 100)  # as the controller does
    print(machine())
    chosen = [
        case
        for case in CASES
        if not arguments.cases or any(word in case.name for word in arguments.cases)
    ]
    rates = [measure(case, 10 if arguments.quick else 1) for case in chosen]
    print(table(
        ("case", "members", "members/s", "published", "ratio", f"{GOAL} x"),
        [
            (
                rate.case,
                rate.members,
                rate.members_per_s,
                rate.published or "-",
                rate.ratio or "-",
                "-" if rate.ratio is None else "yes" if rate.ratio >= GOAL else "no",
            )
            for rate in rates
        ],
    ))  # fmt: skip
    print()
    print(table(("case", "here"), [(rate.case, rate.means) for rate in rates]))
    print()
    print(table(("no counterpart", "because it is about"), NO_COUNTERPART.items()))
    print(msgspec.json.encode({"machine": machine(), "rates": rates}).decode())


if __name__ == "__main__":
    main()
