"""One job's curves, from its members' beats, over all its attempts, in bounded size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from shoal.control.history.curve import Curve, Kept, Merge, Shape, Value, short
from shoal.model.progress import METRICS_MAX, Beat
from shoal.model.series import JobPoint, JobSeries, MemberSeries, MetricSeries
from shoal.model.trials import LOSS, Extent

POINTS_MAX = 512
METRIC_POINTS_MAX = 256
# The points of all members of an attempt together, and of each: enough for a strip on a page.
MEMBER_POINTS_MAX = 16_384
POINTS_OF_MEMBER_MAX = 128
POINTS_OF_MEMBER_MIN = 16
ATTEMPTS_KEPT = 8
ALL_POINTS_MAX = 4 * MEMBER_POINTS_MAX  # the newest attempts; always the last of them
# This many members show how long a step takes; more would show the same.
MEMBERS_ASKED_MAX = 16

JOB_SHAPE = Shape((Merge.LAST, Merge.MEAN, Merge.MEAN), "d")  # step, loss, step_ms
METRIC_SHAPE = Shape((Merge.MEAN,), "f")
FIELDS = 4  # of a member: step_ms, and the shares of waiting, data and saving

Beats = Mapping[int, Beat]


class JobSample(msgspec.Struct, frozen=True, tag="j", array_like=True):
    """One look at a job. `members` is flat, FIELDS values for each, or empty."""

    job: str
    at_ms: int
    attempt: int
    nodes: tuple[str, ...]
    step: int
    loss: float | None
    step_ms: float | None
    metrics: dict[str, float]
    members: list[float | None]


class KeptAttempt(msgspec.Struct, frozen=True):
    attempt: int
    nodes: tuple[str, ...]
    sheet: Kept


class KeptJob(msgspec.Struct, frozen=True):
    curve: Kept
    metrics: dict[str, Kept]
    attempts: list[KeptAttempt]
    extents: dict[str, Extent] = {}  # of a trial: curves of long runs only have means


class Attempt:
    """The members of one attempt side by side: a row has the values of all of them."""

    def __init__(self, number: int, nodes: Sequence[str], kept: Kept | None = None) -> None:
        self.number = number
        self.nodes = tuple(nodes)
        most = MEMBER_POINTS_MAX // max(1, len(self.nodes))
        self.most = max(POINTS_OF_MEMBER_MIN, min(POINTS_OF_MEMBER_MAX, most))
        self.sheet = Curve(Shape([Merge.MEAN] * (FIELDS * len(self.nodes)), "f"), self.most, kept)

    def series(self, since_ms: int) -> list[MemberSeries]:
        rows = [row for row in self.sheet.rows() if row[0] > since_ms]
        at_ms = [at for at, _ in rows]
        return [
            MemberSeries(
                attempt=self.number,
                member=member,
                node=node,
                at_ms=at_ms,
                step_ms=_column(rows, FIELDS * member),
                wait_share=_column(rows, FIELDS * member + 1),
                data_share=_column(rows, FIELDS * member + 2),
                save_share=_column(rows, FIELDS * member + 3),
            )
            for member, node in enumerate(self.nodes)
        ]


class JobHistory:
    def __init__(self, job: str, body: bytes | None = None) -> None:
        kept = msgspec.msgpack.decode(body, type=KeptJob) if body is not None else None
        self.job = job
        self.changed = False
        self._curve = Curve(JOB_SHAPE, POINTS_MAX, kept.curve if kept else None)
        self._metrics = {
            name: Curve(METRIC_SHAPE, METRIC_POINTS_MAX, one)
            for name, one in (kept.metrics if kept else {}).items()
        }
        self._attempts = [
            Attempt(one.attempt, one.nodes, one.sheet) for one in (kept.attempts if kept else [])
        ]
        self._extents = kept.extents if kept else {}
        self._told: Beats = {}  # the beats at the last point of the curve
        self._members_told: Beats = {}  # ... of the sheet
        self._attempt = 0
        self._nodes: tuple[str, ...] = ()
        self._naps = 0
        self._napped = False  # the next step that it reports is one in which it slept

    def nodes(self, attempt: int) -> tuple[str, ...]:
        """Of the attempt that was looked at last."""
        return self._nodes if attempt == self._attempt else ()

    def due(self, now_ms: int) -> bool:
        return self._curve.due(now_ms)

    def sample(
        self, attempt: int, nodes: Sequence[str], beats: Beats, now_ms: int, naps: int = 0
    ) -> JobSample | None:
        """What the beats say since the last look; None if no step was made since, or if it slept
        in that step: the curve has a gap there."""
        if attempt != self._attempt:
            self._attempt, self._nodes = attempt, tuple(nodes)
            # An attempt that an earlier controller looked at goes on from here.
            old = any(one.number == attempt and len(one.sheet) for one in self._attempts)
            self._told = self._members_told = dict(beats) if old else {}
            self._naps, self._napped = naps, False
        if naps != self._naps:
            self._naps, self._napped = naps, True
        asked = {n: beats[n] for n in sorted(beats)[:MEMBERS_ASKED_MAX]}
        paces = [
            pace
            for number, beat in asked.items()
            if (pace := shares(self._told.get(number), beat)[0]) is not None
        ]
        if not paces:
            return None
        if self._napped:
            self._told, self._members_told, self._napped = dict(asked), dict(beats), False
            return None
        sheet = self._sheet(attempt, nodes).sheet
        members: list[Value] = []
        if sheet.due(now_ms):
            for number in range(len(nodes)):
                beat = beats.get(number)
                before = self._members_told.get(number)
                members += [None] * FIELDS if beat is None else shares(before, beat)
            self._members_told = dict(beats)
        self._told = dict(asked)
        first = asked[next(iter(asked))]
        return JobSample(
            job=self.job,
            at_ms=now_ms,
            attempt=attempt,
            nodes=tuple(nodes) if members else (),
            step=max(beat.step for beat in asked.values()),
            loss=next((beat.loss for beat in asked.values() if beat.loss is not None), None),
            step_ms=sorted(paces)[len(paces) // 2],
            metrics=dict(first.metrics),
            members=members,
        )

    def take(self, sample: JobSample) -> None:
        """From a look just now, or from the tail of the file."""
        if sample.at_ms <= self._curve.last_ms:
            return
        self.changed = True
        self._curve.add(sample.at_ms, (sample.step, sample.loss, sample.step_ms))
        for name, value in sample.metrics.items():
            curve = self._metrics.get(name)
            if curve is None and len(self._metrics) < METRICS_MAX:
                curve = self._metrics[name] = Curve(METRIC_SHAPE, METRIC_POINTS_MAX)
            if curve is not None and curve.due(sample.at_ms):
                curve.add(sample.at_ms, (value,))
        if "." in self.job:
            self._extend(sample.step, sample.loss, sample.metrics)
        if sample.members:
            self._sheet(sample.attempt, sample.nodes).sheet.add(sample.at_ms, sample.members)

    def cut(self, latest_ms: int) -> None:
        sheets = [attempt.sheet for attempt in self._attempts]
        for curve in (self._curve, *self._metrics.values(), *sheets):
            curve.cut(latest_ms)

    def series(self, since_ms: int = 0, *, members: bool = True) -> JobSeries:
        points = [
            JobPoint(at_ms=at, step=int(step or 0), loss=loss, step_ms=step_ms)
            for at, (step, loss, step_ms) in self._curve.rows()
        ]
        metrics = []
        for name, curve in self._metrics.items():
            rows = [row for row in curve.rows() if row[0] > since_ms]
            at_ms = [at for at, _ in rows]
            steps = steps_at(points, at_ms)
            metrics.append(
                MetricSeries(name=name, at_ms=at_ms, values=_column(rows, 0), steps=steps)
            )
        attempts = self._attempts if members else []
        return JobSeries(
            id=self.job,
            width_ms=self._curve.width_ms,
            points=[point for point in points if point.at_ms > since_ms],
            metrics=metrics,
            members=[one for attempt in attempts for one in attempt.series(since_ms)],
        )

    def extents(self) -> dict[str, Extent]:
        """Of each metric that it reports; from its curves, if an earlier version kept only them."""
        if not self._extents:
            series = self.series(members=False)
            for point in series.points:
                self._extend(point.step, point.loss, {})
            for metric in series.metrics:
                for step, value in zip(metric.steps, metric.values, strict=True):
                    self._extend(step, None, {} if value is None else {metric.name: value})
        return self._extents

    def _extend(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        for name, value in (({} if loss is None else {LOSS: loss}) | dict(metrics)).items():
            self._extents.setdefault(name, Extent()).take(value, step)

    def body(self) -> bytes:
        attempts = [KeptAttempt(one.number, one.nodes, one.sheet.kept()) for one in self._attempts]
        metrics = {name: curve.kept() for name, curve in self._metrics.items()}
        return msgspec.msgpack.encode(KeptJob(self._curve.kept(), metrics, attempts, self._extents))

    def _sheet(self, attempt: int, nodes: Sequence[str]) -> Attempt:
        last = self._attempts[-1] if self._attempts else None
        if last is None or last.number != attempt or len(last.nodes) != len(nodes):
            last = Attempt(attempt, nodes)
            kept = [one for one in self._attempts if one.number != attempt]
            self._attempts = [*kept, last][-ATTEMPTS_KEPT:]
            while len(self._attempts) > 1 and self._room() > ALL_POINTS_MAX:
                del self._attempts[0]
        return last

    def _room(self) -> int:
        """Points that the members of all attempts may come to have."""
        return sum(len(one.nodes) * one.most for one in self._attempts)


def shares(before: Beat | None, beat: Beat) -> list[Value]:
    """Since the last beat: the time of a step, and the shares of it spent waiting for peers, data
    and saves. A process that has started again is measured from its start."""
    if before is not None and before.steps > beat.steps:
        before = None
    wait_us = beat.wait_us - (before.wait_us if before else 0)
    data_us = beat.data_us - (before.data_us if before else 0)
    save_us = beat.save_us - (before.save_us if before else 0)
    own_us = beat.compute_us - (before.compute_us if before else 0)
    steps = beat.steps - (before.steps if before else 0)
    whole_us = own_us + wait_us + data_us + save_us
    if steps <= 0 or whole_us <= 0:
        return [None] * FIELDS
    return [
        whole_us / steps / 1000,
        *(min(1.0, max(0.0, us / whole_us)) for us in (wait_us, data_us, save_us)),
    ]


def steps_at(points: Sequence[JobPoint], moments: Sequence[int]) -> list[int]:
    """The step at each moment: between two points in proportion. Where steps began again at an
    earlier one, that of the point before."""
    times = [point.at_ms for point in points]
    found = []
    for at_ms in moments:
        after = bisect_left(times, at_ms)
        before = max(0, after - 1)
        if after == len(times):
            found.append(points[before].step if points else 0)
            continue
        first, second = points[before], points[after]
        part = (at_ms - first.at_ms) / max(1, second.at_ms - first.at_ms)
        if second.step < first.step:
            part = 1.0 if at_ms == second.at_ms else 0.0
        found.append(round(first.step + max(0.0, part) * (second.step - first.step)))
    return found


def _column(rows: list[tuple[int, list[Value]]], index: int) -> list[float | None]:
    return [short(values[index]) for _, values in rows]
