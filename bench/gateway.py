"""Compares the gateway with the load balancers on this machine, in one run.

python bench/gateway.py                 everything (about nine minutes)
python bench/gateway.py --quick         shorter and once (about a minute and a half)
python bench/gateway.py --only slow     one part: throughput, added, slow or killed

The balancer has a core of its own; load and replicas have the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench.figures import machine, percentile, ratio, table
from bench.gateway_load import Sample
from bench.gateway_peers import (
    OTHER_CPUS,
    Start,
    available,
    folder,
    free_port,
    pinned,
    started,
    wait_for,
    which,
)
from shoal.gateway.binary import find_binary

HERE = Path(__file__).parent
REPLICAS = 4
CONCURRENCY = 8
MEAN_MS = 50.0
SLOWER = 5.0
LOAD = 0.7
CONNECTIONS = 64

Figures = dict[str, dict[str, object]]


class Lengths(msgspec.Struct, frozen=True):
    rounds: int
    seconds: float
    warm_up_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="shorter, and one round of each")
    parser.add_argument("--only", choices=list(PARTS), help="one part of it")
    arguments = parser.parse_args()
    lengths = Lengths(1, 5, 4) if arguments.quick else Lengths(3, 15, 6)
    print(machine())
    peers, missing = available()
    for line in missing:
        print(f"left out: {line}")
    figures: dict[str, object] = {}
    for name, measure in PARTS.items():
        if arguments.only in (None, name):
            figures[name] = measure(peers, lengths)
    print(msgspec.json.encode(figures).decode())


def throughput(peers: dict[str, Start], lengths: Lengths) -> Figures:
    """(a) requests per second over 64 connections, replicas that answer at once."""
    rates: dict[str, dict[str, list[float]]] = {name: {"GET": [], "POST": []} for name in peers}
    with instant_replicas() as ports:
        for _ in range(lengths.rounds):  # in turns, so that a noisy moment affects all
            for name, start in peers.items():
                with start(ports, 0) as (port, path):
                    for method, values in rates[name].items():
                        values.append(closed_loop(port, path, method, lengths.seconds / 5))
    figures: Figures = {
        name: {
            f"{method.lower()}_per_s": round(statistics.median(values))
            for method, values in methods.items()
        }
        for name, methods in rates.items()
    }
    title = f"(a) {CONNECTIONS} connections, instant replicas (0: does not answer such requests)"
    base = figures.get("haproxy", {}).get("get_per_s")
    for row in figures.values():
        mine = row["get_per_s"]
        if isinstance(mine, int) and isinstance(base, int):
            row["get_per_s_to_haproxy"] = ratio(mine, base)
    return compared(figures, "post_per_s", title)


def added(peers: dict[str, Start], lengths: Lengths) -> Figures:
    """(b) latency at 200 requests per second, replicas that answer at once."""
    figures: Figures = {}
    with instant_replicas() as ports:
        for name, start in peers.items():
            with start(ports, 0) as (port, path):
                figures[name] = spread_of([open_loop(port, path, 200, lengths, "GET", 0)])
    return compared(figures, "p50_ms", "(b) 200 requests per second, instant replicas")


def slow(peers: dict[str, Start], lengths: Lengths) -> Figures:
    """(c) one of four replicas is five times slower; 70 % of what all can do."""
    seen: dict[str, list[list[Sample]]] = {
        name: [] for name in peers if name not in ("direct", "ray-serve")
    }
    rate = LOAD * CONCURRENCY * 1000 / MEAN_MS * (REPLICAS - 1 + 1 / SLOWER)
    for number in range(lengths.rounds):
        for name, rounds in seen.items():
            with working_replicas() as replicas, peers[name](list(replicas), CONCURRENCY) as where:
                rounds.append(open_loop(*where, rate, lengths, "POST", number))
    figures = {name: spread_of(rounds) for name, rounds in seen.items()}
    return compared(
        figures, "p99_ms", f"(c) one of {REPLICAS} replicas 5x slower, {rate:.0f} requests per s"
    )


def killed(peers: dict[str, Start], lengths: Lengths) -> Figures:
    """(d) a replica is killed and comes back: failed requests, and those begun after the kill."""
    figures: Figures = {}
    rate = LOAD * CONCURRENCY * 1000 / MEAN_MS * (REPLICAS - 1)
    for name in (name for name in peers if name not in ("direct", "ray-serve")):
        for method in ("GET", "POST"):
            samples, kill_s = one_kill(peers[name], rate, lengths, method)
            late = sum(failed(sample) and sample.begun_s > kill_s for sample in samples)
            figures[f"{name} {method}"] = {
                "requests": len(samples),
                "failed": sum(map(failed, samples)),
                "failed_begun_after_the_kill": late,
            }
    print(f"\n(d) a replica killed and restarted, {rate:.0f} requests per second")
    rows = [[name, *values.values()] for name, values in figures.items()]
    print(table(["", "requests", "failed", "of them begun after the kill"], rows))
    return figures


def one_kill(
    start: Start, rate: float, lengths: Lengths, method: str
) -> tuple[list[Sample], float]:
    moment = [0.0]
    with (
        working_replicas(slower=1.0) as replicas,
        start(list(replicas), CONCURRENCY) as where,
    ):
        victim = list(replicas)[1]

        def strike() -> None:
            time.sleep(lengths.warm_up_s + lengths.seconds / 3)
            moment[0] = time.monotonic()
            replicas[victim].send_signal(signal.SIGKILL)
            replicas[victim].wait()
            time.sleep(lengths.seconds / 3)
            replicas[victim] = replica(victim, 1.0)

        thread = threading.Thread(target=strike)
        thread.start()
        samples = open_loop(*where, rate, lengths, method, 0)
        thread.join()
    return samples, moment[0]


PARTS: dict[str, Callable[[dict[str, Start], Lengths], Figures]] = {
    "throughput": throughput,
    "added": added,
    "slow": slow,
    "killed": killed,
}


def failed(sample: Sample) -> bool:
    return sample.status == 0 or sample.status >= 500


def spread_of(rounds: Sequence[Sequence[Sample]]) -> dict[str, object]:
    """The median over the rounds of each round's percentiles."""

    def middle(percent: float) -> float:
        values = [percentile([s.latency_s for s in samples], percent) for samples in rounds]
        return round(statistics.median(values) * 1000, 2)

    good = [sum(not failed(s) for s in samples) / max(1, len(samples)) for samples in rounds]
    return {
        "p50_ms": middle(50),
        "p99_ms": middle(99),
        "answered": round(min(good), 4),
        "requests": sum(map(len, rounds)),
    }


