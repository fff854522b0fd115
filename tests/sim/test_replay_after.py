"""A history with jobs that waited for others, and for a time, under another policy."""

from __future__ import annotations

from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeJoined
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRunning
from shoal.model.job import JobSpec, Outcome
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import replay
from shoal.sim.replay.traces import Gangs

NODE = NodeSpec(id="n1", gpus=4, cpu_milli=8_000, memory_mb=1_000)
START_MS = 1_794_884_400_000


def lived(job: str, at_ms: int, from_ms: int, to_ms: int, **fields: object) -> list[Event]:
    spec = JobSpec(command=("work",), gpus=1, **fields)  # type: ignore[arg-type]
    on = Slice(node="n1", gpus=(0,), cpu_milli=1000, memory_mb=0)
    at_ms, from_ms, to_ms = START_MS + at_ms, START_MS + from_ms, START_MS + to_ms
    return [
        JobSubmitted(at_ms=at_ms, job=job, spec=spec),
        JobPlaced(at_ms=from_ms, job=job, attempt=1, slices=(on,), master="", why=""),
        JobRunning(at_ms=from_ms, job=job, attempt=1),
        JobFinished(at_ms=to_ms, job=job, attempt=1, outcome=Outcome.SUCCEEDED, code=0, why="done"),
    ]


def test_dependencies_and_times_are_kept_under_another_policy() -> None:
    events = [
        NodeJoined(at_ms=START_MS, node="n1", spec=NODE, incarnation=1),
        # The first job of the workflow waits for the second.
        *lived("j1", 0, 60_000, 70_000, after=("j2",), workflow="j1", schedule="nightly"),
        *lived("j2", 0, 0, 60_000, workflow="j1", schedule="nightly", scheduled_ms=START_MS),
        *lived("j3", 0, 90_000, 95_000, begin_ms=START_MS + 90_000),
        *lived("j4", 65_000, 65_000, 99_000, after=("j2:any", "j77:ok")),
    ]
    events.sort(key=lambda event: event.at_ms)
    log = [Recorded(seq, event) for seq, event in enumerate(events, 1)]
    history = read_history(lambda after, limit: log[after : after + limit], "log")
    trace = history.trace(Gangs(4))
    outcome = replay(trace, [NODE], Policy(), check_every=1)
    records = outcome.records
    by_job = {
        arrival.job: (placed, finished)
        for arrival in trace.arrivals
        for row, placed, finished in zip(
            records.row, records.placed_ms, records.finished_ms, strict=True
        )
        if row == arrival.row
    }
    assert by_job["j1"][0] >= by_job["j2"][1] >= 60_000
    assert by_job["j3"][0] >= 90_000
    assert by_job["j4"][0] >= 65_000
