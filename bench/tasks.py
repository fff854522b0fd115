"""Compares maps of small tasks with the other libraries that are installed, in one run.

python bench/tasks.py            10,000 tasks that do nothing, 10,000 of 1 ms (about two minutes)
python bench/tasks.py --quick    a tenth of them
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec

import shoal
from bench.figures import machine, ratio, table

ROUNDS = 5  # of quick maps; the best counts, because other load on the machine only slows down
ROUNDS_S = 5.0
WORKERS = len(os.sched_getaffinity(0))
TASK_S = 0.001

Map = Callable[[Callable[[int], Any], Iterable[int]], list[Any]]


class Peer(NamedTuple):
    name: str
    module: str  # that must be installed
    open: Callable[[int], contextlib.AbstractContextManager[Map]]  # given how many tasks there are


def nothing(number: int) -> int:
    return number


def spin(_: int) -> float:
    """Busy for a millisecond; returns the real duration."""
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < TASK_S:
        pass
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the tasks")
    tasks = 1000 if parser.parse_args().quick else 10_000
    print(machine(), flush=True)
    figures: dict[str, dict[str, float]] = {}
    for peer in PEERS:
        if importlib.util.find_spec(peer.module) is None:
            print(f"{peer.name}: left out, {peer.module} is not installed")
            continue
        print(f"{peer.name} ...", flush=True)
        figures[peer.name] = measure(peer, tasks)
    report(figures, tasks)
    first = {"cold_ms": first_cold_ms(), "warm_ms": first_warm_ms()}
    print(f"first result: {first['cold_ms']} ms from cold (a new Python), {first['warm_ms']} warm")
    print(msgspec.json.encode({"tasks": tasks, "map": figures, "first_result": first}).decode())


def measure(peer: Peer, tasks: int) -> dict[str, float]:
    """All with warm workers, to compare the work and not the start."""
    with peer.open(tasks) as run:
        run(nothing, range(10 * WORKERS))
        best_s = best(lambda: run(nothing, range(tasks)))
        wall_s, busy = timed(lambda: run(spin, range(tasks)))
    return {
        "noop_per_s": round(tasks / best_s),
        "ms_per_s": round(tasks / wall_s),
        # The share of the workers' time that was spent in tasks.
        "cores": round(sum(busy) / (WORKERS * wall_s), 4),
    }


def best(act: Callable[[], list[Any]]) -> float:
    """Times several rounds, or fewer of a slow map."""
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < ROUNDS_S:
        times.append(timed(act)[0])
    return min(times)


def timed(act: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    done = act()
    return time.perf_counter() - began, done


@contextlib.contextmanager
def ours(tasks: int) -> Iterator[Map]:  # noqa: ARG001
    yield lambda function, items: list(shoal.map(function, items, progress=False))


@contextlib.contextmanager
def ours_submitted(tasks: int) -> Iterator[Map]:  # noqa: ARG001
    with shoal.Executor() as executor:
        yield lambda function, items: list(executor.map(function, items))


def pool(divisor: int) -> Callable[[int], contextlib.AbstractContextManager[Map]]:
    """0: a chunk is one task; else the number of chunks for each worker."""

    @contextlib.contextmanager
    def opened(tasks: int) -> Iterator[Map]:
        size = max(1, tasks // (divisor * WORKERS)) if divisor else 1
        with ProcessPoolExecutor(WORKERS) as executor:
            yield lambda function, items: list(executor.map(function, items, chunksize=size))

    return opened


@contextlib.contextmanager
def with_joblib(tasks: int) -> Iterator[Map]:  # noqa: ARG001
    import joblib

    with joblib.Parallel(n_jobs=WORKERS) as parallel:
        yield lambda function, items: parallel(joblib.delayed(function)(item) for item in items)


@contextlib.contextmanager
def with_dask(tasks: int) -> Iterator[Map]:
    from distributed import Client

    size = max(1, tasks // (4 * WORKERS))
    with Client(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, processes=True
    ) as client:
        yield lambda function, items: client.gather(  # pure=False: else it caches results
            client.map(function, list(items), pure=False, batch_size=size)
        )


@contextlib.contextmanager
def with_ray(tasks: int) -> Iterator[Map]:  # noqa: ARG001
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        yield lambda function, items: ray.get(
            [remote(ray, function).remote(item) for item in items]
        )
    finally:
        ray.shutdown()


_remotes: dict[Callable[..., Any], Any] = {}


def remote(ray: Any, function: Callable[..., Any]) -> Any:
    if function not in _remotes:
        _remotes[function] = ray.remote(function)
    return _remotes[function]


PEERS = (
    Peer("shoal.map", "shoal", ours),
    Peer("shoal.Executor", "shoal", ours_submitted),
    Peer("ProcessPool, chunks of 1", "concurrent", pool(0)),
    Peer("ProcessPool, 4 chunks each", "concurrent", pool(4)),
    Peer("joblib", "joblib", with_joblib),
    Peer("Dask", "distributed", with_dask),
    Peer("Ray", "ray", with_ray),
)


def report(figures: dict[str, dict[str, float]], tasks: int) -> None:
    base = figures["shoal.map"]["noop_per_s"]
    rows = [
        (
            name,
            f"{one['noop_per_s']:,}",
            ratio(base, one["noop_per_s"]),
            f"{one['ms_per_s']:,}",
            f"{100 * one['cores']:.1f} %",
        )
        for name, one in figures.items()
    ]
    print(f"{tasks:,} tasks, {WORKERS} workers")
    header = ["", "no-ops/s", "ours to it", "1 ms tasks/s", "of the cores"]
    print(table(header, rows))


COLD = "import shoal; print(next(shoal.map(abs, range(100), progress=False)))"


def first_cold_ms() -> float:
    """Includes Python's start, the import, the first worker, the first result and the end."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", COLD], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - began)
    return round(1000 * min(times), 1)


def first_warm_ms() -> float:
    list(shoal.map(abs, range(100), progress=False))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        results = shoal.map(abs, range(100), progress=False)
        next(results)
        times.append(time.perf_counter() - began)
        list(results)
    return round(1000 * min(times), 2)


if __name__ == "__main__":
    main()
