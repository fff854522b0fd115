"""How many short jobs a private, real Slurm on this machine runs per second.

Run as root with `python -m bench.slurm`; `harness/slurm.py` starts and stops it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from harness.slurm import NODES, Slurm, available, slurm

from bench.figures import machine, percentile, table

JOBS = 1_000
LATENCY_REPEATS = 50
SUBMITTERS = 4
DONE_TIMEOUT_S = 600.0
CONF = (
    "MessageTimeout=30",
    "MaxArraySize=100001",
    "MaxJobCount=100000",
    "MinJobAge=3600",
    "SchedulerParameters=sched_min_interval=10000,sched_interval=5,batch_sched_delay=0,"
    "bf_interval=5,bf_continue",
)


class Burst(msgspec.Struct, frozen=True):
    """One way to submit many jobs, and its result."""

    jobs_per_s: float
    submissions_per_s: float


def measure(jobs: int = JOBS, latencies: int = LATENCY_REPEATS) -> dict[str, object]:
    """Jobs that run `true` on one node each, by every way to submit them; the best one counts."""
    with slurm(CONF) as cluster:
        latency = measure_latency(cluster, latencies)
        bursts = {name: _burst(cluster, jobs, submit) for name, submit in WAYS.items()}
    in_turn, together, _ = bursts.values()
    best = max(bursts, key=lambda name: bursts[name].jobs_per_s)
    return {
        "machine": machine(),
        "version": cluster.version,
        "jobs": jobs,
        "best": best,
        "jobs_per_s": bursts[best].jobs_per_s,
        # An array is one submission, whatever its size.
        "submissions_per_s": max(in_turn.submissions_per_s, together.submissions_per_s),
        "bursts": msgspec.to_builtins(bursts),
        "latency_ms": latency,
    }


def measure_latency(cluster: Slurm, repeats: int) -> dict[str, float]:
    """The time from calling sbatch to the job's first line, and `srun true` from start to end."""
    to_running, srun = [], []
    mark = cluster.root / "started"
    for _ in range(repeats):
        mark.unlink(missing_ok=True)
        before_s = time.time()
        cluster.sbatch(script=f"date +%s.%N > {mark}.new && mv {mark}.new {mark}")
        while not mark.exists():
            time.sleep(0.001)
        to_running.append(float(mark.read_text()) - before_s)
        before_s = time.time()
        cluster.run("srun", "--nodes=1", "true")
        srun.append(time.time() - before_s)
    return {
        "submit_to_running_p50": round(percentile(to_running, 50) * 1000, 1),
        "submit_to_running_p99": round(percentile(to_running, 99) * 1000, 1),
        "srun_true_p50": round(percentile(srun, 50) * 1000, 1),
        "srun_true_p99": round(percentile(srun, 99) * 1000, 1),
    }


def _burst(cluster: Slurm, jobs: int, submit: Callable[[Slurm, int], None]) -> Burst:
    cluster.wait("an empty queue", cluster.idle, DONE_TIMEOUT_S)  # of what was before
    completed = cluster.completed()
    start_s = time.monotonic()
    submit(cluster, jobs)
    submitted_s = time.monotonic()
    cluster.wait("an empty queue", cluster.idle, DONE_TIMEOUT_S)
    end_s = time.monotonic()
    completed = cluster.completed() - completed
    if completed != jobs:
        raise RuntimeError(f"{completed} of {jobs} jobs succeeded\n{cluster.logs()}")
    return Burst(round(jobs / (end_s - start_s), 1), round(jobs / (submitted_s - start_s), 1))


def _submit_in_turn(cluster: Slurm, jobs: int) -> None:
    for _ in range(jobs):
        cluster.sbatch()


def _submit_together(cluster: Slurm, jobs: int) -> None:
    with ThreadPoolExecutor(SUBMITTERS) as pool:
        for _ in pool.map(lambda _: cluster.sbatch(), range(jobs)):
            pass


def _submit_array(cluster: Slurm, jobs: int) -> None:
    cluster.sbatch(f"--array=1-{jobs}")


WAYS: dict[str, Callable[[Slurm, int], None]] = {
    "sbatch, one after the other": _submit_in_turn,
    f"sbatch, {SUBMITTERS} submitters": _submit_together,
    "sbatch, one job array": _submit_array,
}


def main() -> None:
    reason = available()
    if reason is not None:
        print(reason)
        print(msgspec.json.encode({"skipped": reason}).decode())
        return
    figures = measure()
    bursts = msgspec.convert(figures["bursts"], dict[str, Burst])
    print(figures["machine"])
    print(f"{figures['version']}, {NODES} nodes, {JOBS} jobs that run `true`")
    rows = [(name, burst.jobs_per_s, burst.submissions_per_s) for name, burst in bursts.items()]
    print(table(("submitted by", "jobs/s", "submissions/s"), rows))
    print(
        table(("latency", "ms"), msgspec.convert(figures["latency_ms"], dict[str, float]).items())
    )
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
