"""Sleep at the terminal: dev environments that were asleep, and jobs that refuse to."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.dev import server
from shoal.cli.verbs import cancel
from shoal.forms.failure import Failure

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


class Program:
    """It runs on, and each wait for it takes as long as it may; the third takes an hour."""

    pid = 0

    def __init__(self, clock: Clock) -> None:
        self.clock, self.waits = clock, 0

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.clock.now += HOUR_S if self.waits == 3 else seconds
        raise subprocess.TimeoutExpired("it", seconds)


class Unused:
    def used(self, _: int) -> float:
        return 0.0


def test_time_asleep_does_not_count_as_idle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    ended: list[Any] = []
    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(server, "end", ended.append)
    program: Any = Program(clock)
    assert not server.used_until_end(Unused(), program, 600.0, str(tmp_path), None)
    assert ended == [program]
    assert clock.now - 1e9 > HOUR_S + 600.0


@pytest.mark.parametrize(("state", "why"), [("waking", "{}"), ("running", "goes on: {}")])
def test_a_job_that_refuses_to_sleep_is_not_said_to_wake(state: str, why: str) -> None:
    reason = "n1: the driver refuses"
    views = iter([("dozing", "put to sleep by ann"), (state, why.format(reason))])

    def again(_: Any) -> Any:
        state, why = next(views)
        return SimpleNamespace(state=state, why=why, finished_ms=None)

    with pytest.raises(Failure, match=f"^j1 was not suspended and keeps running: {reason}$"):
        cancel._wait(again, "j1", "sleep", quiet=True)  # type: ignore[arg-type]
