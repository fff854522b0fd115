"""Failures that follow a node, and failures that follow the job wherever it runs.

The book holds only failures by a member's own error, each with the node of the member that failed
first: its peers mostly fail because of it. Node losses, preemptions and cancellations are not
recorded here.
"""

from __future__ import annotations

import msgspec

from shoal.model.reason import job_part

FAILURES_PER_JOB_MAX = 8
JOBS_MAX = 1024  # the job that failed longest ago makes room
JOBS_FOR_SUSPICION = 2
FAILURES_FOR_SUSPICION = 2
SAME_WAY_MAX = 3
REMEMBERED_MS = 24 * 3_600_000


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """`step`: where it failed; None if the job counts no steps. `elsewhere`: the job has since run
    well without this node. `owner`: whose job it is."""

    at_ms: int
    node: str
    member: int
    code: int
    step: int | None = None
    elsewhere: bool = False
    owner: str = ""


class FailureBook(msgspec.Struct):
    """Changed in place, by events only; bounded."""

    jobs: dict[str, list[Failure]] = {}


class Blame(msgspec.Struct, frozen=True):
    """Why a node is suspected, in numbers and in a sentence. Whoever owns all these jobs may have
    made them fail: only the failures of several `owners` count without a check."""

    node: str
    jobs: tuple[str, ...]
    failures: int
    why: str
    owners: frozenset[str] = frozenset()


def failed(book: FailureBook, job: str, failure: Failure) -> None:
    kept = book.jobs.pop(job, [])
    book.jobs[job] = [*kept, failure][-FAILURES_PER_JOB_MAX:]  # the latest to fail stands last
    while len(book.jobs) > JOBS_MAX:
        del book.jobs[next(iter(book.jobs))]


def ran_well(book: FailureBook, job: str, nodes: tuple[str, ...]) -> None:
    """The job succeeded on these nodes, or got well past the step at which it had failed. That
    clears these nodes of its failures and counts against the nodes it left."""
    kept = book.jobs.get(job)
    if kept is None:
        return
    book.jobs[job] = [
        msgspec.structs.replace(failure, elsewhere=True)
        for failure in kept
        if failure.node not in nodes
    ]
    if not book.jobs[job]:
        del book.jobs[job]


def blame(book: FailureBook, node: str, now_ms: int) -> Blame | None:
    """Do the failures share this node? Jobs that never ran well elsewhere prove nothing."""
    counts: dict[str, int] = {}
    only_here = []
    for job, failures in book.jobs.items():
        recent = [f for f in failures if now_ms - f.at_ms <= REMEMBERED_MS]
        here = [f for f in recent if f.node == node and f.elsewhere]
        if here:
            counts[job] = len(here)
            if len(here) == len(recent) >= FAILURES_FOR_SUSPICION:
                only_here.append(job)
    if len(counts) >= JOBS_FOR_SUSPICION:
        jobs = tuple(counts)
        names = ", ".join(_named(book, job) for job in jobs[:4])
        why = f"{len(jobs)} jobs failed on {node} and ran well elsewhere: {names}"
    elif only_here:
        jobs = tuple(only_here)
        times = f"{counts[jobs[0]]} times, only on {node}, and ran well elsewhere"
        why = f"{_named(book, jobs[0])} failed {times}"
    else:
        return None
    owners = frozenset(f.owner for job in jobs for f in book.jobs[job] if f.node == node)
    return Blame(node, jobs, sum(counts[job] for job in jobs), why, owners)


def _named(book: FailureBook, job: str) -> str:
    """An owner is a tenant and a user."""
    return job_part(book.jobs[job][-1].owner.partition("/")[0], job)


def refute(book: FailureBook, node: str) -> None:
    """A check found the node well: what jobs said against it is spent."""
    for job, failures in list(book.jobs.items()):
        book.jobs[job] = [f for f in failures if f.node != node or not f.elsewhere]
        if not book.jobs[job]:
            del book.jobs[job]


def same_way(book: FailureBook, job: str) -> str | None:
    """The reason to stop a job that fails the same way each time; None if it may be tried again.
    Never for jobs that count no steps: their failures cannot be distinguished."""
    last = book.jobs.get(job, [])[-SAME_WAY_MAX:]
    if len(last) < SAME_WAY_MAX or last[0].step is None:
        return None
    if len({(failure.code, failure.step) for failure in last}) > 1:
        return None
    nodes = sorted({failure.node for failure in last})
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} different nodes"
    return f"failed {SAME_WAY_MAX} times with code {last[0].code} at step {last[0].step}, {where}"


def forget(book: FailureBook, job: str) -> None:
    """A finished job's failures still count against nodes, but only if it ran well elsewhere."""
    kept = [failure for failure in book.jobs.get(job, []) if failure.elsewhere]
    if kept:
        book.jobs[job] = kept
    else:
        book.jobs.pop(job, None)
