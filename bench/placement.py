"""How much of a cluster's GPUs each placement policy allocates, on the openb experiment.

Run with `python bench/placement.py --nodes NODES.csv --pods PODS.csv.gz --arrived 1.3 --seeds 3`.
The last line is one JSON object: the allocation in percent by policy.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from bench.figures import machine, table
from bench.openb import BadList, Node, Pod, arrivals, capacity_milli, read_nodes, read_pods
from bench.placement_bound import upper_bound
from bench.placement_run import POLICIES, replay

PUBLISHED = "published_alloc_pct.csv.gz"
PUBLISHED_NAMES = {
    "01-Random": "random",
    "02-DotProd": "dot-product",
    "03-GpuClustering": "clustering",
    "04-GpuPacking": "packing",
    "05-BestFit": "best-fit",
    "06-FGD": "fgd",
}
FIRST_SEED = 42
PROGRESS_EVERY_S = 2.0
BOUND = "bound"


class Run(NamedTuple):
    """One policy on one order of arrivals; the policy may be the bound."""

    policy: str
    ties: str
    seed: int


class Figure(NamedTuple):
    """Allocation in percent at 100 % arrived (None if less arrives) and at the end."""

    at_100: float | None
    at_end: float
    us_per_task: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
        published = read_published(options.nodes.parent / PUBLISHED, options.pods)
    except BadList as error:
        print(error, file=sys.stderr)
        return 2
    names = _policies(options.policies)
    ties = ("name", "random") if options.ties == "both" else (options.ties,)
    runs = [
        Run(name, tie, FIRST_SEED + number)
        for name in names
        for tie in (ties if name != "random" else ties[:1])
        for number in range(options.seeds)
    ]
    if options.bound:
        runs += [Run(BOUND, "", FIRST_SEED + number) for number in range(options.seeds)]
    figures = dict(measure(runs, nodes, pods, options.arrived, options.jobs))
    if any(figure is None for figure in figures.values()):
        print("the bound is left out: scipy is not installed", file=sys.stderr)
    done = {run: figure for run, figure in figures.items() if figure is not None}
    report(done, nodes, pods, published, options.arrived)
    print(json.dumps(summary(done, ties[0])))
    return 0


def measure(
    runs: Sequence[Run], nodes: list[Node], pods: list[Pod], arrived: float, jobs: int
) -> Iterator[tuple[Run, Figure | None]]:
    """Every run's figure, in the order in which runs end; None for a bound that is unavailable."""
    started = time.monotonic()
    with ProcessPoolExecutor(min(jobs, len(runs))) as pool:
        waiting: dict[Future[Figure | None], Run] = {
            pool.submit(figure_of, run, nodes, pods, arrived): run for run in runs
        }
        while waiting:
            ended, _ = wait(waiting, timeout=PROGRESS_EVERY_S, return_when=FIRST_COMPLETED)
            for future in ended:
                yield waiting.pop(future), future.result()
            spent_s = time.monotonic() - started
            if spent_s >= PROGRESS_EVERY_S:
                done = len(runs) - len(waiting)
                print(f"{done} of {len(runs)} runs, {spent_s:.0f} s", file=sys.stderr, flush=True)


def figure_of(run: Run, nodes: list[Node], pods: list[Pod], arrived: float) -> Figure | None:
    order = arrivals(pods, capacity_milli(nodes), arrived, run.seed)
    if run.policy == BOUND:
        share = upper_bound([node.room for node in nodes], order)
        return None if share is None else Figure(None, 100 * share, None)
    tasks = [pod.task for pod in pods]
    started_ns = time.process_time_ns()
    by_arrived = replay(run.policy, nodes, tasks, order, run.ties, run.seed)
    spent_us = (time.process_time_ns() - started_ns) / 1000
    at_100 = by_arrived.get(100) if max(by_arrived) > 100 else None
    return Figure(at_100, by_arrived[max(by_arrived)], spent_us / len(order))


