"""Measures arrays: one request for many elements, beside as many single submissions.

python -m bench.control_arrays [ELEMENTS]      also a part of bench/control.py
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from shoal.client import Address, Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.model.sweep import IndexRange, Sweep

# They wait for a GPU that one job holds, so that only their submission is measured.
WAITS = JobSpec(command=("true",), gpus=1, cpu_milli=0)
HOLDS = JobSpec(command=("sleep", "86400"), gpus=1, env={"PATH": os.environ["PATH"]})
SHORT = JobSpec(command=("true",), cpu_milli=100, env={"PATH": os.environ["PATH"]})


def measure(elements: int = 10_000, short: int = 500) -> dict[str, float]:
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    home = Home(path)
    nodes = (NodeSpec(id="n1", gpus=1, cpu_milli=64_000, memory_mb=64_000),)
    try:
        bring_up(home, ClusterConfig(nodes=nodes, port=0), lambda _: None)
        with Client.at_home(home.path) as client:
            return {
                "elements": elements,
                **_submissions(client, home, elements),
                **_throughput(client, short),
            }
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def _submissions(client: Client, home: Home, elements: int) -> dict[str, float]:
    holder = client.submit(HOLDS)
    client.job(holder.id, wait_for="running", wait_s=30)
    before = _memory_mb(home)
    started = time.perf_counter()
    array = client.submit(_array(WAITS, elements))
    array_s = time.perf_counter() - started
    with_array = _memory_mb(home)
    client.cancel(array.id)
    client.job(array.id, wait_for="finished", wait_s=30)
    single = _memory_mb(home)
    started = time.perf_counter()
    for _ in range(elements):
        client.submit(WAITS)
    singles_s = time.perf_counter() - started
    figures = {
        "array_s": round(array_s, 3),
        "array_mb": round(with_array - before, 1),
        "singles_s": round(singles_s, 1),
        "singles_mb": round(_memory_mb(home) - single, 1),
    }
    for row in client.jobs(limit=min(elements + 1, 10_000)):
        client.cancel(row.id)
    return figures


def _throughput(client: Client, count: int) -> dict[str, float]:
    """The same short jobs, singly and as an array, from the first submission to the last end."""
    goal = (client.status().finished or 0) + count
    started = time.perf_counter()
    for _ in range(count):
        client.submit(SHORT)
    while (client.status().finished or 0) < goal:
        time.sleep(0.01)
    singles_s = time.perf_counter() - started
    started = time.perf_counter()
    array = client.submit(_array(SHORT, count)).id
    while client.job(array, wait_for="finished", wait_s=30).finished_ms is None:
        pass
    array_s = time.perf_counter() - started
    return {
        "short_singles_per_s": round(count / singles_s, 1),
        "short_elements_per_s": round(count / array_s, 1),
    }


def _array(spec: JobSpec, elements: int) -> JobSpec:
    return msgspec.structs.replace(spec, sweep=Sweep(ranges=(IndexRange(0, elements - 1),)))


def _memory_mb(home: Home) -> float:
    """Of the controller, resident."""
    pid = msgspec.json.decode(home.address.read_bytes(), type=Address).pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    figures = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    print(msgspec.json.encode(figures).decode())
