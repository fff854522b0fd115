"""Who uses nothing is told of, by real processes and by what a GPU's driver says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest
from harness.waiting import until

from shoal.agent import beats as idle
from shoal.agent.beats import IdleWatch, session_cpu_s
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.report import Began
from shoal.model.series import GpuSample, NodeSample

REF = MemberRef("j1", 1, 0)
BUSY = "while True: pass"
RESTS = "import time; time.sleep(600)"


class Members:
    def __init__(self, pid: int) -> None:
        self.found: int | None = pid

    def leader(self, ref: MemberRef) -> int | None:
        return self.found


class Beats:
    steps = 0

    def step(self, ref: MemberRef) -> int:
        return self.steps


def watching(pid: int, monkeypatch: pytest.MonkeyPatch) -> tuple[IdleWatch, Members, Beats]:
    monkeypatch.setattr(idle, "LOOK_S", 0.2)
    monkeypatch.setattr(idle, "TOLD_S", 1.5)
    members, beats = Members(pid), Beats()
    made = IdleWatch(cast(Any, members), cast(Any, beats), lambda _: True)
    made.expect(launch(REF))
    return made, members, beats


def launch(ref: MemberRef) -> Launch:
    """On GPU 1."""
    return Launch(
        node="n1",
        incarnation=1,
        ref=ref,
        argv=("x",),
        env={},
        workdir="",
        stop_grace_ms=0,
        gpus=(1,),
    )


@pytest.mark.parametrize("script", [BUSY, RESTS])
def test_processor_time_tells_where_no_driver_does(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        made, members, beats = watching(process.pid, monkeypatch)
        if script == BUSY:
            begun = session_cpu_s().get(process.pid, 0.0)
            told = []
            until(
                lambda: (
                    told.append(made.idle(None))  # type: ignore[func-returns-value]
                    or session_cpu_s()[process.pid] > begun + 1
                )
            )
            assert not any(told)
            return
        until(lambda: bool(made.idle(None)))
        assert made.idle(None)[0].ref == REF
        beats.steps = 7  # its beats say that it works
        until(lambda: not made.idle(None))
        members.found = None  # it is over
        until(lambda: made.idle(None) == () and not made._gpus)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("busy_milli", "used"), [(0, False), (3, True)])
def test_what_the_driver_says_of_its_gpus_counts_more(
    busy_milli: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = watching(1, monkeypatch)
    other, own = GpuSample(busy_milli=900), GpuSample(busy_milli=busy_milli)
    made.idle(NodeSample(at_ms=1, gpus=(other, own)))
    assert made._uses(REF, 5.0, made._looked + 5) is used  # all of a core was used meanwhile


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr("shoal.agent.beats.time.monotonic", lambda: self.now)


def sample(busy_milli: int | None) -> NodeSample:
    return NodeSample(at_ms=1, gpus=(GpuSample(busy_milli=900), GpuSample(busy_milli=busy_milli)))


@pytest.mark.parametrize("how", ["gpu", "steps", "output", "shared", "greeting"])
def test_the_end_of_a_start_up_is_learned_by_what_can_be_seen(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 s of imports, in which its GPU shows nothing."""
    clock, steps, output = Clock(monkeypatch), Beats(), [False]
    watch = IdleWatch(cast(Any, Members(1)), cast(Any, steps), lambda _: not output[0])
    watch.expect(launch(REF))
    watch.starts(REF)
    if how == "shared":  # its neighbor's work is not its own
        watch.expect(launch(MemberRef("j2", 1, 0)))
    busy = 800 if how == "shared" else None if how in ("output", "greeting") else 0
    output[0] = how in ("gpu", "greeting")  # a line proves nothing where the driver tells more
    clock.now += 1
    watch.idle(sample(1_000 if how == "gpu" else busy))  # left over from whoever had it before
    for _ in range(35):
        clock.now += 1
        watch.idle(sample(busy))
    assert watch.began() == ()
    output[0], steps.steps = how in ("gpu", "output", "shared"), int(how == "steps")
    watch.idle(sample(700 if how == "gpu" else busy))
    by = "output" if how == "shared" else how
    assert watch.began() == (() if how == "greeting" else (Began(REF, 36_000, by),))
    watch.rests(REF)  # it sleeps, and wakes
    watch.expect(launch(REF))
    watch.idle(sample(700))
    assert len(watch.began()) == (how != "greeting"), "one that wakes does not start"
