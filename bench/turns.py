"""The path of every job, in turns with an earlier commit: medians, ratios, processor time per job.

python -m bench.control --against COMMIT    both commits, one after the other, three rounds

Each round starts a fresh cluster of each commit in a process of its own, with that commit's own
benchmark, so that both meet the same noise of the machine.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.figures import machine, ratio, table

ROOT = Path(__file__).parent.parent
ROUND_S_MAX = 600
WARM_UP, LATENCY = 60, 100
HIGHER_IS_BETTER = ("jobs_per_s", "submissions_per_s")

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
figures = {"help_ms": control.measure_help()["median"]}
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


def compare(commit: str, jobs: int, rounds: int) -> dict[str, object]:
    print(machine())
    taken: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    with _checkout(commit) as earlier:
        places = {"before": earlier, "now": ROOT}
        for number in range(rounds):
            for name, place in places.items():
                taken[name].append(_round(place, jobs))
                print(f"round {number + 1} of {rounds}, {name}: {taken[name][-1]}", flush=True)
    before, now = (
        {name: statistics.median(figures[name] for figures in some) for name in some[0]}
        for some in taken.values()
    )
    ratios = {name: ratio(now[name], before[name]) for name in now}
    rows = [
        (name, f"{before[name]:.2f}", f"{now[name]:.2f}", ratios[name], _word(name))
        for name in ratios
    ]
    print(table(("median", commit, "now", "ratio", "better"), rows))
    return {"against": commit, "before": before, "now": now, "ratios": ratios, "rounds": taken}


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


def _round(place: Path, jobs: int) -> dict[str, float]:
    """PYTHONPATH comes before the checkout that is installed, in all processes of the cluster."""
    env = {**os.environ, "PYTHONPATH": f"{place / 'src'}{os.pathsep}{place}"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # both commits have their bytecode
    numbers = [str(number) for number in (jobs, WARM_UP, LATENCY)]
    done = subprocess.run(
        [sys.executable, "-c", ROUND, *numbers],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=ROUND_S_MAX,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"a round in {place} failed:\n{done.stderr}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
