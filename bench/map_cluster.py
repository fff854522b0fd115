"""Compares a map with workers on a cluster to one with local workers, and times packed code.

Run with `python bench/map_cluster.py`. Both kinds of workers take turns, so that other load on the
machine affects both. The cluster has two virtual nodes on this machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import shoal
from bench.figures import machine, percentile, table
from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.link.packing import pack
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.tasks import Cluster

WORKERS = 2
FIRST = 2000  # results until the chunk size has settled
LARGE_BYTES = 64 << 20
PACKAGE_BYTES = 192 << 20


def nothing(number: int) -> int:
    return number


def busy(number: int) -> int:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return number


def large(_: int) -> bytes:
    return bytes(LARGE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    with private_cluster() as home:
        kinds: dict[str, dict[str, Any]] = {"of this process": {}}
        kinds["of the cluster"] = {"cluster": Cluster(home=home.path)}
        found: dict[str, list[float]] = {}
        for _ in range(turns):
            for kind, more in kinds.items():
                found.setdefault(f"no-ops/s, workers {kind}", []).append(
                    rate(nothing, 300_000, more)
                )
                found.setdefault(f"1 ms tasks/s, workers {kind}", []).append(rate(busy, 4000, more))
            found.setdefault("s to the first result", []).append(first(kinds["of the cluster"]))
            found.setdefault("MB/s of 64 MiB results", []).append(
                large_rate(kinds["of the cluster"])
            )
        for name, taken in travel(home).items():
            found[name] = [taken]
    rows = [
        (name, *(f"{value:,.1f}" for value in (percentile(all_, 50), min(all_), max(all_))))
        for name, all_ in found.items()
    ]
    print(machine())
    print(table(("what", "median", "least", "most"), rows))
    print(msgspec.json.encode({"machine": machine(), **found}).decode())


def rate(function: Callable[[int], int], count: int, more: dict[str, Any]) -> float:
    results = shoal.map(function, range(count + FIRST), workers=WORKERS, progress=False, **more)
    for _ in range(FIRST):
        next(results)
    began = time.monotonic()
    return sum(1 for _ in results) / (time.monotonic() - began)


def first(more: dict[str, Any]) -> float:
    began = time.monotonic()
    next(shoal.map(nothing, range(10), workers=WORKERS, progress=False, **more))
    return time.monotonic() - began


def large_rate(more: dict[str, Any]) -> float:
    began = time.monotonic()
    results = shoal.map(large, range(8), workers=WORKERS, progress=False, **more)
    return sum(map(len, results)) / 1e6 / (time.monotonic() - began)


def travel(home: Home) -> dict[str, float]:
    """A working directory of 192 MiB: packed, sent, run."""
    times = [time.monotonic()]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        with (Path(folder) / "ballast").open("wb") as file:
            file.truncate(PACKAGE_BYTES)
        package = pack(Path(folder))
        times.append(time.monotonic())
        with Client.at_home(home.path) as client, package.file as archive:
            client.send_package(package.sha256, package.size, archive)
            times.append(time.monotonic())
            for _ in range(2):
                job = client.submit(JobSpec(command=("true",), package=package.sha256)).id
                while client.job(job, wait_for="finished", wait_s=30).finished_ms is None:
                    pass
                times.append(time.monotonic())
    names = ("s to pack 192 MiB", "s to send it", "s for a job of it", "s for the next")
    return {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}


@contextmanager
def private_cluster() -> Iterator[Home]:
    home = Home(Path(tempfile.mkdtemp(prefix="shoal-bench-")))
    nodes = tuple(NodeSpec(id=id_, cpu_milli=16_000, memory_mb=4_000) for id_ in ("n1", "n2"))
    try:
        bring_up(home, ClusterConfig(nodes=nodes, port=0), lambda _: None)
        yield home
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(home.path, ignore_errors=True)


if __name__ == "__main__":
    main()
