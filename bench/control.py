"""Measures the control plane on this machine, beside a real Slurm where there is one.

python bench/control.py            everything (about two minutes)
python bench/control.py --quick    a tenth of the jobs, no Slurm
python -m bench.control --against COMMIT    the path of every job, in turns with a commit
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
from collections.abc import Iterator
from pathlib import Path

import msgspec
from harness.slurm import available

from bench import control_arrays, control_tls, slurm, step_cost, turns
from bench.figures import machine, percentile, ratio, spread, table
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs, no Slurm")
    parser.add_argument("--against", metavar="COMMIT", help="in turns with it, three rounds")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    quick = given.quick
    jobs = 100 if quick else 1000
    if given.against:
        figures = turns.compare(given.against, jobs, given.rounds)
        print(msgspec.json.encode(figures).decode())
        return
    print(machine())
    figures = {"help_ms": measure_help()}
    with private_cluster() as (home, up_s):
        figures["up_s"] = round(up_s, 2)
        figures["submit_to_running_ms"] = measure_latency(
            home, LATENCY_JOBS // (10 if quick else 1)
        )
        figures["isolation"] = measure_isolation(home, LATENCY_JOBS // (10 if quick else 1))
        figures["jobs"] = measure_jobs(home, jobs)
        figures["controller_killed_to_answer_s"] = measure_controller_kills(home)
        figures["node_killed_to_noticed_ms"] = measure_node_kills(home)
    figures["tls"] = control_tls.measure(quick)
    figures["arrays"] = control_arrays.measure(*((1_000, 100) if quick else ()))
    figures["step"] = {} if quick else step_cost.measure()
    reason = "left out by --quick" if quick else available()
    figures["slurm"] = slurm.measure(jobs) if reason is None else {"absent": reason}
    report(figures)
    print(msgspec.json.encode(figures).decode())


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


@contextlib.contextmanager
def private_cluster() -> Iterator[tuple[Home, float]]:
    """Four virtual nodes, and the time until all of them were ready."""
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    home = Home(path)
    nodes = tuple(
        NodeSpec(id=f"n{number}", gpus=8, cpu_milli=64_000, memory_mb=64_000)
        for number in range(1, 5)
    )
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


def report(figures: dict[str, object]) -> None:
    """The same figures as a table, with the important ratios."""
    get = msgspec.convert
    help_ms = get(figures["help_ms"], dict[str, float])
    latency = get(figures["submit_to_running_ms"], dict[str, float])
    jobs = get(figures["jobs"], dict[str, float])
    tls = get(figures["tls"], dict[str, float])
    isolation = get(figures["isolation"], dict[str, float])
    arrays = get(figures["arrays"], dict[str, float])
    rows: list[tuple[object, ...]] = [
        ("shoal --help, median ms", help_ms["median"], f"{help_ms['ratio']} x bare python"),
        ("shoal up to 4 ready nodes, s", figures["up_s"], ""),
        ("submit to running p50 / p99, ms", f"{latency['p50']} / {latency['p99']}", ""),
        (
            "the same, isolated tenant's job, p50",
            isolation.get("tenant_ms", "-"),
            _apart(isolation),
        ),
        ("API submissions/s", jobs["submissions_per_s"], f"{SUBMITTERS} clients"),
        (f"{jobs['count']:.0f} jobs of `true`, jobs/s", jobs["jobs_per_s"], _beside_slurm(figures)),
        (
            f"an array of {arrays['elements']:,.0f}, submitted in s",
            arrays["array_s"],
            f"{arrays['singles_s']} s singly",
        ),
        ("its memory, MB", arrays["array_mb"], f"{arrays['singles_mb']} MB singly"),
        (
            "short elements/s",
            arrays["short_elements_per_s"],
            f"{arrays['short_singles_per_s']} jobs/s singly",
        ),
        ("controller killed, answers again, s", figures["controller_killed_to_answer_s"], ""),
        ("node killed, noticed, ms", figures["node_killed_to_noticed_ms"], ""),
        ("shoal ps over TLS, median ms", tls["ps_tls_ms"], _more(tls)),
    ]
    print(table(("control plane", "figure", "beside"), rows))


def _apart(isolation: dict[str, float]) -> str:
    if not isolation:
        return "needs root"
    return f"{isolation['more_ms']} ms more than the operator's, {isolation['operator_ms']}"


def _more(tls: dict[str, float]) -> str:
    return f"{tls['ps_more_ms']} ms more than the socket file, {tls['ps_ratio']} x"


def _beside_slurm(figures: dict[str, object]) -> str:
    beside = msgspec.convert(figures["slurm"], dict[str, object])
    if "absent" in beside:
        return f"no Slurm here: {beside['absent']}"
    theirs = float(str(beside["jobs_per_s"]))
    ours = msgspec.convert(figures["jobs"], dict[str, float])["jobs_per_s"]
    figures["ratio_to_slurm"] = ratio(ours, theirs)
    return f"{figures['ratio_to_slurm']} x Slurm ({theirs:.1f}/s)"


if __name__ == "__main__":
    main()
