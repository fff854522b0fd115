"""Time in the book: it never goes back, and what nobody saw is told."""

from __future__ import annotations

import heapq

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.members import settle, settle_hour
from shoal.ledger.mirror import Gap
from shoal.ledger.nodes import settle_nodes, stands
from shoal.ledger.pages import Pages

# Nobody looked for longer than this: what happened meanwhile is not known, and not booked.
UNSEEN_MS_MAX = 7 * 24 * HOUR_MS
# A pause or a step back of the clock shorter than this is not worth telling.
TOLD_GAP_MS = 600_000
TOLD_BACK_MS = 1_000
GAPS_KEPT = 100


def advance(pages: Pages, now_ms: int) -> None:
    """Time has passed, and nothing else has changed meanwhile."""
    mirror = pages.mirror
    if mirror.began_ms < 0:
        mirror.now_ms = mirror.began_ms = now_ms
        return
    if now_ms <= mirror.now_ms:
        _went_back(pages, mirror.now_ms - now_ms)
        return
    mirror.back_ms = 0
    if now_ms - mirror.now_ms > TOLD_GAP_MS:
        _unseen(pages, now_ms)
    while mirror.now_ms < now_ms:
        hour_ms = (mirror.now_ms // HOUR_MS + 1) * HOUR_MS
        due_ms = mirror.delayed[0][0] if mirror.delayed else now_ms
        _pass(pages, min(now_ms, hour_ms, max(due_ms, mirror.now_ms + 1)))
        if mirror.now_ms == hour_ms:
            _close_hour(pages)
        _end_delays(pages)


def _pass(pages: Pages, now_ms: int) -> None:
    passed_ms = now_ms - pages.mirror.now_ms
    for kind in pages.mirror.kinds.values():
        if kind.wanted:
            kind.wanted_ms += passed_ms
    pages.mirror.now_ms = now_ms


def _went_back(pages: Pages, back_ms: int) -> None:
    """Time stands still in the book until the clock has caught up: nothing counts twice."""
    mirror = pages.mirror
    if back_ms >= TOLD_BACK_MS and not mirror.back_ms:
        _note(pages, Gap(mirror.now_ms, -back_ms, booked=False))
        mirror.back_ms = back_ms


def _unseen(pages: Pages, now_ms: int) -> None:
    mirror = pages.mirror
    gap_ms = now_ms - mirror.now_ms
    booked = gap_ms <= UNSEEN_MS_MAX
    _note(pages, Gap(mirror.now_ms, gap_ms, booked=booked))
    if booked:
        return
    settle_nodes(pages)
    for node in mirror.nodes.values():
        node.mark_ms = now_ms
    for job_id, job in mirror.jobs.items():
        for member in job.members.values():
            settle(pages, job_id, job, member, mirror.now_ms)
            member.mark_ms = now_ms
    mirror.now_ms = now_ms


def _note(pages: Pages, gap: Gap) -> None:
    pages.mirror.gaps = [*pages.mirror.gaps, gap][-GAPS_KEPT:]


def _end_delays(pages: Pages) -> None:
    mirror = pages.mirror
    while mirror.delayed and mirror.delayed[0][0] <= mirror.now_ms:
        due_ms, job_id = heapq.heappop(mirror.delayed)
        job = mirror.jobs.get(job_id)
        if job is not None and job.waiting and job.not_before_ms == due_ms and not job.claimed:
            stands(mirror, job)


def _close_hour(pages: Pages) -> None:
    settle_nodes(pages)
    for job_id, job in pages.mirror.jobs.items():
        if job.members:
            settle_hour(pages, job_id, job)
