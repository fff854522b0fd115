"""How long one step of the core takes on a large and full cluster, and what makes it longer.

Run with `python -m bench.step_cost`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from bench.cluster import CRUMB_CPUS, GPUS_PER_NODE, POLICY, Cluster, Mix
from bench.figures import Spread, machine, ratio, spread, table
from shoal.model.job import Job, JobSpec
from shoal.model.report import Report, Submit

NODES = 12_500
QUEUED = 1_000
PLACED = 100
FINISHED = 20_000
REPEATS = 300
PLACE_REPEATS = 60
SEED = 7
WEEK_MS = 7 * 86_400_000

PLACE_GOAL_MS = 50.0
END_GOAL_MS = 1.0

# Enough GPUs for well over PLACED gangs of the mix, wherever on the cluster they become free.
GPUS_TO_PLACE = 50 * PLACED
ENDED_TOGETHER = 200
ASKS: dict[str, Any] = {"command": ("x",), "gpus": 8, "cpu_milli": 64_000, "priority": -20}


class Case(msgspec.Struct, frozen=True):
    """One kind of step. `starts` is the mean number of jobs that it placed."""

    spread: Spread
    starts: float
    goal_ms: float | None = None


def measure() -> dict[str, object]:
    """The usual kinds of steps, then how the most common one grows. Only `core.step` is timed."""
    cases = measure_cases()
    return {
        "machine": machine(),
        "nodes": NODES,
        "queued": QUEUED,
        "cases": msgspec.to_builtins(cases),
        "growth": measure_growth(),
    }


def measure_cases() -> dict[str, Case]:
    mixed = full_cluster(NODES, QUEUED)
    cases = {
        "a job ends, another starts": ends(mixed, _has_one_gpu),
        "a job ends, several share its node": ends(mixed, _has_a_node),
        "a job ends, its room is too small": ends(mixed, _is_crumb),
        "a heartbeat, nothing new": heartbeat(mixed),
        f"{PLACED} gangs are placed": place_many(mixed),
    }
    with _no_garbage_collection():
        cases[f"{PLACED} gangs are placed, no collection"] = place_many(mixed)
    wide = full_cluster(NODES, QUEUED, Mix(SEED + 1, wide=True))
    cases["a job ends, members fit but no gang"] = ends(wide, _has_a_node)
    return cases


def measure_growth() -> dict[str, dict[str, float]]:
    """The median of one end and one start in milliseconds, along each axis that may matter."""
    aged = full_cluster(NODES, QUEUED)
    finish_many(aged, FINISHED)
    base = full_cluster(NODES, QUEUED)
    long = full_cluster(NODES, 10 * QUEUED)
    diverse = full_cluster(NODES, QUEUED, Mix(SEED + 1, own_shape=True))
    return {
        "nodes": compare(
            {str(n): full_cluster(n, QUEUED) for n in (NODES // 100, NODES // 10)}
            | {str(NODES): base}
        ),
        "queued gangs": compare(
            {
                str(QUEUED // 10): full_cluster(NODES, QUEUED // 10),
                str(QUEUED): base,
                str(10 * QUEUED): long,
            }
        ),
        "shapes in the queue": compare(
            {str(len(cluster.state.queue.lanes)): cluster for cluster in (base, diverse)}
        ),
        "labels": compare(
            {
                "none": base,
                "20 on each node": full_cluster(NODES, QUEUED, labeled=True),
                "and jobs that ask for a zone": asking(JobSpec(where=("zone=z1",), **ASKS)),
                "and jobs spread over zones": asking(JobSpec(spread="zone", **ASKS)),
            }
        ),
        "nodes that end": compare(
            {
                "none": base,
                "all, after the jobs": ending(WEEK_MS, every=1),
                "half, before the jobs": ending(WEEK_MS // 14, every=2),
            }
        ),
        "finished jobs": compare({"0": base, str(FINISHED): aged}),
        "members of one gang, a report of each of its nodes": {
            str(members): start_of_gang(members) for members in (1_000, 4_000, 16_000)
        },
        f"queued gangs, placing {PLACED}": {
            str(QUEUED): place_many(base).spread.median_ms,
            str(10 * QUEUED): place_many(long).spread.median_ms,
        },
    }


def ending(in_ms: int, every: int) -> Cluster:
    """A full cluster in which nodes end, before or after the jobs' time limit of a day."""
    cluster = full_cluster(NODES, QUEUED)
    cluster.end_nodes(in_ms, every)
    return cluster


def asking(spec: JobSpec) -> Cluster:
    """A full cluster of nodes with labels, where jobs that ask about them wait, too."""
    cluster = full_cluster(NODES, QUEUED, labeled=True)
    assert cluster.submit([spec] * 100) == 0
    return cluster


def full_cluster(
    nodes: int, queued: int, mix: Mix | None = None, *, labeled: bool = False
) -> Cluster:
    """A cluster with no room for any job of the mix, and `queued` such jobs waiting."""
    cluster = Cluster(nodes, labeled=labeled)
    cluster.fill(Mix(SEED))
    placed = cluster.submit((mix or Mix(SEED + 1)).specs(queued))
    assert placed == 0, f"{placed} of the jobs meant to wait found room"
    return cluster


