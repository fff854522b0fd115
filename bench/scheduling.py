"""Measures the scheduler alone: placements per second, step times, and replays of long traces.

python bench/scheduling.py                         the large cluster, and how cost grows
python bench/scheduling.py --trace JOBS.csv.gz     a replay, with --nodes and --policy
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures import machine, percentile, ratio, table
from shoal.core.policies import SHIPPED
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.state import State
from shoal.core.step import step
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import NodeReport, Report, Submit

NODES = 12_500
QUEUED = 10_000
GPUS = 8
NODES_PER_RACK, NODES_PER_BLOCK = 32, 512
# (members, GPUs each), repeated by frequency: most jobs are small, but most GPUs are in large ones.
SHAPES = (
    [(1, 1)] * 30
    + [(1, 2)] * 10
    + [(1, 4)] * 10
    + [(1, 8)] * 15
    + [(2, 4)] * 4
    + [(2, 8)] * 8
    + [(4, 8)] * 6
    + [(8, 8)] * 5
    + [(16, 8)] * 3
    + [(32, 8)] * 1
)
POLICY: Policy = msgspec.structs.replace(
    SHIPPED["fair"], grace_ms=10**12, silent_after_ms=10**11, placements_per_step_max=200
)
NOW_MS = 1_000


class Cost(msgspec.Struct, frozen=True):
    """CPU time, so that other load on the machine matters as little as possible."""

    nodes: int
    queued: int
    placed: int
    members: int
    placements_per_s: float
    step_p50_ms: float
    step_p99_ms: float
    idle_step_ms: float  # a step without events, with the whole queue waiting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="replay this trace instead")
    parser.add_argument("--nodes", type=int, default=128, help="nodes of 8 GPUs for --trace")
    parser.add_argument("--policy", default="fair", choices=sorted(SHIPPED))
    parser.add_argument("--jobs", type=int, default=0, help="number of jobs from the trace; 0: all")
    arguments = parser.parse_args()
    print(machine())
    if arguments.trace is not None:
        figures = measure_replay(arguments.trace, arguments.nodes, arguments.policy, arguments.jobs)
    else:
        figures = measure()
    print(msgspec.json.encode(figures).decode())


def measure() -> dict[str, object]:
    """The large cluster, and the same with fewer nodes or a shorter queue."""
    gc.set_threshold(50_000, 20, 100)  # as the controller does
    large = placing(NODES, QUEUED)
    costs = [
        large,
        placing(NODES // 10, QUEUED),
        placing(NODES // 100, QUEUED),
        placing(NODES, QUEUED // 10),
        placing(NODES, QUEUED // 100),
    ]
    rows = [
        (
            f"{cost.nodes} nodes, {cost.queued} queued",
            cost.placed,
            cost.placements_per_s,
            f"{cost.step_p50_ms} / {cost.step_p99_ms}",
            cost.idle_step_ms,
            ratio(cost.placements_per_s, large.placements_per_s),
        )
        for cost in costs
    ]
    header = (
        "cluster and queue",
        "placed",
        "placements/s",
        "step p50 / p99 ms",
        "idle ms",
        "ratio",
    )
    print(table(header, rows))
    return {"large": msgspec.to_builtins(large), "growth": msgspec.to_builtins(costs)}


def placing(nodes: int, queued: int) -> Cost:
    """Queue them all, then step until nothing more fits."""
    state = State(FUNCTIONS)
    run_step(state, Report(nodes=tuple(inventory(index) for index in range(nodes))))
    fill_queue(state, queued)
    gc.collect()
    gc.freeze()
    times, placed, members = [], 0, 0
    while True:
        started = time.process_time()
        done = run_step(state, Report())
        times.append(time.process_time() - started)
        given = [event for event in done if isinstance(event, JobPlaced)]
        placed += len(given)
        members += sum(len(event.slices) for event in given)
        if not given:
            break
    gc.unfreeze()
    busy = times[:-1] or times
    return Cost(
        nodes=nodes,
        queued=queued,
        placed=placed,
        members=members,
        placements_per_s=round(placed / max(sum(times), 1e-9)),
        step_p50_ms=milliseconds(busy, 50),
        step_p99_ms=milliseconds(busy, 99),
        idle_step_ms=round(times[-1] * 1000, 2),
    )


def inventory(index: int) -> NodeReport:
    place = f"b{index // NODES_PER_BLOCK}/r{index // NODES_PER_RACK}"
    spec = NodeSpec(id=f"n{index}", gpus=GPUS, cpu_milli=128_000, memory_mb=1_000_000, place=place)
    return NodeReport(spec=spec, incarnation=1, sequence=1)


def fill_queue(state: State, queued: int) -> None:
    """Places only the one job that a step must place at least."""
    rng = random.Random(1)
    slow = msgspec.structs.replace(POLICY, placements_per_step_max=1)
    requests = tuple(Submit(draw(rng)) for _ in range(queued))
    step(state, Report(requests=requests), slow, NOW_MS)


def draw(rng: random.Random) -> JobSpec:
    members, gpus = rng.choice(SHAPES)
    return JobSpec(
        command=("true",),
        members=members,
        gpus=gpus,
        cpu_milli=1000 * gpus,
        tenant=rng.choice("abcd"),
        priority=rng.choice((0, 0, 0, 10)),
    )


def run_step(state: State, report: Report) -> list[object]:
    return list(step(state, report, POLICY, NOW_MS).events)


def milliseconds(times: Sequence[float], percent: float) -> float:
    return round(percentile(times, percent) * 1000, 2)


def measure_replay(trace: Path, nodes: int, policy: str, jobs: int) -> dict[str, object]:
    """Time and memory of the whole simulator on a trace."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "shoal.main", "sim", str(trace), "--nodes", str(nodes)]
    command += ["--policy", policy, "--skip-too-large", "--json"]
    command += ["--jobs", str(jobs)] if jobs else []
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures: dict[str, object] = {
        "trace": trace.name,
        "nodes": nodes,
        "policy": policy,
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "memory_mb": round(after.ru_maxrss / 1024),
        "result": msgspec.json.decode(printed),
    }
    print(table(("replay", "figure"), [(k, v) for k, v in figures.items() if k != "result"]))
    return figures


if __name__ == "__main__":
    main()
