"""Nodes that end: which jobs may still start there, and when jobs have to leave (ADR 38).

A job starts on such a node only if it is expected to be done before the end, or if it saves its
work (or is a replica, which another replaces) and the time is worth a start. Without any
expectation, an hour has to be left. A gang's end is the
earliest end of its nodes: each of them is judged by the same need.
"""

from __future__ import annotations

from bisect import bisect_left

from shoal.core.state.ends import GUESS_MS, SAFE, lead_ms
from shoal.core.state.expect import run_ms
from shoal.core.state.state import Node, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Restart
from shoal.model.node import End
from shoal.model.supply import Supply

GUESS_DOUBLINGS_MAX = 10
NONE: frozenset[int] = frozenset()
KEPT_MAX = 64  # sets of nodes
STARTS_MS = 60_000  # of a supplied node's life may pass before it reports, or a tenth of it


def goes_on(job: Job) -> bool:
    """Little is lost if its node ends: it saves its work, may be stopped at any time by its
    owner's word, or is a replica."""
    saves = job.spec.preemptible or job.spec.checkpoint_ms or job.saved_ms is not None
    return job.spec.restart is not Restart.NEVER and bool(saves or job.spec.service)


def left_ms(state: State, job: Job) -> int | None:
    """How long a job that waits is expected to run; None: nobody knows."""
    expected = run_ms(state, job, SAFE, job.attained_ms)
    return None if expected is None else max(1, expected - job.attained_ms)


def guess_ms(job: Job) -> int | None:
    """For a job of which nobody knows how long it runs: most are done in an hour. One that was cut
    off, or failed, gets twice as long the next time. One that could not run again is not risked."""
    if job.spec.restart is Restart.NEVER:
        return None
    return GUESS_MS << min(job.attempt, GUESS_DOUBLINGS_MAX)


def need_ms(state: State, job: Job) -> int | None:
    """How much longer a node must live for the job to start there; None: forever."""
    left = left_ms(state, job)
    if left is None and not goes_on(job):
        left = guess_ms(job)
    if goes_on(job):
        worth_ms = max(1, state.policy.run_ms_min, job.spec.checkpoint_ms)
        left = worth_ms if left is None else min(left, worth_ms)
    return None if left is None else left + lead_ms(state, job)


def lives_ms(supply: Supply) -> int:
    """How long such a node lives after it has reported; 0: forever."""
    return supply.lasts_ms - min(supply.lasts_ms // 10, STARTS_MS)


def outlives(state: State, job: Job, supply: Supply) -> bool:
    """Would the job not start on such a node, because the node does not live long enough?"""
    need = need_ms(state, job) if supply.lasts_ms else 0
    return need is None or need > lives_ms(supply)


def too_short(state: State, job: Job, now_ms: int) -> frozenset[int]:
    """Open nodes that end too early for it to start there."""
    return _ending_within(state, now_ms, need_ms(state, job)) if state.open_endings else NONE


def cut_short(state: State, job: Job, now_ms: int) -> frozenset[int]:
    """Open nodes that it would have to leave before it is done."""
    if not state.open_endings:
        return NONE
    left = left_ms(state, job)
    return _ending_within(state, now_ms, None if left is None else left + lead_ms(state, job))


def _ending_within(state: State, now_ms: int, time_ms: int | None) -> frozenset[int]:
    """Many jobs need about the same time, so the sets are kept."""
    until = len(state.open_endings)
    if time_ms is not None:
        until = bisect_left(state.open_endings, (now_ms + time_ms, -1))
    kept = state.caches.ending
    if until not in kept:
        while len(kept) >= KEPT_MAX:
            del kept[next(iter(kept))]
        kept[until] = frozenset(index for _, index in state.open_endings[:until])
    return kept[until]


def last_starts(state: State, job: Job) -> dict[int, int]:
    """The last moment at which it may start on each node that ends, for those where it may."""
    need = need_ms(state, job) if state.open_endings else None
    return {} if need is None else {index: at_ms - need for at_ms, index in state.open_endings}


def must_leave(state: State, node: Node, job: Job, now_ms: int) -> bool:
    """Is the node's end so near that the job has to leave?"""
    return node.end is not None and node.end.at_ms - lead_ms(state, job) <= now_ms


def end_text(end: End, now_ms: int) -> str:
    """For instance "ends in 40m (Slurm time limit)"."""
    why = f" ({end.why})" if end.why else ""
    left = end.at_ms - now_ms
    return f"ends in {duration_text(left)}{why}" if left > 0 else f"ends now{why}"
