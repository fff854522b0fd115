"""Where a Slurm site's GPU time went, from what `sacct -P` prints: by outcome, account and user."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from shoal.sim.replay.readers.rows import Row, Rows
from shoal.sim.replay.readers.sacct import (
    NEEDED,
    UNKNOWN,
    amount_of,
    elapsed_ms,
    gpus_of,
    moment_ms,
    tres_of,
)

# What to ask sacct for. All users, no steps, also what ran before a requeue.
COLUMNS = (
    "JobID,User,Account,Partition,Submit,Eligible,Start,End,ElapsedRaw,AllocTRES,ReqTRES,NNodes,"
    "State,Timelimit"
)
ARGV = ("sacct", "--allusers", "--parsable2", "--allocations", "--duplicates")

OUTCOMES = {
    "COMPLETED": "completed",
    "RUNNING": "still running",
    "SUSPENDED": "still running",
    "COMPLETING": "still running",
    "FAILED": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "node failures",
    "NODE_FAIL": "node failures",
    "TIMEOUT": "timed out",
    "DEADLINE": "timed out",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted or requeued",
    "REQUEUED": "preempted or requeued",
    "RESIZING": "completed",
}
OTHER = "other"
SPENT_WELL = ("completed", "still running")


class Sum(msgspec.Struct):
    """Of one outcome, account or user. Times are in GPU-seconds, or in CPU-seconds of a site
    without GPUs."""

    name: str
    jobs: int = 0
    time_s: float = 0.0
    lost_s: float = 0.0  # of this: of jobs that did not end well
    waits_s: list[float] = []

    def wait_s(self, share: float) -> float:
        ordered = sorted(self.waits_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Accounts(msgspec.Struct):
    unit: str  # "GPU" or "CPU"
    from_s: int
    to_s: int
    jobs: int
    never_ran: int
    time_s: float
    outcomes: list[Sum]
    accounts: list[Sum]
    users: list[Sum]

    @property
    def span_s(self) -> int:
        return max(0, self.to_s - self.from_s)


class _Run(msgspec.Struct):
    """One row that is not a step: a job, or one attempt of it."""

    job: str
    user: str
    account: str
    outcome: str
    submit_s: float
    start_s: float | None
    length_s: float
    gpus: int
    cpus: float


def account(rows: Rows) -> Accounts:
    rows.need(*NEEDED)
    runs = [_run(row) for row in rows if not is_step(row)]
    ran = [run for run in runs if run.start_s is not None]
    has_gpus = any(run.gpus for run in runs)

    def size(run: _Run) -> float:
        return run.gpus if has_gpus else run.cpus

    starts = [run.start_s for run in ran if run.start_s is not None]
    ends = [run.start_s + run.length_s for run in ran if run.start_s is not None]
    return Accounts(
        unit="GPU" if has_gpus else "CPU",
        from_s=int(min(starts, default=0)),
        to_s=int(max(ends, default=0)),
        jobs=len({run.job for run in runs}),
        never_ran=len({run.job for run in runs} - {run.job for run in ran}),
        time_s=sum(size(run) * run.length_s for run in ran),
        outcomes=_sums(ran, lambda run: run.outcome, size),
        accounts=_sums(ran, lambda run: run.account, size),
        users=_sums(ran, lambda run: run.user, size),
    )


def is_step(row: Row) -> bool:
    """12.batch, 12.extern, 12.0: their time is in the job's own row."""
    return "." in row.text("JobID")


def idle_s(found: Accounts, gpus: int) -> float:
    """Of a site with so many GPUs, from the first start to the last end."""
    return max(0.0, gpus * found.span_s - found.time_s)


def gpus_of_nodes(text: str) -> int:
    """The GPUs in `sinfo --noheader --Node --format='%N|%G'`; a node of two partitions is there
    twice. `gpu:h100:8(S:0-1)` has 8."""
    import re

    found = dict(line.partition("|")[::2] for line in text.splitlines())
    return sum(
        int(number)
        for gres in found.values()
        for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)
    )


def _run(row: Row) -> _Run:
    tres = tres_of(row)
    state = row.text("State").partition(" ")[0].rstrip("+")
    length_ms = elapsed_ms(row)
    started = length_ms is not None and row.text("Start") not in UNKNOWN
    waited_from = "Eligible" if row.text("Eligible") not in UNKNOWN else "Submit"
    return _Run(
        job=row.text("JobID"),
        user=row.text("User") or "-",
        account=row.text("Account") or "-",
        outcome=OUTCOMES.get(state, OTHER),
        submit_s=moment_ms(row, waited_from) / 1000,
        start_s=moment_ms(row, "Start") / 1000 if started else None,
        length_s=(length_ms or 0) / 1000,
        gpus=gpus_of(row, tres),
        cpus=amount_of(row, tres.get("cpu", "0")),
    )


def _sums(
    runs: Iterable[_Run], key: Callable[[_Run], str], size: Callable[[_Run], float]
) -> list[Sum]:
    found: dict[str, Sum] = {}
    for run in runs:
        one = found.setdefault(key(run), Sum(key(run)))
        time_s = size(run) * run.length_s
        one.jobs += 1
        one.time_s += time_s
        if run.outcome not in SPENT_WELL:
            one.lost_s += time_s
        if run.start_s is not None:
            one.waits_s.append(max(0.0, run.start_s - run.submit_s))
    return sorted(found.values(), key=lambda one: (-one.time_s, one.name))