def start_of_gang(members: int) -> float:
    """None of its members has started: each node reports once and gets its commands. Returns the
    time of all of these steps in milliseconds."""
    cluster = Cluster(members // GPUS_PER_NODE)
    spec = JobSpec(command=("train",), gpus=1, members=members)
    cluster.step(Report(requests=(Submit(spec),)))  # the commands of this step are lost
    elapsed_ns = 0
    for book in cluster.books.values():
        orders = cluster.step(Report(nodes=(book.report(),))).commands
        assert len(orders) == GPUS_PER_NODE
        elapsed_ns += cluster.elapsed_ns
    return round(elapsed_ns / 1e6, 1)


def ends(cluster: Cluster, wanted: Callable[[Job], bool]) -> Case:
    """The step that learns of the end of one job on one node."""
    times, starts = [], 0
    for job in _on_one_node(cluster, wanted)[:REPEATS]:
        elapsed_ns, started = _end_one(cluster, job)
        times.append(elapsed_ns)
        starts += started
    return Case(spread(times), starts=round(starts / len(times), 2), goal_ms=END_GOAL_MS)


def compare(clusters: Mapping[str, Cluster]) -> dict[str, float]:
    """Medians of one end and one start, in turns, so that noise affects all clusters equally."""
    times: dict[str, list[int]] = {name: [] for name in clusters}
    jobs: dict[str, list[Job]] = {name: [] for name in clusters}
    for _ in range(REPEATS):
        for name, cluster in clusters.items():
            jobs[name] = jobs[name] or _on_one_node(cluster, _has_one_gpu)
            times[name].append(_end_one(cluster, jobs[name].pop())[0])
    return {name: spread(taken).median_ms for name, taken in times.items()}


def heartbeat(cluster: Cluster) -> Case:
    """A node reports what the controller already knows."""
    books = list(cluster.books.values())
    chooser = random.Random(SEED)
    times = []
    for _ in range(REPEATS):
        cluster.step(Report(nodes=(chooser.choice(books).report(),)))
        times.append(cluster.elapsed_ns)
    return Case(spread(times), starts=0)


def place_many(cluster: Cluster) -> Case:
    """Many jobs have ended and the queue has not been looked at since: place PLACED gangs."""
    one_at_most = msgspec.structs.replace(POLICY, placements_per_step_max=1)
    as_many = msgspec.structs.replace(POLICY, placements_per_step_max=PLACED)
    chooser = random.Random(SEED)
    times = []
    for _ in range(PLACE_REPEATS):
        ended = _with_gpus(cluster, GPUS_TO_PLACE, chooser)
        before = cluster.step(cluster.end(ended), one_at_most)
        already = len(cluster.started)
        result = cluster.step(Report(), as_many)
        times.append(cluster.elapsed_ns)
        placed = len(cluster.started) - already
        assert placed == PLACED, f"there was room for {placed} gangs only"
        cluster.settle(before)
        cluster.settle(result)
        cluster.refill()
    return Case(spread(times), starts=PLACED, goal_ms=PLACE_GOAL_MS)


def _with_gpus(cluster: Cluster, gpus: int, chooser: random.Random) -> list[Job]:
    """Random running jobs that together hold at least `gpus` GPUs."""
    candidates = cluster.running(lambda job: job.spec.gpus > 0)
    chooser.shuffle(candidates)
    chosen = []
    while gpus > 0:
        job = candidates.pop()
        chosen.append(job)
        gpus -= job.spec.members * job.spec.gpus
    return chosen


def finish_many(cluster: Cluster, count: int) -> None:
    """Let jobs end and others like them come and start, until `count` more have finished."""
    chooser = random.Random(SEED)
    until = cluster.state.finished + count
    while cluster.state.finished < until:
        ended = chooser.sample(cluster.running(lambda _: True), ENDED_TOGETHER)
        cluster.settle(cluster.step(cluster.end(ended)))
        cluster.refill()


def _end_one(cluster: Cluster, job: Job) -> tuple[int, int]:
    """The time of the step and the jobs started in it; afterwards the balance is restored."""
    result = cluster.step(cluster.end([job]))
    elapsed_ns, started = cluster.elapsed_ns, len(cluster.started)
    cluster.settle(result)
    if cluster.started:
        cluster.refill()
    else:
        cluster.submit([job.spec])
        cluster.started.clear()
    return elapsed_ns, started


def _on_one_node(cluster: Cluster, wanted: Callable[[Job], bool]) -> list[Job]:
    jobs = cluster.running(
        lambda job: wanted(job) and len({member.slice.node for member in job.members}) == 1
    )
    random.Random(SEED).shuffle(jobs)
    return jobs


def _has_one_gpu(job: Job) -> bool:
    return job.spec.gpus == 1


def _has_a_node(job: Job) -> bool:
    return job.spec.gpus == GPUS_PER_NODE


def _is_crumb(job: Job) -> bool:
    return job.spec.gpus == 0 and job.spec.cpu_milli == CRUMB_CPUS * 1000


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Separates the cost of a step from that of Python's garbage collector."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    figures = measure()
    print(figures["machine"])
    print(f"{NODES:,} nodes with 8 GPUs each, {QUEUED:,} gangs waiting; milliseconds of CPU time")
    print(cases_table(msgspec.convert(figures["cases"], dict[str, Case])))
    print()
    print("growth of 'a job ends, another starts' (median, and ratio to the first)")
    print(growth_table(msgspec.convert(figures["growth"], dict[str, dict[str, float]])))
    print(msgspec.json.encode(figures).decode())


def cases_table(cases: Mapping[str, Case]) -> str:
    return table(
        ("one step", "median", "p99", "max", "goal", "starts", "times"),
        (
            (
                name,
                case.spread.median_ms,
                case.spread.p99_ms,
                case.spread.max_ms,
                "-" if case.goal_ms is None else f"< {case.goal_ms:g}",
                case.starts,
                case.spread.count,
            )
            for name, case in cases.items()
        ),
    )


def growth_table(growth: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for axis, medians in growth.items():
        base = next(iter(medians.values()))
        for value, median_ms in medians.items():
            rows.append((f"{axis}: {value}", median_ms, f"x {ratio(median_ms, base)}"))
    return table(("", "median", "ratio"), rows)


if __name__ == "__main__":
    main()
