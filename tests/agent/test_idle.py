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
    made = IdleWatch(cast(Any, members), cast(Any, beats))
    made.expect(
        Launch(
            node="n1",
            incarnation=1,
            ref=REF,
            argv=("x",),
            env={},
            workdir="",
            stop_grace_ms=0,
            gpus=(1,),
        )
    )
    return made, members, beats


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
