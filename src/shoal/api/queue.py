"""`GET /v1/queue`: who waits, in the scheduler's order, why, until when, and what would help."""

from __future__ import annotations

import heapq
from typing import Annotated, Any

import msgspec
from litestar import Controller, get
from litestar.params import Parameter

from shoal.api.present import job_row
from shoal.control.loop import ControlLoop
from shoal.core.advice import advise
from shoal.core.scheduling.order import place_in_line
from shoal.core.scheduling.predict import predict
from shoal.model.job import Job
from shoal.model.views import JobRow

ROWS_MAX = 500
PREDICTED_MAX = 50  # a start that is so far off says little, and costs as much


class QueueRow(JobRow, kw_only=True):
    position: int
    early_ms: int | None  # it will probably start between these two moments
    late_ms: int | None
    help: list[str]  # what would let it start sooner


class QueueView(msgspec.Struct, kw_only=True):
    waiting: int
    now_ms: int
    policy: str
    rows: list[QueueRow]


class Waiting(Controller):
    path = "/v1/queue"

    @get(sync_to_thread=False)
    def listing(
        self, loop: ControlLoop, limit: Annotated[int, Parameter(ge=1, le=ROWS_MAX)] = 100
    ) -> QueueView:
        front = first_in_line(loop, limit)
        return QueueView(
            waiting=loop.state.queue.size,
            now_ms=loop.clock.now_ms(),
            policy=loop.policy.name,
            rows=[_row(loop, job, position) for position, job in enumerate(front, 1)],
        )


def first_in_line(loop: ControlLoop, limit: int) -> list[Job]:
    """Those whom the scheduler tries first; then those whose time is not yet."""
    state, now_ms = loop.state, loop.clock.now_ms()
    # Of jobs that are alike only the first can be among the first.
    numbers = [number for line in state.queue.lanes.values() for _, number in line[:limit]]
    numbers += [number for _, number in heapq.nsmallest(limit, state.queue.delayed)]
    claimed = [state.jobs[job_id] for job_id in state.claims]
    jobs = [*claimed, *(state.job_numbered(number) for number in numbers)]

    def place(job: Job) -> Any:
        return job.not_before_ms > now_ms, place_in_line(state, job, now_ms)

    return heapq.nsmallest(limit, jobs, key=place)


def _row(loop: ControlLoop, job: Job, position: int) -> QueueRow:
    now_ms = loop.clock.now_ms()
    near = position <= PREDICTED_MAX
    expected = predict(loop.state, job, now_ms) if near else None
    return QueueRow(
        **msgspec.structs.asdict(job_row(loop, job)),
        position=position,
        early_ms=expected.early_ms if expected else None,
        late_ms=expected.late_ms if expected else None,
        help=advise(loop.state, job, now_ms) if near else [],
    )
