"""What is kept of jobs, nodes and services: looked at on a bare loop, in a file and on a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from shoal.control.history.history import History
from shoal.control.history.jobs import (
    ATTEMPTS_KEPT,
    METRIC_POINTS_MAX,
    POINTS_MAX,
    JobHistory,
    shares,
    steps_at,
)
from shoal.control.history.store import HistoryFile
from shoal.control.loop import ControlLoop
from shoal.core.books.hang import Pace
from shoal.core.state.heard import Watch
from shoal.database.sqlite import Place
from shoal.model.job import JobSpec
from shoal.model.progress import Beat
from shoal.model.series import GpuSample, JobPoint, NodeSample
from shoal.model.service import Scale, Service, ServiceLoad, ServiceSpec
from shoal.ports import StoreFull
from tests.database import two_heads

Result = TypeVar("Result")


class Stage:
    """As much of a control loop as a history looks at."""

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.now_ms = 1_000_000
        self.clock = SimpleNamespace(now_ms=lambda: self.now_ms)
        heard = SimpleNamespace(watches={}, loads={}, tours={})
        self.state = SimpleNamespace(heard=heard, jobs={}, nodes={}, services={})
        self.readable = True
        self.samples: dict[str, NodeSample] = {}
        self.newest: dict[str, NodeSample] = {}
        self.history = self.fresh()

    async def settled(self) -> None: ...

    def fresh(self) -> History:
        return History(cast(ControlLoop, self), self.place)

    def job(self, job: str, nodes: list[str], attempt: int = 1) -> Watch:
        members = [SimpleNamespace(slice=SimpleNamespace(node=node)) for node in nodes]
        self.state.jobs[job] = SimpleNamespace(attempt=attempt, members=members, naps=0)
        watch = Watch(attempt=attempt, pace=Pace(began_ms=self.now_ms))
        self.state.heard.watches[job] = watch
        return watch

    def pass_second(self, seconds: int = 1) -> None:
        self.now_ms += 1000 * seconds
        self.history.look()


@pytest.fixture(params=two_heads.KINDS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    with two_heads.place(request, tmp_path) as place:
        yield Stage(place)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def train(stage: Stage, watch: Watch, seconds: int, slow: int = -1) -> None:
    """Ten steps a second; the slow member computes for all of it, the others wait for it."""
    for _ in range(seconds):
        for member in range(len(watch_nodes(stage))):
            last = watch.beats.get(member, Beat(ref="x"))
            own = 100_000 if member == slow else 40_000
            watch.beats[member] = Beat(
                ref="x",
                step=last.step + 10,
                steps=last.steps + 10,
                compute_us=last.compute_us + 10 * own,
                wait_us=last.wait_us + 10 * (100_000 - own),
                loss=100 / (last.step + 10),
                metrics={"lr": 0.1},
            )
        stage.pass_second()


def watch_nodes(stage: Stage) -> list[Any]:
    return cast(list[Any], stage.state.jobs["j1"].members)


def test_a_jobs_curve_tells_steps_loss_and_who_holds_the_others_up(stage: Stage) -> None:
    watch = stage.job("j1", ["n1", "n2"])
    train(stage, watch, 5, slow=1)
    series = run(stage.history.job("j1"))
    assert [point.step for point in series.points] == [10, 20, 30, 40, 50]
    assert [point.loss for point in series.points] == [10, 5, 100 / 30, 2.5, 2]
    assert {point.step_ms for point in series.points} == {100.0}
    first, second = series.members
    assert (first.node, second.node, second.member) == ("n1", "n2", 1)
    assert first.wait_share == pytest.approx([0.6] * 5) and second.wait_share == [0.0] * 5
    assert series.metrics[0].name == "lr"
    assert series.metrics[0].values == pytest.approx([0.1] * 5)
    assert series.metrics[0].steps == [10, 20, 30, 40, 50]
    assert not run(stage.history.job("j1", members=False)).members
    later = run(stage.history.job("j1", since_ms=series.points[2].at_ms))
    assert later.points == series.points[3:]
    assert later.metrics[0].steps == [40, 50]


def test_a_metrics_steps_lie_between_those_of_the_curve_and_never_between_two_attempts() -> None:
    def point(at_ms: int, step: int) -> JobPoint:
        return JobPoint(at_ms=at_ms, step=step, loss=None, step_ms=None)

    curve = [point(1000, 10), point(3000, 30), point(5000, 12), point(7000, 32)]
    moments = [500, 1000, 2000, 3000, 4000, 5000, 6500, 7000, 9000]
    assert steps_at(curve, moments) == [10, 10, 20, 30, 30, 12, 27, 32, 32]
    assert steps_at([], [500]) == [0]


def test_a_very_long_run_stays_small(stage: Stage) -> None:
    watch = stage.job("j1", ["n1", "n2"])
    train(stage, watch, 5000)
    series = run(stage.history.job("j1"))
    assert POINTS_MAX // 2 - 1 <= len(series.points) <= POINTS_MAX
    assert series.points[-1].step > 49_000
    assert series.width_ms == 16_000
    assert {round(point.step_ms or 0, 6) for point in series.points} == {100.0}
    assert len(series.members[0].at_ms) <= 128
    (metric,) = series.metrics
    assert len(metric.steps) == len(metric.at_ms) == len(metric.values) <= METRIC_POINTS_MAX
    began_ms = series.points[0].at_ms - series.points[0].step * 100  # ten steps a second
    for at_ms, step in zip(metric.at_ms, metric.steps, strict=True):
        assert abs(step * 100 - (at_ms - began_ms)) <= 2000


def test_the_last_words_of_an_attempt_are_kept_and_every_attempt_has_its_strip(
    stage: Stage,
) -> None:
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        watch = stage.job("j1", ["n1"], attempt)
        train(stage, watch, 2)
        watch.beats[0] = Beat(ref="x", step=999, steps=30, compute_us=3_000_000)
        del stage.state.heard.watches["j1"]  # over, before it was looked at again
        stage.pass_second()
    series = run(stage.history.job("j1"))
    assert series.points[-1].step == 999
    assert [one.attempt for one in series.members] == list(range(4, ATTEMPTS_KEPT + 4))


def test_a_killed_controller_loses_seconds_and_the_next_goes_on(stage: Stage) -> None:
    watch = stage.job("j1", ["n1"])
    stage.state.nodes["n1"] = None
    train(stage, watch, 30)
    stage.samples["n1"] = NodeSample(at_ms=1, cpu_milli=250, gpus=(GpuSample(power_w=300),))
    stage.pass_second()
    run(stage.history.flush())
    run(stage.history.write_whole())
    train(stage, watch, 20)
    run(stage.history.flush())
    train(stage, watch, 2)  # never handed over
    again = stage.fresh()
    run(again.restore())
    stage.history = again
    assert [p.step for p in run(again.job("j1")).points] == list(range(10, 510, 10))
    assert again.node("n1").gpus[0].power_w == [300.0]
    assert again.node("n1").cpu == [0.25]
    train(stage, watch, 3)
    assert run(again.job("j1")).points[-1].step == 550
    assert {p.step_ms for p in run(again.job("j1")).points} == {100.0}


def test_a_finished_jobs_curve_stays_and_leaves_memory(stage: Stage) -> None:
    watch = stage.job("j1", ["n1"])
    train(stage, watch, 10)
    del stage.state.heard.watches["j1"], stage.state.jobs["j1"]
    stage.pass_second()
    run(stage.history.flush())
    assert not stage.history._jobs
    run(stage.history.write_whole())
    again = stage.fresh()
    run(again.restore())
    assert len(run(again.job("j1")).points) == 10
    assert run(again.extents(["j1", "j2"])).keys() == {"j1", "j2"}
    assert not again._jobs


def test_services_are_kept_and_those_that_are_gone_leave(stage: Stage) -> None:
    spec = ServiceSpec(name="chat", replica=JobSpec(command=("serve",)), scale=Scale(most=4))
    stage.state.services["chat"] = Service(spec=spec, wanted=2, ready={"j7": 0})
    for second in range(6):
        stage.state.heard.loads["chat"] = ServiceLoad(
            service="chat", answers_per_ks=1000 * second, p99_ms=30, in_flight=3, queued=1, held=1
        )
        stage.pass_second()
    series = stage.history.service("chat")
    assert series.requests_per_s == [0, 2, 4]
    assert series.p99_ms == [None, 30, 30]
    assert (series.queued[-1], series.ready[-1], series.wanted[-1]) == (2, 1, 2)
    run(stage.history.write_whole())
    stage.state.services, stage.state.heard.loads = {}, {}
    run(stage.history.write_whole())
    again = stage.fresh()
    run(again.restore())
    assert not again.service("chat").at_ms


def test_a_node_whose_gpus_change_begins_anew(stage: Stage) -> None:
    for gpus in (2, 2, 1):
        stage.samples["n1"] = NodeSample(at_ms=1, gpus=(GpuSample(busy_milli=500),) * gpus)
        stage.pass_second(2)
    series = stage.history.node("n1")
    assert len(series.at_ms) == 1 and len(series.gpus) == 1
    assert series.gpus[0].busy == [0.5] and series.gpus[0].temperature_c == [None]


def test_the_oldest_ended_jobs_make_room(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "h.db", bytes_max=400_000)
    chance = random.Random(1)
    file.write(b"", [(f"j/j{n}", n, chance.randbytes(600)) for n in range(2000)])
    file.write(b"", [("n/n1", None, b"living")])
    assert file.size_bytes > 1_000_000
    file.trim()
    assert file.size_bytes <= 400_000
    assert file.read("j/j0") is None
    assert file.read("j/j1999") is not None
    assert file.read("n/n1") == b"living"


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b""])
def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "h.db"
    path.write_bytes(content)
    file = HistoryFile(path)
    file.write(b"tail", [("j/j1", 1, b"body")])
    assert (file.read("j/j1"), file.tail()) == (b"body", [b"tail"])
    assert (tmp_path / "h.db.damaged").exists() == bool(content)


def test_a_series_of_another_version_begins_anew(stage: Stage) -> None:
    stage.history.file.write(b"\x81nonsense", [("j/j1", None, b"\x00"), ("n/n1", None, b"x")])
    again = stage.fresh()
    run(again.restore())
    assert run(again.job("j1")).points == []
    assert again.node("n1").at_ms == []


def test_a_disk_that_is_full_costs_samples_and_nothing_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("database or disk is full")

    watch = stage.job("j1", ["n1"])
    monkeypatch.setattr(stage.history.file, "write", full)
    for _ in range(3):
        train(stage, watch, 2)
        run(stage.history.flush())
    assert [r.message for r in caplog.records] == [
        "samples cannot be kept: database or disk is full"
    ]
    assert len(run(stage.history.job("j1")).points) == 6


def test_a_process_that_began_anew_is_measured_from_its_beginning() -> None:
    before = Beat(ref="x", steps=100, compute_us=9_000_000)
    beat = Beat(ref="x", steps=10, compute_us=500_000, wait_us=500_000)
    assert shares(before, beat) == [100.0, 0.5, 0.0, 0.0]
    assert shares(beat, beat) == [None] * 4
    assert JobHistory("j1").sample(1, ["n1"], {}, 5) is None


def test_a_job_that_ends_between_a_look_and_a_write_is_looked_at_once_more(stage: Stage) -> None:
    watch = stage.job("j1", ["n1"])
    train(stage, watch, 3)
    watch.beats[0] = Beat(ref="x", step=99, steps=40, compute_us=4_000_000)
    del stage.state.heard.watches["j1"], stage.state.jobs["j1"]
    run(stage.history.flush())
    stage.pass_second()
    run(stage.history.flush())
    assert not stage.history._jobs
    assert [p.step for p in run(stage.history.job("j1")).points] == [10, 20, 30, 99]


def test_a_clock_that_was_far_ahead_does_not_end_the_curves(stage: Stage) -> None:
    watch = stage.job("j1", ["n1"])
    stage.state.nodes["n1"] = None
    train(stage, watch, 3)
    stage.now_ms += 400 * 86_400_000
    train(stage, watch, 2)
    stage.samples["n1"] = NodeSample(at_ms=1, cpu_milli=1)
    stage.pass_second()
    run(stage.history.flush())
    run(stage.history.write_whole())
    stage.now_ms -= 400 * 86_400_000
    stage.history = stage.fresh()
    run(stage.history.restore())
    assert [p.step for p in run(stage.history.job("j1")).points] == [10, 20, 30]
    train(stage, watch, 3)
    assert run(stage.history.job("j1")).points[-1].step == 80
    assert stage.history.node("n1").at_ms == []


def test_a_very_large_gang_that_often_fails_stays_bounded() -> None:
    history = JobHistory("j1")
    members = 3000
    nodes = [f"n{number // 8}" for number in range(members)]
    for attempt in (1, 2):
        for second in range(1, 20):
            beat = Beat(ref="x", step=second, steps=second, compute_us=second * 1000)
            beats = dict.fromkeys(range(members), beat)
            sample = history.sample(attempt, nodes, beats, attempt * 1_000_000 + second * 1000)
            if sample is not None:
                history.take(sample)
    series = history.series()
    assert {one.attempt for one in series.members} == {2}
    assert len(series.members) == members
    assert max(len(one.at_ms) for one in series.members) <= 16
    assert len(history.body()) < 1_500_000


def test_a_step_in_which_a_job_slept_is_not_in_its_curve() -> None:
    history, kept = JobHistory("j1"), []

    def look(second: int, naps: int, beat: Beat) -> None:
        sample = history.sample(1, ["n1"], {0: beat}, second * 1000, naps)
        if sample is not None:
            kept.append((sample.step, sample.step_ms))

    look(1, 0, Beat(ref="", steps=1, step=1, compute_us=500_000))
    look(2, 0, Beat(ref="", steps=2, step=2, compute_us=1_000_000))
    look(3, 1, Beat(ref="", steps=2, step=2, compute_us=1_000_000))  # asleep
    look(500, 1, Beat(ref="", steps=3, step=3, compute_us=498_000_000))
    look(501, 1, Beat(ref="", steps=4, step=4, compute_us=498_500_000))
    assert kept == [(1, 500.0), (2, 500.0), (4, 500.0)]
