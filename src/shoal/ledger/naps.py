"""The memo of naps: how long jobs slept, and the GPU time that they lent out by sleeping."""

from __future__ import annotations

from typing import NamedTuple

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.book_state import Job
from shoal.ledger.postings import Postings


class Nap(NamedTuple):
    slept_ms: int = 0
    lent_us: int = 0  # GPU-microseconds

    def plus(self, other: Nap) -> Nap:
        return Nap(self.slept_ms + other.slept_ms, self.lent_us + other.lent_us)


def settle_naps(postings: Postings) -> None:
    for job_id, job in postings.cluster.jobs.items():
        if job.asleep_ms >= 0:
            settle_nap(postings, job_id, job)


def settle_nap(postings: Postings, job_id: str, job: Job) -> None:
    """Note its sleep up to now, before what it lends changes. This never spans two hours, because
    all naps are settled when an hour ends."""
    now_ms, hour = postings.cluster.now_ms, job.asleep_ms // HOUR_MS
    passed_ms, job.asleep_ms = now_ms - job.asleep_ms, now_ms
    lent = sum(member.lent for member in job.members.values())
    if passed_ms and lent:
        naps, key = postings.adds.naps, (hour, job_id)
        slept_ms, lent_us = naps.get(key, (0, 0))
        naps[key] = (slept_ms + passed_ms, lent_us + passed_ms * lent)
