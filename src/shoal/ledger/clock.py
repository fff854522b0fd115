"""Time in the book: it never goes back, and gaps are noted for the report."""

from __future__ import annotations

import heapq

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.book_state import Gap
from shoal.ledger.free_time import settle_nodes, stands
from shoal.ledger.members import settle, settle_hour
from shoal.ledger.naps import settle_naps
from shoal.ledger.postings import Postings

# After a longer time without a controller, that time is unknown and is not booked.
UNSEEN_MS_MAX = 7 * 24 * HOUR_MS
# Shorter pauses or steps back of the clock are not noted.
NOTED_GAP_MS = 600_000
NOTED_BACK_MS = 1_000
GAPS_KEPT = 100


def advance(postings: Postings, now_ms: int) -> None:
    """Time has passed, and nothing else has changed."""
    cluster = postings.cluster
    if cluster.began_ms < 0:
        cluster.now_ms = cluster.began_ms = now_ms
        return
    if now_ms <= cluster.now_ms:
        _went_back(postings, cluster.now_ms - now_ms)
        return
    cluster.back_ms = 0
    if now_ms - cluster.now_ms > NOTED_GAP_MS:
        _unseen(postings, now_ms)
    while cluster.now_ms < now_ms:
        hour_ms = (cluster.now_ms // HOUR_MS + 1) * HOUR_MS
        due_ms = cluster.delayed[0][0] if cluster.delayed else now_ms
        _pass(postings, min(now_ms, hour_ms, max(due_ms, cluster.now_ms + 1)))
        if cluster.now_ms == hour_ms:
            _close_hour(postings)
        _end_delays(postings)


def _pass(postings: Postings, now_ms: int) -> None:
    passed_ms = now_ms - postings.cluster.now_ms
    for kind in postings.cluster.kinds.values():
        if kind.wanted:
            kind.wanted_ms += passed_ms
    postings.cluster.now_ms = now_ms


def _went_back(postings: Postings, back_ms: int) -> None:
    """Time stands still in the book until the clock has caught up: nothing counts twice."""
    cluster = postings.cluster
    if back_ms >= NOTED_BACK_MS and not cluster.back_ms:
        _note(postings, Gap(cluster.now_ms, -back_ms, booked=False))
        cluster.back_ms = back_ms


def _unseen(postings: Postings, now_ms: int) -> None:
    cluster = postings.cluster
    gap_ms = now_ms - cluster.now_ms
    booked = gap_ms <= UNSEEN_MS_MAX
    _note(postings, Gap(cluster.now_ms, gap_ms, booked=booked))
    if booked:
        return
    settle_nodes(postings)
    settle_naps(postings)
    for node in cluster.nodes.values():
        node.mark_ms = now_ms
    for job_id, job in cluster.jobs.items():
        for member in job.members.values():
            settle(postings, job_id, job, member, cluster.now_ms)
            member.mark_ms = now_ms
        job.asleep_ms = now_ms if job.asleep_ms >= 0 else -1
    cluster.now_ms = now_ms


def _note(postings: Postings, gap: Gap) -> None:
    postings.cluster.gaps = [*postings.cluster.gaps, gap][-GAPS_KEPT:]


def _end_delays(postings: Postings) -> None:
    cluster = postings.cluster
    while cluster.delayed and cluster.delayed[0][0] <= cluster.now_ms:
        due_ms, job_id = heapq.heappop(cluster.delayed)
        job = cluster.jobs.get(job_id)
        if job is not None and job.waiting and job.not_before_ms == due_ms and not job.claimed:
            stands(cluster, job)


def _close_hour(postings: Postings) -> None:
    settle_nodes(postings)
    settle_naps(postings)
    for job_id, job in postings.cluster.jobs.items():
        if job.members:
            settle_hour(postings, job_id, job)
