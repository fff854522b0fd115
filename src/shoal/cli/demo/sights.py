"""What the demo shows of its training run and its service: looked at while they work."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from shoal.model.events import Event, JobCheckpointed, JobPlaced

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.views import JobView

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
