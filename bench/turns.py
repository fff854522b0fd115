"""The path of every job, in turns with an earlier commit: medians, ratios, processor time per job.

python -m bench.control --against COMMIT    both commits and peers in turns, three rounds

Each round starts a fresh cluster of each commit in a process of its own, with that commit's own
benchmark, so that both meet the same noise of the machine. A real Slurm, and HyperQueue where its
wheel is installed, run as many jobs of `true` in each round.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.figures import machine, ratio, table
from bench.parts import ROOT, Part, last_line, run

ROUND_S_MAX = 300
LARGE_S_MAX = 300
PEERS = (
    Part("slurm", "bench.control", ("--part", "slurm"), 120, 240),
    Part("hyperqueue", "bench.hq", (), 60, 60),
)
WARM_UP, LATENCY = 60, 100
HIGHER_IS_BETTER = ("jobs_per_s", "submissions_per_s", "placements_per_s")

# Runs in a checkout of either commit; what it imports from `bench` exists since 0.3.
ROUND = """
import json, os, sys
import psutil
from bench import control

def processes(home):
    for process in psutil.process_iter():
        try:
            if home in " ".join(process.cmdline()) or process.pid == os.getpid():
                yield process
        except psutil.Error:
            pass

def seconds(process):
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system

jobs, warm_up, latency = map(int, sys.argv[1:])
helped = control.measure_help()
figures = {"help_ms": helped["median"], "help_by_bare_python": helped["ratio"]}
with control.private_cluster() as (home, up_s):
    figures["up_s"] = up_s
    control.measure_jobs(home, warm_up)
    figures["running_p50_ms"] = control.measure_latency(home, latency)["p50"]
    found = list(processes(str(home.path)))
    before = [seconds(process) for process in found]
    done = control.measure_jobs(home, jobs)
    spent = sum(seconds(process) for process in found) - sum(before)
    figures["cpu_ms_per_job"] = 1000 * spent / jobs
    figures |= {name: done[name] for name in ("submissions_per_s", "jobs_per_s")}
    figures["controller_killed_s"] = control.measure_controller_kills(home)
print(json.dumps(figures))
"""


# The pure step at 12,500 nodes: CPU time to fill them, of one submission, of placements.
LARGE = """
import json, statistics, sys, time
from bench import scheduling, step_cost
from bench.cluster import Cluster, Mix

nodes, queued = map(int, sys.argv[1:])
started = time.process_time()
cluster = Cluster(nodes)
cluster.fill(Mix(step_cost.SEED))
figures = {"fill_s": round(time.process_time() - started, 2)}
times = []
for spec in Mix(step_cost.SEED + 1).specs(300):
    cluster.submit([spec])
    times.append(cluster.elapsed_ns)
figures["submission_ms"] = round(statistics.median(times) / 1e6, 4)
placed = scheduling.placing(nodes, queued)
figures["placements_per_s"] = placed.placements_per_s
figures["placing_p99_ms"] = placed.step_p99_ms
print(json.dumps(figures))
"""

Figures = dict[str, float]


def compare(commit: str, jobs: int, rounds: int) -> dict[str, object]:
    """With fewer jobs than usual, the large cluster is a tenth as large."""
    print(machine())
    taken: dict[str, list[Figures]] = {"before": [], "now": []}
    peers: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in PEERS}
    with _checkout(commit) as earlier:
        places = {"before": earlier, "now": ROOT}
        for number in range(rounds):
            for name, place in places.items():
                taken[name].append(_round(place, jobs))
                print(f"round {number + 1} of {rounds}, {name}: {taken[name][-1]}", flush=True)
            for peer in PEERS:
                figures = run(peer, quick=jobs < 1000)
                peers[peer.name].append(figures)
                shown = figures.get("absent") or f"{figures['jobs_per_s']} jobs/s"
                print(f"round {number + 1} of {rounds}, {peer.name}: {shown}", flush=True)
    before, now = (_medians(figures) for figures in taken.values())
    ratios = {name: ratio(now[name], before[name]) for name in now if name in before}
    rows = [
        (name, f"{before[name]:.2f}", f"{now[name]:.2f}", ratios[name], _word(name))
        for name in ratios
    ]
    print(table(("median", commit, "now", "ratio", "better"), rows))
    beside = {name: _beside(name, figures, now["jobs_per_s"]) for name, figures in peers.items()}
    compared = {"against": commit, "before": before, "now": now, "ratios": ratios}
    return {**compared, "peers": beside, "rounds": taken}


def _medians(some: list[Figures]) -> Figures:
    """Of those that every round has."""
    names = [name for name in some[0] if all(name in figures for figures in some)]
    return {name: statistics.median(figures[name] for figures in some) for name in names}


def _beside(name: str, rounds: list[dict[str, Any]], ours: float) -> dict[str, Any]:
    """The median of a peer, and how many times as many jobs we run."""
    done = [figures["jobs_per_s"] for figures in rounds if "jobs_per_s" in figures]
    if not done:
        print(f"{name}: {rounds[0]['absent']}")
        return rounds[0]
    theirs = statistics.median(done)
    print(f"jobs per second, {name}: {theirs}; ours are {ratio(ours, theirs)} x that")
    return {"jobs_per_s": theirs, "ratio": ratio(ours, theirs), "rounds": rounds}


def _word(name: str) -> str:
    return "higher" if name in HIGHER_IS_BETTER else "lower"


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    place = folder / "earlier"
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def _round(place: Path, jobs: int) -> Figures:
    """A cluster, and then the pure step. What an earlier commit cannot measure is left out."""
    numbers = [str(number) for number in (jobs, WARM_UP, LATENCY)]
    figures = last_line([sys.executable, "-c", ROUND, *numbers], ROUND_S_MAX, place)
    if "absent" in figures:
        raise SystemExit(f"a round in {place}: {figures['absent']}")
    step = large(1_250 if jobs < 1000 else 12_500, place)
    if "absent" in step:
        print(f"the pure step in {place}: {step['absent']}")
        return figures
    return figures | step


def large(nodes: int, place: Path = ROOT) -> dict[str, Any]:
    """The pure step on a large cluster, in a process of its own."""
    argv = [sys.executable, "-c", LARGE, str(nodes), str(nodes * 4 // 5)]
    return last_line(argv, LARGE_S_MAX, place)
