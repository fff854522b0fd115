"""Replays a trace of jobs under several queueing policies, beside the published figures.

    python bench/queueing.py --trace trace1.csv.gz [--overhead CSV] --rules published|own

`published` follows the rules of the simulation that the figures come from; `own` replays the trace
through the live scheduler's code, with Shoal's model of preemption and restart. The last line is
one JSON object {policy: {avg_jct_s, makespan_s, p99_jct_s}}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.figures import table
from bench.queueing_outcome import Outcome, Summary, summarize
from bench.queueing_own import POLICIES as OWN_POLICIES
from bench.queueing_own import simulate as own_rules
from bench.queueing_policies import policies
from bench.queueing_published import GPUS_PER_NODE, NODES
from bench.queueing_published import simulate as published_rules
from bench.queueing_trace import (
    Overheads,
    Published,
    TraceError,
    TraceJob,
    read_jobs,
    read_overheads,
    read_published,
)

RULES = ("published", "own")
# Files of these names beside a trace belong to it.
OVERHEAD_FILE = "start_overhead.csv"
PUBLISHED_FILE = "published_sim.csv"
HEADER = (
    "policy",
    "avg JCT s",
    "/tiresias",
    "/srsf",
    "makespan s",
    "p99 JCT s",
    "p99 wait s",
    "preempted",
    "published avg",
    "off by",
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        jobs = read_jobs(arguments.trace)
        _check_size(arguments.trace, jobs)
        overheads = _overheads(arguments.trace, arguments.overhead)
        published = _published(arguments.trace)
    except TraceError as error:
        print(f"queueing: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.trace.name}: {len(jobs)} jobs, {arguments.rules} rules")
    runs = _runs(arguments.rules, jobs, overheads)
    chosen = [name for name in runs if not arguments.policy or name in arguments.policy]
    results = {name: summarize(runs[name]()) for name in chosen}
    print(table(HEADER, [_row(name, results, published) for name in results]))
    print(_json(results))
    return 0


def _runs(
    rules: str, jobs: Sequence[TraceJob], overheads: Overheads
) -> dict[str, Callable[[], list[Outcome]]]:
    """The policies to compare under these rules, as functions that run them."""
    if rules == "own":
        return {name: partial(own_rules, jobs, name) for name in OWN_POLICIES}
    return {policy.name: partial(published_rules, jobs, policy, overheads) for policy in policies()}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = sorted({*(policy.name for policy in policies()), *OWN_POLICIES})
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="CSV of jobs, may be .gz")
    parser.add_argument(
        "--overhead",
        type=Path,
        help=f"start-up seconds by model and GPUs (default: {OVERHEAD_FILE} beside the trace)",
    )
    parser.add_argument("--rules", choices=RULES, default="published")
    parser.add_argument("--policy", action="append", choices=names, help="only these; repeatable")
    return parser.parse_args(argv)


def _check_size(path: Path, jobs: Sequence[TraceJob]) -> None:
    most = NODES * GPUS_PER_NODE
    for job in jobs:
        if job.gpus > most:
            raise TraceError(
                f"{path.name}: a job wants {job.gpus} GPUs ('num_gpu'), the cluster has {most}"
            )


def _overheads(trace: Path, given: Path | None) -> Overheads:
    beside = trace.parent / OVERHEAD_FILE
    if given is None and not beside.exists():
        return {}
    return read_overheads(given or beside)


def _published(trace: Path) -> Published:
    beside = trace.parent / PUBLISHED_FILE
    if not beside.exists():
        return {}
    return read_published(beside, trace.name.removesuffix(".gz").removesuffix(".csv"))


def _row(name: str, results: Mapping[str, Summary], published: Published) -> list[str]:
    mine = results[name]
    known = published.get(name, {}).get("avg_jct_s")
    return [
        name,
        f"{mine.avg_jct_s:,.0f}",
        _ratio(mine, results.get("tiresias")),
        _ratio(mine, results.get("srsf")),
        f"{mine.makespan_s:,.0f}",
        f"{mine.p99_jct_s:,.0f}",
        f"{mine.p99_wait_s:,.0f}",
        f"{mine.preemptions:,}",
        f"{known:,.0f}" if known else "-",
        f"{100 * (mine.avg_jct_s / known - 1):+.2f} %" if known else "-",
    ]


def _ratio(mine: Summary, other: Summary | None) -> str:
    return f"{mine.avg_jct_s / other.avg_jct_s:.2f}" if other else "-"


def _json(results: Mapping[str, Summary]) -> str:
    names = ("avg_jct_s", "makespan_s", "p99_jct_s")
    figures = {
        policy: {name: getattr(summary, name) for name in names}
        for policy, summary in results.items()
    }
    return msgspec.json.encode(figures).decode()


if __name__ == "__main__":
    sys.exit(main())
