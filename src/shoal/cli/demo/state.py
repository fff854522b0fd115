"""What the demo knows of its cluster from the events, and what it sees of its jobs at work."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined, NodeLost, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    MemberExited,
    MemberLost,
)
from shoal.model.job import Outcome, StopCause
from shoal.model.resources import Slice

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.views import JobView


class DemoJob(msgspec.Struct):
    name: str
    state: str = "waiting"
    attempt: int = 0
    slices: tuple[Slice, ...] = ()
    outcome: Outcome | None = None
    hit: bool = False  # it lost a member on the killed node
    healed_ms: int | None = None  # when it ran again
    wants_gpus: bool = False
    replica: bool = False  # of a service: it ends with the service


class DemoNode(msgspec.Struct):
    """`cells` holds the job on each GPU, or an empty string."""

    state: str
    place: str
    cells: list[str]


class Kill(msgspec.Struct):
    """A node that was killed, by the demo or by the one who watches it."""

    node: str
    at_ms: int
    noticed_ms: int | None = None
    back_ms: int | None = None


class DemoState(msgspec.Struct):
    nodes: dict[str, DemoNode] = {}
    jobs: dict[str, DemoJob] = {}
    kills: list[Kill] = []
    retried: int = 0  # attempts after a failure

    def kill(self, node: str, now_ms: int) -> None:
        self.kills.append(Kill(node, now_ms))

    def may_kill(self, node: str) -> bool:
        known = self.nodes.get(node)
        return known is not None and known.state == "ready" and not self._open(node)

    def _open(self, node: str) -> list[Kill]:
        return [kill for kill in self.kills if kill.node == node and kill.back_ms is None]

    @property
    def all_back(self) -> bool:
        return all(kill.back_ms is not None for kill in self.kills)

    def take(self, event: Event) -> None:
        match event:
            case NodeJoined():
                cells = [""] * event.spec.gpus
                self.nodes[event.node] = DemoNode("joining", event.spec.place, cells)
            case NodeReady():
                self.nodes[event.node].state = "ready"
                for kill in self._open(event.node):
                    if kill.noticed_ms is not None:
                        kill.back_ms = event.at_ms
            case NodeLost():
                self.nodes[event.node].state = "lost"
                for kill in self._open(event.node):
                    kill.noticed_ms = kill.noticed_ms or event.at_ms
            case JobSubmitted():
                name = event.spec.name or event.job
                replica = bool(event.spec.service)
                wants_gpus = event.spec.gpus > 0
                self.jobs[event.job] = DemoJob(name, wants_gpus=wants_gpus, replica=replica)
            case _:
                self._take_job(event)

    def _take_job(self, event: Event) -> None:
        match event:
            case JobPlaced():
                job = self.jobs[event.job]
                job.state, job.attempt, job.slices = "starting", event.attempt, event.slices
                for slice_ in event.slices:
                    self._fill(slice_, event.job)
            case JobRunning():
                job = self.jobs[event.job]
                job.state = "running"
                if job.hit and job.healed_ms is None:
                    job.healed_ms = event.at_ms
            case MemberExited() | MemberLost():
                self._fill(self.jobs[event.job].slices[event.member], "")
                self.jobs[event.job].hit |= isinstance(event, MemberLost)
            case JobRequeued():
                self.jobs[event.job].hit |= event.cause is StopCause.NODE_LOSS
                self.retried += event.cause is StopCause.FAILURE
                self._leave(event.job, "waiting")
            case JobFinished():
                self.jobs[event.job].outcome = event.outcome
                self._leave(event.job, event.outcome.value)
            case _:
                pass

    @property
    def submitted(self) -> list[DemoJob]:
        return [job for job in self.jobs.values() if not job.replica]

    def counts(self) -> dict[str, int]:
        """How many jobs run, wait and are finished."""
        states = [job.state for job in self.submitted]
        over = sum(job.outcome is not None for job in self.submitted)
        waiting = states.count("waiting")
        return {"running": len(states) - over - waiting, "waiting": waiting, "finished": over}

    def all_finished(self, submitted: int) -> bool:
        return self.counts()["finished"] == submitted

    def victim(self, job_id: str) -> str:
        """The node under this job whose loss hits most others, too; empty: it does not run."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "running":
            return ""
        many = dict.fromkeys(sorted({slice_.node for slice_ in job.slices}), 0)
        for other in self.jobs.values():
            if other.state == "running":
                for node in {slice_.node for slice_ in other.slices} & many.keys():
                    many[node] += 1
        return max(many, key=lambda node: many[node])

    def _leave(self, job_id: str, state: str) -> None:
        job = self.jobs[job_id]
        for slice_ in job.slices:
            self._fill(slice_, "", only=job_id)
        job.state, job.slices = state, ()

    def _fill(self, slice_: Slice, job_id: str, only: str = "") -> None:
        cells = self.nodes[slice_.node].cells
        for gpu in slice_.gpus:
            if not only or cells[gpu] == only:
                cells[gpu] = job_id


