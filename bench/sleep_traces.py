"""What sleep saves on public traces: `fair` without it, `fair` with it, and turns.

    python bench/sleep_traces.py --muri muri-philly/ --pollux philly-pollux/jobs.csv.gz

The live scheduler's code on virtual time. Muri's traces 1, 3 and 4 run on the published 8 nodes of
8 GPUs; of philly-pollux, two virtual clusters run on as many nodes as their work fills. Every job
saves its work every ten minutes and may be stopped for others. A member has 40 GB on each of its
GPUs, because no trace says how much; it moves out at 2 GB/s and in at 5 GB/s. A node has 2 TB of
memory, of which sleepers get half. A sleeper wakes on its own GPUs only.

Wasted GPU-hours are those that jobs held without getting further: start-up, falling asleep and
waking, and work that was lost and had to be done again. The last line is one JSON object
{trace: {policy: {figures, and their ratios to fair without sleep}}}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures import machine, table
from bench.readers import read_trace
from shoal.core.policies import SHIPPED
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Sleeping
from shoal.sim.replay.attempts import wasted_gpu_hours
from shoal.sim.replay.clusters import Conditions, alike
from shoal.sim.replay.metrics import summarize
from shoal.sim.replay.replay import replay, too_large
from shoal.sim.replay.simulated import able_to_sleep
from shoal.sim.replay.traces import Gangs, Trace, TraceError, stretch

GPUS_PER_NODE = 8
MURI_NODES = 8
MURI = ("trace1", "trace3", "trace4")
# Virtual clusters of philly-pollux, and the nodes that their work fills to about 90 and 60 %.
POLLUX = {"b436b2": 8, "2869ce": 8}
WITHOUT = "fair"
POLICIES: dict[str, Policy] = {
    WITHOUT: msgspec.structs.replace(SHIPPED["fair"], sleep=Sleeping.NEVER),
    "fair, sleep": SHIPPED["fair"],
    "time-slice": SHIPPED["time-slice"],
}
HEADER = (
    "trace",
    "policy",
    "mean JCT h",
    "/ fair",
    "median h",
    "p99 h",
    "stops",
    "naps",
    "lost GPU-h",
    "switching",
    "wasted",
    "/ fair",
)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios are to `fair` without sleep."""

    mean_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    stops: int
    naps: int
    asleep_gpu_hours: float
    switching_gpu_hours: float
    lost_gpu_hours: float
    wasted_gpu_hours: float
    mean_jct_ratio: float = 1.0
    lost_ratio: float | None = None  # None: nothing was lost
    wasted_ratio: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        cases = _cases(arguments)
    except (TraceError, OSError) as error:
        print(f"sleep_traces: {error}", file=sys.stderr)
        return 2
    if not cases:
        print("sleep_traces: name --muri or --pollux", file=sys.stderr)
        return 2
    print(machine())
    found = {}
    for name, (trace, nodes) in cases.items():
        found[name] = compare(trace, nodes, arguments.policy, arguments.gpu_gb)
    rows = [_row(name, one, of[one]) for name, of in found.items() for one in of]
    print(table(HEADER, rows))
    print(msgspec.json.encode(found).decode())
    return 0


def _cases(asked: argparse.Namespace) -> dict[str, tuple[Trace, int]]:
    """Each trace, and the nodes that it runs on."""
    found: dict[str, tuple[Trace, int]] = {}
    gangs = Gangs(GPUS_PER_NODE)
    for name in MURI if asked.muri else ():
        if asked.only in (name, ""):
            trace = read_trace(asked.muri / f"{name}.csv.gz", gangs)
            found[f"muri {name}"] = _first(trace, asked.jobs), MURI_NODES
    for name, nodes in POLLUX.items() if asked.pollux else ():
        if asked.only in (name, ""):
            trace = read_trace(asked.pollux, gangs, where={"vc": name})
            found[f"pollux {name}"] = _first(trace, asked.jobs), nodes
    return found


def _first(trace: Trace, jobs: int) -> Trace:
    return stretch(trace, jobs=min(jobs, len(trace.arrivals))) if jobs else trace


def compare(
    trace: Trace, nodes: int, policies: Sequence[str] = (), gpu_gb: int = 0
) -> dict[str, Result]:
    """The same jobs on the same nodes under these policies, or all, and `fair` without sleep."""
    cluster = able_to_sleep(alike(nodes, gpus=GPUS_PER_NODE))
    large = too_large(trace, cluster)
    arrivals = [
        msgspec.structs.replace(one, gpu_mb=1000 * gpu_gb)
        for one in trace.arrivals
        if one.row not in large
    ]
    played = msgspec.structs.replace(trace, arrivals=arrivals)
    found: dict[str, Result] = {}
    for name, policy in POLICIES.items():
        if policies and name not in (WITHOUT, *policies):
            continue
        mine = _play(played, cluster, policy, name)
        found[name] = _beside(mine, found[WITHOUT]) if found else mine
    return found


def _play(trace: Trace, cluster: Sequence[NodeSpec], policy: Policy, name: str) -> Result:
    summary = summarize(replay(trace, cluster, policy, Conditions(), name=name))
    return Result(
        mean_jct_s=round(summary.completion.mean_s, 1),
        median_jct_s=round(summary.completion.median_s, 1),
        p99_jct_s=round(summary.completion.p99_s, 1),
        stops=summary.preemptions,
        naps=summary.sleep.naps,
        asleep_gpu_hours=round(summary.sleep.asleep_gpu_hours, 1),
        switching_gpu_hours=round(summary.sleep.switching_gpu_hours, 1),
        lost_gpu_hours=round(summary.sleep.lost_gpu_hours, 1),
        wasted_gpu_hours=round(wasted_gpu_hours(summary), 1),
    )


def _beside(mine: Result, other: Result) -> Result:
    def ratio(one: float, base: float) -> float | None:
        return round(one / base, 3) if base else None

    return msgspec.structs.replace(
        mine,
        mean_jct_ratio=ratio(mine.mean_jct_s, other.mean_jct_s) or 1.0,
        lost_ratio=ratio(mine.lost_gpu_hours, other.lost_gpu_hours),
        wasted_ratio=ratio(mine.wasted_gpu_hours, other.wasted_gpu_hours),
    )


def _row(trace: str, policy: str, one: Result) -> Sequence[object]:
    return (
        trace,
        policy,
        f"{one.mean_jct_s / 3600:,.1f}",
        f"{one.mean_jct_ratio:.3f}",
        f"{one.median_jct_s / 3600:,.2f}",
        f"{one.p99_jct_s / 3600:,.0f}",
        f"{one.stops:,}",
        f"{one.naps:,}",
        f"{one.lost_gpu_hours:,.0f}",
        f"{one.switching_gpu_hours:,.0f}",
        f"{one.wasted_gpu_hours:,.0f}",
        "" if one.wasted_ratio is None else f"{one.wasted_ratio:.2f}",
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--muri", type=Path, help="folder muri-philly")
    parser.add_argument("--pollux", type=Path, help="philly-pollux: jobs.csv.gz")
    parser.add_argument("--only", default="", help="one trace: trace3, or b436b2")
    parser.add_argument(
        "--policy", action="append", default=[], choices=list(POLICIES), help="only these"
    )
    parser.add_argument("--jobs", type=int, default=0, help="only the first N jobs of each trace")
    parser.add_argument("--gpu-gb", type=int, default=0, help="GB on each GPU (default 40)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
