"""Compares the Ray engine with plain Ray on five hosts made of network namespaces.

python bench/ray_engine.py            everything (about five minutes); needs root and iproute2
python bench/ray_engine.py --quick    fewer launches, no cut link
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from harness.hosts import Host, Net, missing

from bench.figures import machine, percentile, table
from shoal.client import Client
from shoal.model.job import JobSpec

NODES = ("n1", "n2", "n3", "n4")
MEMBERS = 8
LAUNCHES = 20
BOUND_S = 180.0
SHOAL = (sys.executable, "-m", "shoal.main")
RAY = (sys.executable, "-m", "ray.scripts.scripts")
PEER = Path(__file__).with_name("ray_engine_peer.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer launches, no cut link")
    quick = parser.parse_args().quick
    reason = missing()
    if reason:
        sys.exit(f"error: {reason}")
    print(machine())
    figures: dict[str, dict[str, Any]] = {}
    for name, measure in (("shoal", measure_shoal), ("ray", measure_ray)):
        with hosts() as net:
            figures[name] = measure(net, quick)
    report(figures)
    print(msgspec.json.encode(figures).decode())


@contextlib.contextmanager
def hosts() -> Iterator[dict[str, Host]]:
    scratch = Path(tempfile.mkdtemp(prefix="sb-"))
    net = Net(scratch)
    try:
        yield {name: net.add(name) for name in ("head", *NODES)}
    finally:
        net.close()
        shutil.rmtree(scratch, ignore_errors=True)


# -- Shoal ---------------------------------------------------------------------------------


def measure_shoal(net: dict[str, Host], quick: bool) -> dict[str, Any]:
    head = net["head"]
    home = head.home / ".shoal"
    figures: dict[str, Any] = {}
    up = timed(head, *SHOAL, "up", "--engine", "ray", "--nodes", "0", "--port", "0")
    figures["head_s"] = up
    address = json.loads((home / "cluster.json").read_text())["reach"]
    token = (home / "ray" / "token").read_text()
    join = (*SHOAL, "join", address, "--gpus", "2", "--cpus", "16")
    env = {"SHOAL_JOIN_TOKEN": token}
    figures["join_s"] = [timed(net[name], *join, "--name", name, env=env) for name in NODES]
    with head.network():
        client = Client.at_home(home, patience_s=60)
        until(lambda: sum(node.state == "ready" for node in client.nodes()) == len(NODES))
        figures["gang_ms"] = launch_gangs(client, LAUNCHES // (5 if quick else 1))
        client.close()
    figures["memory_mb"] = {name: memory_mb(net[name]) for name in ("head", NODES[0])}
    authority = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "ray" / "token")}
    figures.update(measure_losses(net, address, authority, quick))
    return figures


def launch_gangs(client: Client, count: int) -> list[float]:
    """The time from submission until all members run, over all nodes, seen from the head. Each
    member is a `sleep`."""
    spec = JobSpec(
        command=("sleep", "600"),
        members=MEMBERS,
        gpus=1,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    took = []
    for _ in range(count):
        begun = time.monotonic()
        job = client.submit(spec).id
        while client.job(job, wait_for="running", wait_s=30).state != "running":
            pass
        took.append(round((time.monotonic() - begun) * 1000, 1))
        client.cancel(job)
        until(lambda job=job: client.job(job).finished_ms is not None)
    return took


# -- plain Ray -----------------------------------------------------------------------------


def measure_ray(net: dict[str, Host], quick: bool) -> dict[str, Any]:
    head = net["head"]
    figures: dict[str, Any] = {}
    address = f"{head.address}:6379"
    common = ("start", "--disable-usage-stats")
    place = ("--temp-dir", str(head.home / "ray"), "--node-ip-address", head.address)
    figures["head_s"] = timed(head, *RAY, *common, "--head", "--num-cpus", "0", *place)
    join = (*RAY, *common, "--address", address, "--num-cpus", "2")
    figures["join_s"] = [
        timed(net[name], *join, "--node-ip-address", net[name].address) for name in NODES
    ]
    count = LAUNCHES // (5 if quick else 1)
    with peer(head, "gangs", address, {}) as gangs:
        ask(gangs, "tasks")  # the workers are warm from now on
        figures["gang_ms"] = [ask(gangs, "tasks")["ms"] for _ in range(count)]
        figures["gang_of_actors_ms"] = [ask(gangs, "actors")["ms"] for _ in range(3)]
    figures["memory_mb"] = {name: memory_mb(net[name]) for name in ("head", NODES[0])}
    figures.update(measure_losses(net, address, {}, quick))
    return figures


# -- what both have in common --------------------------------------------------------------


def measure_losses(
    net: dict[str, Host], address: str, env: dict[str, str], quick: bool
) -> dict[str, Any]:
    """The time until the head declares a node dead. Cut links come last, because of their
    effects."""
    figures: dict[str, Any] = {}
    with peer(net["head"], "watch", address, env) as watch:
        victim = net[NODES[0]]
        begun = time.time()
        kill_raylet(victim)
        lost = await_death(watch, victim, begun)
        figures["raylet_killed_s"] = round(lost - begun, 2)
        if not quick:
            victim = net[NODES[1]]
            begun = time.time()
            victim.cut()
            figures["link_cut_s"] = round(await_death(watch, victim, begun) - begun, 2)
            victim.mend()
    return figures


def await_death(watch: subprocess.Popen[str], victim: Host, begun: float) -> float:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        told = answer(watch)
        if told["ip"] == victim.address and not told["alive"] and told["at"] >= begun:
            return float(told["at"])
    raise TimeoutError(f"nobody misses {victim.name}")


def kill_raylet(host: Host) -> None:
    found = [pid for pid in pids(host) if _program(pid).endswith("/raylet")]
    assert len(found) == 1, f"{host.name} has {len(found)} raylets"
    os.kill(found[0], signal.SIGKILL)


def memory_mb(host: Host) -> int:
    """The memory of all its processes, with shared pages divided among them."""
    total_kb = 0
    for pid in pids(host):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kb += int(line.split()[1])
    return total_kb // 1024


def pids(host: Host) -> list[int]:
    told = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    )
    return [int(word) for word in told.stdout.split()]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def timed(host: Host, *argv: str, env: dict[str, str] | None = None) -> float:
    begun = time.monotonic()
    done = host.run(*argv, env=env, timeout_s=BOUND_S)
    if done.returncode != 0:
        sys.exit(f"error: {host.name}: {' '.join(argv)}: {done.stderr.strip()[-500:]}")
    return round(time.monotonic() - begun, 2)


@contextlib.contextmanager
def peer(
    host: Host, role: str, address: str, env: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A Ray driver on the host that takes and answers requests as lines."""
    with subprocess.Popen(
        host.command(sys.executable, str(PEER), role, address),
        env={**host.environment(), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        while answer(process) != {"ready": True}:
            pass
        yield process
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def ask(process: subprocess.Popen[str], words: str) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(words + "\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # Ray prints messages of its own there
            told: dict[str, Any] = json.loads(line)
            return told
    raise EOFError("a Ray driver has ended")


def until(fact: Any) -> None:
    deadline = time.monotonic() + BOUND_S
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def report(figures: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, found in figures.items():
        gang = _median(found["gang_ms"])
        actors = found.get("gang_of_actors_ms")
        rows.append(
            [
                name,
                f"{found['head_s']:.1f} s",
                f"{_median(found['join_s']):.1f} s",
                f"{gang:.0f} ms" + (f" ({_median(actors):.0f})" if actors else ""),
                f"{found['raylet_killed_s']:.1f} s",
                f"{found['link_cut_s']:.1f} s" if "link_cut_s" in found else "-",
                f"{found['memory_mb']['head']} / {found['memory_mb'][NODES[0]]} MB",
            ]
        )
    titles = [
        "",
        "head",
        "join",
        "gang of 8 (actors)",
        "raylet killed",
        "link cut",
        "memory head / node",
    ]
    print(table(titles, rows))


def _median(values: list[float]) -> float:
    return percentile(values, 50)


if __name__ == "__main__":
    main()
