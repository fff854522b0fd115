"""When a waiting job will probably start, with a range: from what runs and what is ahead of it."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.queue import gang_of
from shoal.core.scheduling.again import spares_kept_from
from shoal.core.scheduling.backfill import SAFE, TYPICAL, first_opening
from shoal.core.scheduling.expect import run_ms
from shoal.core.scheduling.order import gpus_of, place_in_line
from shoal.core.state import State
from shoal.model.job import Job, Phase

AHEAD_MAX = 1000  # who is further back than this gets the range of the one who is not


class Prediction(NamedTuple):
    """Probably between these two moments."""

    early_ms: int
    late_ms: int


def predict(state: State, job: Job, now_ms: int) -> Prediction | None:
    """None if it is not known how long the jobs run that it waits for."""
    if job.phase is not Phase.WAITING:
        return None
    gang = gang_of(job)
    spares = spares_kept_from(state, job)
    early = first_opening(state, gang, now_ms, TYPICAL, spares)
    late = first_opening(state, gang, now_ms, SAFE, spares)
    if early is None or late is None:
        return None
    early_ms = max(early.start_ms, job.not_before_ms)
    held = state.reservations.get(job.id)
    if held is not None and held.start_ms is not None:
        early_ms = max(early_ms, min(held.start_ms, late.start_ms))
    ahead_ms = _work_ahead_ms(state, job, now_ms)
    return Prediction(early_ms, max(early_ms, late.start_ms + ahead_ms))


def _work_ahead_ms(state: State, job: Job, now_ms: int) -> int:
    """How long the whole cluster would be busy with the jobs ahead, of which the time is known."""
    gpus = sum(kind.gpus * count for kind, count in state.open_capacity.items())
    mine = place_in_line(state, job, now_ms)
    work = counted = 0
    for line in state.queue.lanes.values():
        for _, number in line:
            other = state.job_numbered(number)
            if counted >= AHEAD_MAX or place_in_line(state, other, now_ms) >= mine:
                break
            counted += 1
            work += gpus_of(other) * (run_ms(state, other, TYPICAL) or 0)
    return work // gpus if gpus else 0
