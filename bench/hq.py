"""How many short tasks HyperQueue runs per second on this machine, as a peer of jobs of `true`.

python -m bench.hq [TASKS]      needs its wheel, which exists for x86-64: pip install hyperqueue

It is made for many tasks of one person, and does less for each of them than Shoal or Slurm do: by
default it stores no task, so that they are forgotten if its server ends. All tasks run as the user
who started the worker, with no limit on memory; there are no tenants, quotas, accounts or audit,
and nobody but that user may submit. A job is a submission, a task one run of a program.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

TASKS = 1_000
WHEEL = "x86_64"


def available() -> str | None:
    """Why it cannot be measured here."""
    if importlib.util.find_spec("hyperqueue") is not None:
        return None
    if platform.machine() != WHEEL:
        return f"HyperQueue has no wheel for {platform.machine()}, only for {WHEEL}"
    return "hyperqueue is not installed: pip install hyperqueue"


def measure(tasks: int = TASKS) -> dict[str, Any]:
    """One job per task, as our own jobs come; and one job with all tasks, which is its strength."""
    hyperqueue: Any = importlib.import_module("hyperqueue")
    config = importlib.import_module("hyperqueue.cluster").WorkerConfig()
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        hyperqueue.LocalCluster(str(Path(folder)), config) as cluster,
    ):
        client = cluster.client()

        def job(count: int) -> Any:
            made = hyperqueue.Job(default_workdir=folder)
            for _ in range(count):
                made.program(["true"], stdout=None, stderr=None)
            return made

        client.wait_for_jobs([client.submit(job(20))])
        started = time.perf_counter()
        client.wait_for_jobs([client.submit(job(1)) for _ in range(tasks)])
        singly_s = time.perf_counter() - started
        started = time.perf_counter()
        client.wait_for_jobs([client.submit(job(tasks))])
        together_s = time.perf_counter() - started
    return {
        "version": hyperqueue.get_version(),
        "tasks": tasks,
        "jobs_per_s": round(tasks / singly_s, 1),
        "tasks_of_one_job_per_s": round(tasks / together_s, 1),
    }


def main() -> None:
    reason = available()
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else TASKS
    figures = {"absent": reason} if reason else measure(tasks)
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
