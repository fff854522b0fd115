"""How long one step of the core takes on a large and full cluster, and what makes it longer.

Run with `python -m bench.step_cost`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec
from bench.cluster import CRUMB_CPUS, POLICY, Cluster, Mix
from bench.figures import Spread, machine, ratio, spread, table

from shoal.model.job import Job
from shoal.model.report import Report

NODES = 12_500
QUEUED = 1_000
PLACED = 100
FINISHED = 20_000
REPEATS = 300
PLACE_REPEATS = 40
SEED = 7

PLACE_GOAL_MS = 50.0
END_GOAL_MS = 1.0

# So many GPUs hold well over PLACED gangs of the mix, wherever on the cluster they become free.
GPUS_TO_PLACE = 50 * PLACED
ENDED_TOGETHER = 200


class Case(msgspec.Struct, frozen=True):
    """One kind of step. `starts` is the mean number of jobs that it placed."""

    spread: Spread
    starts: float
    goal_ms: float | None = None


def measure() -> dict[str, object]:
    """The steps of a day, then how the commonest of them grows. Only `core.step` is timed."""
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
        "a job ends, another starts": end_starts_one(mixed),
        "a job ends, several share its node": _ends(mixed, lambda job: job.spec.gpus == 8),
        "a job ends, its room is too small": _ends(mixed, _is_crumb),
        "a heartbeat, nothing new": heartbeat(mixed),
        f"{PLACED} gangs are placed": place_many(mixed),
    }
    wide = full_cluster(NODES, QUEUED, Mix(SEED + 1, wide=True))
    cases["a job ends, members fit but no gang"] = _ends(wide, lambda job: job.spec.gpus == 8)
    return cases


def measure_growth() -> dict[str, dict[str, float]]:
    """The median of one end and one start in milliseconds, along each axis that may matter."""
    by_nodes = {str(nodes): _median(full_cluster(nodes, QUEUED)) for nodes in (125, 1_250, NODES)}
    by_queue, by_queue_placing = {}, {}
    for queued in (100, 1_000, 10_000):
        cluster = full_cluster(NODES, queued)
        by_queue[str(queued)] = _median(cluster)
        if queued > PLACED:
            by_queue_placing[str(queued)] = place_many(cluster).spread.median_ms
    cluster = full_cluster(NODES, QUEUED, Mix(SEED + 1, own_shape=True))
    by_shapes = {"few": by_nodes[str(NODES)], "one per job": _median(cluster)}
    cluster = full_cluster(NODES, QUEUED)
    by_finished = {"0": _median(cluster)}
    finish_many(cluster, FINISHED)
    by_finished[str(FINISHED)] = _median(cluster)
    return {
        "nodes": by_nodes,
        "queued gangs": by_queue,
        f"queued gangs, placing {PLACED}": by_queue_placing,
        "shapes in the queue": by_shapes,
        "finished jobs": by_finished,
    }


def full_cluster(nodes: int, queued: int, mix: Mix | None = None) -> Cluster:
    """A cluster with no room for any job of the mix, and `queued` such jobs waiting."""
    cluster = Cluster(nodes)
    cluster.fill(Mix(SEED))
    placed = cluster.submit((mix or Mix(SEED + 1)).specs(queued))
    assert placed == 0, f"{placed} of the jobs meant to wait found room"
    return cluster


def end_starts_one(cluster: Cluster) -> Case:
    return _ends(cluster, lambda job: job.spec.gpus == 1)


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
    """Running jobs by chance that hold at least so many GPUs together."""
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
        ended = chooser.sample(cluster.running(_on_one_node), ENDED_TOGETHER)
        cluster.settle(cluster.step(cluster.end(ended)))
        cluster.refill()


def _ends(cluster: Cluster, wanted: Callable[[Job], bool]) -> Case:
    """Time the step that hears of the end of a job on one node, then restore the balance."""
    candidates = cluster.running(lambda job: _on_one_node(job) and wanted(job))
    random.Random(SEED).shuffle(candidates)
    times, starts = [], 0
    for job in candidates[:REPEATS]:
        result = cluster.step(cluster.end([job]))
        times.append(cluster.elapsed_ns)
        starts += len(cluster.started)
        cluster.settle(result)
        if cluster.started:
            cluster.refill()
        else:
            cluster.submit([job.spec])
            cluster.started.clear()
    return Case(spread(times), starts=round(starts / len(times), 2), goal_ms=END_GOAL_MS)


def _on_one_node(job: Job) -> bool:
    return len({member.slice.node for member in job.members}) == 1


def _is_crumb(job: Job) -> bool:
    return job.spec.gpus == 0 and job.spec.cpu_milli == CRUMB_CPUS * 1000


def _median(cluster: Cluster) -> float:
    return end_starts_one(cluster).spread.median_ms


def main() -> None:
    figures = measure()
    print(figures["machine"])
    print(f"{NODES:,} nodes with 8 GPUs each, {QUEUED:,} gangs waiting; milliseconds")
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