def summary(figures: dict[Run, Figure], default_ties: str) -> dict[str, float]:
    """Allocation at the end by policy; those under the second tie rule carry it in the name."""
    groups: dict[str, list[float]] = {}
    for run, figure in figures.items():
        suffix = f"-{run.ties}-ties" if run.ties not in ("", default_ties) else ""
        name = "upper-bound" if run.policy == BOUND else run.policy
        groups.setdefault(name + suffix, []).append(figure.at_end)
    return {name: round(mean(values), 2) for name, values in groups.items()}


def report(
    figures: dict[Run, Figure],
    nodes: list[Node],
    pods: list[Pod],
    published: dict[str, tuple[float, float]],
    arrived: float,
) -> None:
    gpus = capacity_milli(nodes) // 1000
    print(f"{len(nodes)} nodes, {gpus} GPUs, {len(pods)} pods; {machine()}")
    rows = []
    for policy, ties in dict.fromkeys((run.policy, run.ties) for run in figures):
        mine = [f for run, f in figures.items() if (run.policy, run.ties) == (policy, ties)]
        known = published.get(policy) if arrived == 1.3 and ties != "random" else None
        rows.append([policy, ties or "any", *_cells(mine), *(known or ("", ""))])
    end = f"{100 * arrived:.0f} %"
    header = ["policy", "ties", "at 100 %", f"at {end}", "sd", "us/task"]
    print(table([*header, "published 100 %", f"published {end}"], rows))


def _cells(figures: Sequence[Figure]) -> list[str]:
    at_100 = [figure.at_100 for figure in figures if figure.at_100 is not None]
    at_end = [figure.at_end for figure in figures]
    cost = [figure.us_per_task for figure in figures if figure.us_per_task is not None]
    return [
        f"{mean(at_100):.2f}" if at_100 else "",
        f"{mean(at_end):.2f}",
        f"{stdev(at_end):.2f}" if len(at_end) > 1 else "",
        f"{mean(cost):.0f}" if cost else "",
    ]


def read_published(path: Path, pods: Path) -> dict[str, tuple[float, float]]:
    """The published means at 100 % and 130 % for this pod list, by our policy names, if any."""
    if not path.exists():
        return {}
    workload = pods.name.removesuffix(".gz").removesuffix(".csv")
    values: dict[str, list[tuple[float, float]]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["workload"] == workload and row["sc_policy"] in PUBLISHED_NAMES:
                    found = (float(row["100"]), float(row["130"]))
                    values.setdefault(PUBLISHED_NAMES[row["sc_policy"]], []).append(found)
    except (OSError, KeyError, ValueError) as error:
        raise BadList(f"{path}: cannot be read: {error!r}") from error
    return {
        name: (round(mean(a for a, _ in pairs), 2), round(mean(b for _, b in pairs), 2))
        for name, pairs in values.items()
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=Path, required=True, help="node list, .csv or .csv.gz")
    parser.add_argument("--pods", type=Path, required=True, help="pod list, .csv or .csv.gz")
    parser.add_argument("--arrived", type=_share, default=1.3, help="demand / capacity (1.3)")
    parser.add_argument("--seeds", type=_count, default=3, help="orders of arrival (3)")
    parser.add_argument(
        "--policies", default="all", help="comma-separated, of: " + ", ".join(POLICIES)
    )
    parser.add_argument("--ties", choices=("name", "random", "both"), default="name")
    parser.add_argument("--jobs", type=_count, default=1, help="processes (1)")
    parser.add_argument("--bound", action="store_true", help="prove an upper bound too (scipy)")
    options = parser.parse_args(arguments)
    unknown = [name for name in _policies(options.policies) if name not in POLICIES]
    if unknown:
        parser.error(f"unknown policy {unknown[0]!r}; known: {', '.join(POLICIES)}")
    return options


def _policies(text: str) -> list[str]:
    return list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError("must be above 0, as in 1.3 for 130 % of capacity")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
