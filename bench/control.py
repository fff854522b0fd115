"""Measures the control plane on this machine, beside a real Slurm where there is one.

python bench/control.py            everything; it says first when it will have ended at the latest
python bench/control.py --quick    a tenth of the jobs, no Slurm
python -m bench.control --part large        one part, see MEASURES
python -m bench.control --against COMMIT    the path of every job, in turns with a commit and peers
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from harness.slurm import available

from bench import control_arrays, control_tls, slurm, step_cost, turns
from bench.figures import machine, percentile, ratio, spread, table
from bench.parts import Part, run_all
from shoal.client import Address, Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.core.state.events.nodes import NodeLost
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec

SUBMITTERS = 2
HELP_RUNS = 15
LATENCY_JOBS = 200
KILLS = 5

NOTHING = JobSpec(command=("true",), env={"PATH": os.environ.get("PATH", os.defpath)})


PARTS = (
    Part("cluster", "bench.control", ("--part", "cluster"), 60, 180),
    Part("tls", "bench.control", ("--part", "tls"), 60, 90),
    Part("arrays", "bench.control", ("--part", "arrays"), 60, 120),
    Part("large", "bench.control", ("--part", "large"), 60, 180),
    Part("steps", "bench.control", ("--part", "steps"), 0, 240),
    Part("waiting", "bench.load", (), 0, 300),
    Part("kubernetes' shapes", "bench.scheduler_perf", (), 0, 300),
    Part("slurm", "bench.control", ("--part", "slurm"), 0, 240),
    Part("hyperqueue", "bench.hq", (), 60, 60),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs, no Slurm")
    parser.add_argument("--against", metavar="COMMIT", help="in turns with it, three rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=sorted(MEASURES), help="only this")
    given = parser.parse_args()
    if given.part:
        figures = MEASURES[given.part](given.quick)
    elif given.against:
        figures = turns.compare(given.against, 100 if given.quick else 1000, given.rounds)
    else:
        print(machine())
        figures = run_all(PARTS, quick=given.quick)
        report(figures)
    print(msgspec.json.encode(figures).decode())


def measure_cluster(quick: bool) -> dict[str, Any]:
    """The path of every job, and starts, on one cluster."""
    figures: dict[str, Any] = {"help_ms": measure_help()}
    with private_cluster() as (home, up_s):
        figures["up_s"] = round(up_s, 2)
        latency_jobs = LATENCY_JOBS // (10 if quick else 1)
        figures["submit_to_running_ms"] = measure_latency(home, latency_jobs)
        figures["isolation"] = measure_isolation(home, latency_jobs)
        figures["jobs"] = measure_jobs(home, 100 if quick else 1000)
        figures["controller_killed_to_answer_s"] = measure_controller_kills(home)
        figures["node_killed_to_noticed_ms"] = measure_node_kills(home)
    return figures


def measure_large(quick: bool) -> dict[str, Any]:
    nodes = 1_250 if quick else 12_500
    return {"nodes": nodes, **turns.large(nodes)}


def measure_steps(_quick: bool) -> dict[str, Any]:
    return {"cases": msgspec.to_builtins(step_cost.measure_cases())}


def measure_slurm(quick: bool) -> dict[str, Any]:
    reason = available()
    if reason is not None:
        return {"absent": reason}
    return slurm.measure(100, 5) if quick else slurm.measure()


MEASURES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "cluster": measure_cluster,
    "tls": control_tls.measure,
    "arrays": lambda quick: dict(control_arrays.measure(*((1_000, 100) if quick else ()))),
    "large": measure_large,
    "steps": measure_steps,
    "slurm": measure_slurm,
}


def measure_help() -> dict[str, float]:
    """Wall time of `shoal --help` and of a Python that does nothing."""
    shoal = str(Path(sys.executable).with_name("shoal"))

    def wall_ms(*argv: str) -> float:
        times = []
        for _ in range(HELP_RUNS):
            started = time.perf_counter_ns()
            subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter_ns() - started)
        return spread(times).median_ms

    bare = wall_ms(sys.executable, "-c", "pass")
    ours = wall_ms(shoal, "--help")
    return {"median": ours, "bare_python": bare, "ratio": ratio(ours, bare)}


VIRTUAL = tuple(
    NodeSpec(id=f"n{number}", gpus=8, cpu_milli=64_000, memory_mb=64_000) for number in range(1, 5)
)


@contextlib.contextmanager
def private_cluster(nodes: tuple[NodeSpec, ...] = VIRTUAL) -> Iterator[tuple[Home, float]]:
    """These nodes, or four virtual ones, and the time until all of them were ready."""
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    home = Home(path)
    try:
        started = time.perf_counter()
        bring_up(home, ClusterConfig(nodes=nodes, port=0), lambda _: None)
        yield home, time.perf_counter() - started
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def measure_latency(home: Home, jobs: int) -> dict[str, float]:
    """From the call of submit until the client knows that the job runs, one at a time."""
    times = []
    with Client.at_home(home.path) as client:
        for _ in range(jobs):
            started = time.perf_counter_ns()
            job = client.submit(NOTHING)
            client.job(job.id, wait_for="running", wait_s=10)
            times.append(time.perf_counter_ns() - started)
    return {"p50": spread(times).median_ms, "p99": spread(times).p99_ms}


def measure_isolation(home: Home, jobs: int) -> dict[str, float]:
    """The same for the operator's jobs and for a tenant's, which run as a user of their own with
    mounts of their own: in turn, so that both see the same machine."""
    if os.geteuid() != 0:
        return {}
    times: dict[str, list[int]] = {"default": [], "bench": []}
    with Client.at_home(home.path) as client:
        client.add_tenant("bench")
        for round_ in range(jobs + 1):
            for tenant, taken in times.items():
                spec = msgspec.structs.replace(NOTHING, tenant=tenant)
                started = time.perf_counter_ns()
                job = client.submit(spec)
                client.job(job.id, wait_for="running", wait_s=10)
                if round_:  # the first starts the launcher
                    taken.append(time.perf_counter_ns() - started)
    more = [apart - own for own, apart in zip(times["default"], times["bench"], strict=True)]
    return {
        "operator_ms": spread(times["default"]).median_ms,
        "tenant_ms": spread(times["bench"]).median_ms,
        "more_ms": spread(more).median_ms,
    }


def measure_jobs(home: Home, jobs: int) -> dict[str, float]:
    """Submits `count` jobs that run `true`, one by one, and waits until the last has finished."""

    def submit(count: int) -> None:
        with Client.at_home(home.path) as client:
            for _ in range(count):
                client.submit(NOTHING)

    with Client.at_home(home.path) as client:
        goal = (client.status().finished or 0) + jobs
        threads = [
            threading.Thread(target=submit, args=(jobs // SUBMITTERS,)) for _ in range(SUBMITTERS)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        submitted_s = time.perf_counter() - started
        while (client.status().finished or 0) < goal:
            time.sleep(0.01)
        done_s = time.perf_counter() - started
    return {
        "count": jobs,
        "submissions_per_s": round(jobs / submitted_s, 1),
        "jobs_per_s": round(jobs / done_s, 1),
    }


def measure_controller_kills(home: Home) -> float:
    """Median time from SIGKILL of the controller until the next one answers."""
    times = []
    for _ in range(KILLS):
        time.sleep(1.5)  # let it run, so that its supervisor does not see a crash loop
        pid = msgspec.json.decode(home.address.read_bytes(), type=Address).pid
        with Client.at_home(home.path, patience_s=30) as client:
            before = client.status().epoch
            started = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while client.status().epoch == before:
                time.sleep(0.01)
            times.append(time.perf_counter() - started)
    return round(percentile(times, 50), 2)


def measure_node_kills(home: Home) -> float:
    """Median time from SIGKILL of a node's agent until its loss is in the log."""
    times = []
    with Client.at_home(home.path, patience_s=30) as client:
        for number in range(1, 5):
            node = f"n{number}"
            agent = msgspec.json.decode((home.node(node) / "agent.json").read_bytes())
            after = client.status().last_seq
            started = time.perf_counter()
            os.kill(agent["pid"], signal.SIGKILL)
            while not any(
                isinstance(recorded.event, NodeLost)
                for recorded in client.events(after=after, node=node, wait_s=5).events
            ):
                pass
            times.append(time.perf_counter() - started)
    return round(percentile(times, 50) * 1000, 1)