# What the demo shows of its training run and its service: looked at while they work.


POINTS_MAX = 4_000
LEVELS = "⡀⠄⠂⠁"  # of one character, from its bottom to its top
TAIL_BYTES = 400
ANSWERS = re.compile(rb"(\d+) answers, (\d+) failures(?:, (\d+) per second)?\n")


class Point(msgspec.Struct, frozen=True):
    at_s: float
    step: int
    loss: float
    attempt: int


class Training(msgspec.Struct):
    """The loss of the training run as it comes in; `resumed`: the step that each later attempt went
    on from."""

    job: str = ""
    steps: int = 0
    saved: int = 0
    points: list[Point] = []
    resumed: dict[int, int] = {}

    def look(self, job: JobView, at_s: float) -> None:
        told = job.progress
        if told is None or told.loss is None or not math.isfinite(told.loss):
            return
        last = self.points[-1] if self.points else None
        if last is not None and (last.step, last.attempt) == (told.step, job.attempt):
            return
        self.steps = told.steps_total
        if len(self.points) < POINTS_MAX:
            self.points.append(Point(at_s, told.step, told.loss, job.attempt))

    def take(self, event: Event) -> None:
        match event:
            case JobCheckpointed() if event.job == self.job:
                self.saved = event.step
            case JobPlaced() if event.job == self.job and event.attempt > 1:
                self.resumed[event.attempt] = self.saved
            case _:
                pass

    @property
    def words(self) -> str:
        if not self.points:
            return "not running yet"
        last = self.points[-1]
        return f"step {last.step} of {self.steps}, loss {last.loss:.2f}"


class Serving(msgspec.Struct):
    """What the clients of the service have counted: requests that were answered and that failed."""

    job: str = ""
    answers: int = 0
    failures: int = 0
    per_s: int = 0
    over: bool = False

    def look(self, tail: bytes) -> None:
        lines = ANSWERS.findall(tail)
        if lines:
            answers, failures, rate = lines[-1]
            self.answers, self.failures = int(answers), int(failures)
            self.over, self.per_s = not rate, int(rate or 0)

    @property
    def words(self) -> str:
        if self.over:
            return f"{self.answers} requests, {self.failures} failed"
        return f"{self.per_s} requests/s, {self.failures} failed" if self.answers else "starting"


class Sights(msgspec.Struct):
    training: Training = msgspec.field(default_factory=Training)
    serving: Serving = msgspec.field(default_factory=Serving)

    def look(self, client: Client, at_s: float) -> None:
        if self.training.job:
            self.training.look(client.job(self.training.job), at_s)
        if self.serving.job:
            self.serving.look(client.logs(self.serving.job, offset=-TAIL_BYTES).data)


def curve(points: list[Point], width: int, height: int, until_s: float) -> list[str]:
    """The loss over time, a row of text for each line of the picture, logarithmic. `|`: where
    another attempt begins."""
    if not points:
        return [" " * width] * height
    begin_s = points[0].at_s
    step_s = max((until_s - begin_s) / max(1, width - 1), 1e-9)
    low, high = (math.log(max(edge(point.loss for point in points), 1e-12)) for edge in (min, max))
    scale = (height * len(LEVELS) - 1) / (high - low) if high > low else 0.0
    rows = [[" "] * width for _ in range(height)]
    attempt = points[0].attempt
    for point in points:
        column = min(width - 1, int((point.at_s - begin_s) / step_s))
        if point.attempt != attempt:
            attempt = point.attempt
            for row in rows:
                row[max(0, column - 1)] = "|"
        level = round((math.log(max(point.loss, 1e-12)) - low) * scale)
        rows[height - 1 - level // len(LEVELS)][column] = LEVELS[level % len(LEVELS)]
    return ["".join(row) for row in rows]
