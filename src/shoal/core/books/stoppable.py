"""Running jobs that may be stopped for others, the least entitled last, kept from step to step."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from shoal.model.job import Job, Phase

Entitlement = tuple[float, ...]
# For a job that may be stopped now: its entitlement, and when that changes as it runs on.
Judge = Callable[[Job], tuple[Entitlement, int | None]]
# Learning changes ranks, too: after this time a job is ranked again in any case.
RENEW_MS = 1_800_000


class Stoppable:
    """Ranking every running job in each step would cost in proportion to the cluster. A job is
    ranked when it has run for long enough, and again when its rank is due to change; the caller
    ranks it once more before stopping it."""

    def __init__(self) -> None:
        self._line: list[tuple[Entitlement, int, str]] = []  # (entitlement, number, job)
        self._place: dict[str, tuple[Entitlement, int, str]] = {}
        self._due: list[tuple[int, str, int]] = []  # heap of (when to rank it, job, attempt)
        self._watched: dict[str, int] = {}  # the same by job: an entry that differs is old
        self._turns: list[tuple[int, str]] = []  # heap of (when its rank changes, job)
        self._turn: dict[str, int] = {}  # the same by job

    def watch(self, job: Job, at_ms: int) -> None:
        """It runs; rank it at this time."""
        self._watched[job.id] = at_ms
        heapq.heappush(self._due, (at_ms, job.id, job.attempt))

    def joins(self, job: Job, run_ms_min: int, awake_ms_min: int = 0) -> None:
        """If it runs, it may be stopped once it has run for this long, and has been awake for as
        long as this since it last slept."""
        if job.phase is not Phase.RUNNING or not job.spec.yields or job.running_ms is None:
            return
        at_ms = may_stop_ms(job, job.running_ms, run_ms_min, awake_ms_min)
        self.watch(job, at_ms)
        self._turn[job.id] = at_ms
        heapq.heappush(self._turns, (at_ms, job.id))

    def holds(self, job_id: str) -> bool:
        return job_id in self._place

    def drop(self, job_id: str) -> None:
        self._turn.pop(job_id, None)
        self._watched.pop(job_id, None)
        self._take_out(job_id)

    def catch_up(self, now_ms: int, jobs: Mapping[str, Job], judge: Judge) -> int | None:
        """Rank the jobs that are due; returns when a rank changes next or a job may be stopped."""
        while self._due and self._due[0][0] <= now_ms:
            at_ms, job_id, attempt = heapq.heappop(self._due)
            job = jobs.get(job_id)
            if self._watched.get(job_id) != at_ms:
                continue
            if job is not None and job.attempt == attempt and job.phase is Phase.RUNNING:
                self.rank(job, judge)
                turn_ms = self._turn.get(job_id, now_ms)
                renew_ms = now_ms + RENEW_MS
                self.watch(job, min(turn_ms, renew_ms) if turn_ms > now_ms else renew_ms)
        if len(self._due) > 2 * len(jobs) + 64:  # most belong to jobs long gone
            self._due = [
                entry
                for entry in self._due
                if _lives(entry, jobs) and self._watched.get(entry[1]) == entry[0]
            ]
            heapq.heapify(self._due)
        while self._turns and (
            self._turns[0][0] <= now_ms or self._turn.get(self._turns[0][1]) != self._turns[0][0]
        ):
            heapq.heappop(self._turns)
        return self._turns[0][0] if self._turns else None

    def rank(self, job: Job, judge: Judge) -> None:
        entitlement, turn_ms = judge(job)
        self._take_out(job.id)
        place = self._place[job.id] = (entitlement, job.number, job.id)
        insort(self._line, place)
        if turn_ms is not None and self._turn.get(job.id) != turn_ms:
            self._turn[job.id] = turn_ms
            heapq.heappush(self._turns, (turn_ms, job.id))

    def any_beyond(self, entitlement: Entitlement) -> bool:
        return bool(self._line) and self._line[-1][0] > entitlement

    def beyond(self, entitlement: Entitlement) -> Iterator[str]:
        """Jobs that were less entitled than this when last ranked: the least entitled first, and
        the youngest first among equals."""
        for theirs, _, job_id in reversed(self._line):
            if theirs <= entitlement:
                return
            yield job_id

    def _take_out(self, job_id: str) -> None:
        place = self._place.pop(job_id, None)
        if place is not None:
            del self._line[bisect_left(self._line, place)]


def may_stop_ms(job: Job, running_ms: int, run_ms_min: int, awake_ms_min: int) -> int:
    """When a job that runs since `running_ms` may be stopped for others."""
    at_ms = running_ms + run_ms_min
    if job.naps and job.awake_ms is not None:
        at_ms = max(at_ms, job.awake_ms + min(run_ms_min, awake_ms_min))
    return at_ms


def _lives(entry: tuple[int, str, int], jobs: Mapping[str, Job]) -> bool:
    job = jobs.get(entry[1])
    return job is not None and job.attempt == entry[2]