def report(figures: dict[str, dict[str, Any]]) -> None:
    """The same figures as a table, with the important ratios. What is absent has no row."""
    rows: list[tuple[object, ...]] = []
    for name, rows_of in ROWS.items():
        part = figures[name]
        rows += [(f"{name}: {part['absent']}", "", "")] if "absent" in part else rows_of(figures)
    print(table(("control plane", "figure", "beside"), rows))


def _rows_of_cluster(figures: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    part = figures["cluster"]
    help_ms, latency, jobs = part["help_ms"], part["submit_to_running_ms"], part["jobs"]
    isolation = part["isolation"]
    more = "needs root"
    if isolation:
        more = f"{isolation['more_ms']} ms more than the operator's, {isolation['operator_ms']}"
    return [
        ("shoal --help, median ms", help_ms["median"], f"{help_ms['ratio']} x bare python"),
        ("shoal up to 4 ready nodes, s", part["up_s"], ""),
        ("submit to running p50 / p99, ms", f"{latency['p50']} / {latency['p99']}", ""),
        ("the same, isolated tenant's job, p50", isolation.get("tenant_ms", "-"), more),
        ("API submissions/s", jobs["submissions_per_s"], f"{SUBMITTERS} clients"),
        (
            f"{jobs['count']:.0f} jobs of `true`, jobs/s",
            jobs["jobs_per_s"],
            ", ".join(_peers(figures, jobs["jobs_per_s"])),
        ),
        ("controller killed, answers again, s", part["controller_killed_to_answer_s"], ""),
        ("node killed, noticed, ms", part["node_killed_to_noticed_ms"], ""),
    ]


def _peers(figures: dict[str, dict[str, Any]], ours: float) -> Iterator[str]:
    for name in ("slurm", "hyperqueue"):
        if "jobs_per_s" in figures[name]:
            theirs = figures[name]["jobs_per_s"]
            yield f"{ratio(ours, theirs)} x {name} ({theirs}/s)"


def _rows_of_tls(figures: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    tls = figures["tls"]
    more = f"{tls['ps_more_ms']} ms more than the socket file, {tls['ps_ratio']} x"
    return [("shoal ps over TLS, median ms", tls["ps_tls_ms"], more)]


def _rows_of_arrays(figures: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    arrays = figures["arrays"]
    singly = f"{arrays['short_singles_per_s']} jobs/s singly"
    submitted = f"an array of {arrays['elements']:,.0f}, submitted in s"
    return [
        (submitted, arrays["array_s"], f"{arrays['singles_s']} s singly"),
        ("its memory, MB", arrays["array_mb"], f"{arrays['singles_mb']} MB singly"),
        ("short elements/s", arrays["short_elements_per_s"], singly),
    ]


def _rows_of_large(figures: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    large = figures["large"]
    nodes = f"{large['nodes']:,} nodes"
    return [
        (f"{nodes}, one submission, ms of CPU", large["submission_ms"], ""),
        (f"{nodes}, filled in s of CPU", large["fill_s"], ""),
        (f"{nodes}, placements/s", large["placements_per_s"], f"p99 {large['placing_p99_ms']} ms"),
    ]


def _rows_as_they_are(name: str) -> Callable[[dict[str, dict[str, Any]]], Any]:
    """Of a part that is a program of its own: its plain figures."""

    def rows(figures: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
        plain = {key: of for key, of in figures[name].items() if isinstance(of, (int, float))}
        return [(f"{name}: {key.replace('_', ' ')}", of, "") for key, of in plain.items()]

    return rows


ROWS: dict[str, Callable[[dict[str, dict[str, Any]]], list[tuple[object, ...]]]] = {
    "cluster": _rows_of_cluster,
    "tls": _rows_of_tls,
    "arrays": _rows_of_arrays,
    "large": _rows_of_large,
    **{name: _rows_as_they_are(name) for name in ("waiting", "kubernetes' shapes")},
    **{name: _rows_as_they_are(name) for name in ("slurm", "hyperqueue")},
}


if __name__ == "__main__":
    main()
