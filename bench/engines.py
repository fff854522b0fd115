"""Launch latency and gangs per second on each engine, beside the system that brings its nodes.

Run with `python -m bench.engines` (about five minutes; `--quick`: two). On each engine a whole
cluster with two nodes is started (`harness/engines.py`) and measured. Then the system below
it does the same by itself: one process on each of two nodes. Slurm and Ray are real. Kubernetes is
the API server and the kubelet of the tests, which look for pods ten times a second: its figures say
what Shoal adds, not what Kubernetes takes. What is missing here is left out with a line. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines import ENGINES, GPUS, NODES, Missing, On, cluster_on
from harness.kubernetes.kube import Kube
from harness.ray import RealRay
from harness.slurm import Slurm
from harness.waiting import until

from bench.figures import machine, percentile, ratio, table
from shoal.client import Client
from shoal.model.job import JobSpec

LAUNCHES, GANGS, NATIVE_GANGS = 20, 200, 40
WAIT_S = 300.0
MEMORY_GOAL = 0.1  # of Ray's processes on a node
PEER = Path(__file__).with_name("engines_ray.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a fifth of the launches")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this one")
    given = parser.parse_args()
    part = 5 if given.quick else 1
    print(machine(), flush=True)
    figures: dict[str, dict[str, Any]] = {}
    for engine in given.engine or ENGINES:
        try:
            with cluster_on(engine) as on:
                figures[engine] = measure(on, part)
        except Missing as missing:
            print(f"{engine}: left out: {missing}", flush=True)
        except Exception as error:  # the others are worth measuring all the same
            print(f"{engine}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    show(figures)
    print(json.dumps(figures))


def measure(on: On, part: int) -> dict[str, Any]:
    with on.client() as client:
        figures = measure_shoal(client, part)
    figures["node_mb"] = node_mb(on)
    natives: dict[str, Callable[[Any, int], dict[str, Any]]] = {
        "slurm": by_sbatch,
        "kubernetes": by_pods,
        "ray": by_actors,
    }
    if on.engine in natives:
        on.give_back()
        figures["native"] = natives[on.engine](on.beneath, part)
    return figures


# -- Shoal -----------------------------------------------------------------------------------


def gang(seconds: str, gpus: int) -> JobSpec:
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    return JobSpec(command=("sleep", seconds), members=NODES, gpus=gpus, cpu_milli=100, env=env)


def measure_shoal(client: Client, part: int) -> dict[str, Any]:
    """A gang is two processes. Its latency is from the submission until both run, with all GPUs of
    a node each; for throughput many gangs without GPUs are submitted, and each ends at once."""
    took = []
    for _ in range(LAUNCHES // part):
        begun = time.monotonic()
        job = client.submit(gang("600", GPUS)).id
        while client.job(job, wait_for="running", wait_s=30).state != "running":
            pass
        took.append((time.monotonic() - begun) * 1000)
        client.cancel(job)
        until(lambda job=job: client.job(job).finished_ms is not None)  # type: ignore[misc]
    count = GANGS // part
    begun = time.monotonic()
    jobs = [client.submit(gang("0", 0)).id for _ in range(count)]
    for job in jobs:
        while client.job(job, wait_for="finished", wait_s=30).finished_ms is None:
            pass
    seconds = time.monotonic() - begun
    return {"launch_ms": round(percentile(took, 50), 1), "gangs_per_s": round(count / seconds, 1)}


# -- the systems by themselves ---------------------------------------------------------------


def by_sbatch(slurm: Slurm, part: int) -> dict[str, Any]:
    """A job of two nodes with one process on each, by sbatch and srun."""
    mark = slurm.root / "begun"
    lines = f"srun --mem=0 sh -c 'echo >> {mark}; exec sleep $0' "
    both = ("--nodes=2", "--ntasks-per-node=1")
    took = []
    for _ in range(max(3, LAUNCHES // part // 2)):
        mark.unlink(missing_ok=True)
        begun = time.monotonic()
        job = slurm.sbatch(*both, f"--gpus-per-node={GPUS}", script=lines + "600")
        until(lambda: mark.exists() and len(mark.read_text()) >= NODES)
        took.append((time.monotonic() - begun) * 1000)
        slurm.run("scancel", job)
        until(slurm.idle)
    count = NATIVE_GANGS // part
    begun = time.monotonic()
    for _ in range(count):
        slurm.sbatch(*both, script=lines + "0")
    until(slurm.idle)
    seconds = time.monotonic() - begun
    return {"launch_ms": round(percentile(took, 50), 1), "gangs_per_s": round(count / seconds, 1)}


def by_pods(kube: Kube, part: int) -> dict[str, Any]:
    """Two pods, which the tests' kubelet runs as processes; a gang runs when both do."""

    def make(gang: str, seconds: str) -> list[str]:
        names = [f"bench-{gang}-{number}" for number in range(NODES)]
        for name in names:
            container = {"name": "c", "image": "shoal", "command": ["sleep", seconds]}
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            }
            kube.admin("POST", kube.path("pods"), body)
        return names

    def phases(names: list[str]) -> set[str]:
        pods = kube.pods()
        return {pods[name]["status"].get("phase", "") for name in names if name in pods}

    def remove(names: list[str]) -> None:
        for name in names:
            kube.admin("DELETE", kube.path("pods", name) + "?gracePeriodSeconds=0", check=False)
        until(lambda: not phases(names))

    took = []
    for number in range(max(3, LAUNCHES // part // 2)):
        begun = time.monotonic()
        names = make(f"l{number}", "600")
        until(lambda names=names: phases(names) == {"Running"})  # type: ignore[misc]
        took.append((time.monotonic() - begun) * 1000)
        remove(names)
    count = NATIVE_GANGS // part
    begun = time.monotonic()
    every = [name for number in range(count) for name in make(f"t{number}", "0")]
    until(lambda: phases(every) == {"Succeeded"})
    seconds = time.monotonic() - begun
    remove(every)
    return {"launch_ms": round(percentile(took, 50), 1), "gangs_per_s": round(count / seconds, 1)}


def by_actors(ray: RealRay, part: int) -> dict[str, Any]:
    """Two actors in a placement group, each a process; from a driver that is up already."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ray.token_file),
    }
    counts = (str(max(3, LAUNCHES // part // 2)), str(NATIVE_GANGS // part))
    done = subprocess.run(
        [sys.executable, str(PEER), ray.address, str(NODES), *counts],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["launch_ms"] = round(percentile(found.pop("took_ms"), 50), 1)
    # What a node of Ray has besides actors: the raylet and the processes that it cannot do without.
    found["node_mb"] = round(sum(map(proportional_mb, ray.of_a_node())), 1)
    return found


# -- memory ------------------------------------------------------------------------------------


def node_mb(on: On) -> dict[str, float]:
    """Of one node: the starter, the keeper and the agent, and a bare Python for comparison. Shared
    pages are divided among those who share them."""
    bare = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(0.5)
        found = {"python": proportional_mb(bare.pid)}
    finally:
        bare.communicate(b"\n")
    if not on.folders:
        return {kind: round(mb, 1) for kind, mb in found.items()}
    with contextlib.suppress(OSError, KeyError, ValueError):
        told = json.loads((on.folders[0] / "agent.json").read_bytes())
        found |= {"keeper": proportional_mb(told["keeper"]), "agent": proportional_mb(told["pid"])}
        starter = (on.folders[0] / "starter.lock").read_text()
        found["starter"] = proportional_mb(int(starter))
    found["node"] = sum(mb for kind, mb in found.items() if kind != "python")
    return {kind: round(mb, 1) for kind, mb in found.items()}


def proportional_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


# -- what it prints ----------------------------------------------------------------------------


def show(figures: dict[str, dict[str, Any]]) -> None:
    rows = []
    for engine, found in figures.items():
        native = found.get("native", {})
        row: list[object] = [engine]
        for what in ("launch_ms", "gangs_per_s"):
            alone = native.get(what)
            row += [found[what], alone or "-", ratio(found[what], alone) if alone else "-"]
        rows.append(row)
    titles = ("engine", "launch, ms", "alone", "ratio", "gangs/s", "alone", "ratio")
    print(table(titles, rows))
    linked = figures.get("linked", {}).get("node_mb", {}).get("node")
    ray = figures.get("ray", {}).get("native", {}).get("node_mb")
    for kind, mb in figures.get("linked", {}).get("node_mb", {}).items():
        print(f"{kind}: {mb} MB")
    if linked and ray:
        part = ratio(linked, ray)
        print(f"a linked node needs {linked} MB, Ray's processes on one {ray} MB: {part}", end=" ")
        print(f"(the goal is {MEMORY_GOAL}: {'reached' if part <= MEMORY_GOAL else 'missed'})")


if __name__ == "__main__":
    main()