def compared(figures: Figures, key: str, title: str) -> Figures:
    """Prints each balancer relative to plain HAProxy and adds the ratio to the figures."""
    base = figures.get("haproxy", {}).get(key)
    for values in figures.values():
        mine = values[key]
        assert isinstance(mine, int | float)
        if isinstance(base, int | float):
            values[f"{key}_to_haproxy"] = ratio(mine, base)
    print(f"\n{title}")
    header = ["", *next(iter(figures.values()))]
    print(table(header, [[name, *values.values()] for name, values in figures.items()]))
    sys.stdout.flush()
    return figures


def closed_loop(port: int, path: str, method: str, seconds: float) -> float:
    """Requests per second of 64 connections, by wrk; 0 if they are refused."""
    wrk = which("wrk")
    if wrk is None:
        raise SystemExit("part (a) needs wrk: install it, or leave it out with --only")
    url = f"http://127.0.0.1:{port}{path}"
    words = ["-t1", f"-c{CONNECTIONS}", f"-d{max(2, round(seconds))}s"]
    with folder() as directory, pinned(OTHER_CPUS):
        script = directory / "request.lua"
        if method == "POST":
            script.write_text(POST_SCRIPT)
            words += ["-s", str(script)]
        said = subprocess.run(
            [wrk, *words, url], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    found = re.search(r"Requests/sec:\s+([\d.]+)", said)
    return float(found[1]) if found is not None and "Non-2xx" not in said else 0.0


POST_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"text": "a question", "stream": false}'
"""


def open_loop(
    port: int, path: str, rate: float, lengths: Lengths, method: str, seed: int
) -> list[Sample]:
    words = [port, path, rate, lengths.seconds, lengths.warm_up_s, method, seed]
    with pinned(OTHER_CPUS):
        said = subprocess.run(
            [sys.executable, str(HERE / "gateway_load.py"), *map(str, words)],
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
    return msgspec.json.decode(said, type=list[Sample])


@contextlib.contextmanager
def instant_replicas() -> Iterator[list[int]]:
    """HAProxy itself as the replica, because nothing answers faster."""
    ports = [free_port() for _ in range(REPLICAS)]
    lines = ["global", "    nbthread 1", "defaults", "    mode http", "    timeout client 60s"]
    for number, port in enumerate(ports):
        lines += [
            f"frontend f{number}",
            f"    bind 127.0.0.1:{port}",
            "    http-request return status 200 content-type text/plain string ok",
        ]
    with folder() as directory:
        (directory / "replicas.cfg").write_text("\n".join(lines) + "\n")
        command = [str(find_binary().path), "-f", str(directory / "replicas.cfg")]
        with started(command, ports[-1], OTHER_CPUS):
            yield ports


@contextlib.contextmanager
def working_replicas(slower: float = SLOWER) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Requests by port; the first is the slow replica."""
    running = {}
    try:
        for number in range(REPLICAS):
            port = free_port()
            running[port] = replica(port, slower if number == 0 else 1.0)
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def replica(port: int, slower: float) -> subprocess.Popen[bytes]:
    words = [port, CONCURRENCY, MEAN_MS, slower, port]
    with pinned(OTHER_CPUS):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gateway_replica.py"), *map(str, words)],
            stdout=subprocess.DEVNULL,
            env=os.environ,
        )
    wait_for(port)
    return process


if __name__ == "__main__":
    main()
