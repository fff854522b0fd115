"""A clock that jumps: time passes as it really does, and the jump is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from shoal.control.clock import Clocks, SystemClock
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ClockJumped
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.core.step import step
from shoal.database.settings import FileSettings
from shoal.ledger.live import LiveLedger
from shoal.model.job import JobSpec
from shoal.model.ledger import By
from shoal.model.policy import Policy
from shoal.model.report import Nothing, Report, Submit
from tests.control.test_loop import BookEngine
from tests.control.test_sqlite_store import history

Result = TypeVar("Result")

DAY_MS = 86_400_000
NOON_MS = 1_800_000_000_000


class HandMachine(Clocks):
    def __init__(self) -> None:
        self.wall, self.passed, self.life = NOON_MS, 50_000, "first"

    def wall_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> int:
        return self.passed

    def boot(self) -> str:
        return self.life

    def go(self, ms: int) -> None:
        self.wall += ms
        self.passed += ms


@pytest.fixture
def machine() -> HandMachine:
    return HandMachine()


def test_only_time_that_passed_counts_across_controllers(
    tmp_path: Path, machine: HandMachine
) -> None:
    anchor = tmp_path / "clock.json"
    before = SystemClock(0, anchor, machine)
    machine.go(1_000)
    newest_ms = before.now_ms()
    for jump_ms in (DAY_MS, -2 * DAY_MS, DAY_MS):
        machine.wall += jump_ms
        machine.go(500)
        clock = SystemClock(newest_ms, anchor, machine)
        assert clock.now_ms() == newest_ms + 500
        assert clock.drift_ms() == machine.wall - clock.now_ms()
        newest_ms = clock.now_ms()
    assert clock.drift_ms() == 0


def test_a_clock_that_was_ahead_and_is_put_right_does_not_stop_time(
    tmp_path: Path, machine: HandMachine
) -> None:
    machine.wall += DAY_MS
    newest_ms = SystemClock(0, tmp_path / "clock.json", machine).now_ms()
    machine.wall -= DAY_MS
    machine.life, machine.passed = "second", 7
    clock = SystemClock(newest_ms, tmp_path / "clock.json", machine)
    assert clock.now_ms() == newest_ms
    machine.go(3_000)
    assert clock.now_ms() == newest_ms + 3_000


def test_after_the_machine_was_off_its_clock_tells_how_long(
    tmp_path: Path, machine: HandMachine
) -> None:
    SystemClock(0, tmp_path / "clock.json", machine)
    machine.life, machine.passed = "second", 7
    machine.wall += DAY_MS
    assert SystemClock(NOON_MS, tmp_path / "clock.json", machine).now_ms() == NOON_MS + DAY_MS


def test_the_store_knows_the_newest_time_in_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    assert store.newest_ms() == 0
    for done in history(5)[1]:
        store.commit(done.events, done.finished)
    assert store.newest_ms() == 5_000


def test_a_jump_is_one_event_with_a_why_and_survives_a_snapshot() -> None:
    state, policy = State(), Policy()
    assert step(state, Report(drift_ms=4_000), policy, 1_000).events == []
    (jumped,) = step(state, Report(drift_ms=DAY_MS), policy, 2_000).events
    assert isinstance(jumped, ClockJumped)
    assert jumped.why.startswith("the machine's clock was set 86400 s ahead; time limits")
    assert step(state, Report(drift_ms=DAY_MS + 900), policy, 3_000).events == []
    assert restore(state.snapshot()).drift_ms == DAY_MS
    (back,) = step(state, Report(drift_ms=0), policy, 4_000).events
    assert isinstance(back, ClockJumped)
    assert " s back; " in back.why


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
def test_a_day_that_did_not_pass_ends_no_job_and_is_not_booked(
    tmp_path: Path, machine: HandMachine, jump_ms: int
) -> None:
    engine = BookEngine()
    spec = JobSpec(command=("sleep", "600"), gpus=4, time_limit_ms=3_600_000)

    async def life(goal: Callable[[ControlLoop, LiveLedger], Awaitable[Result]]) -> Result:
        """A controller comes, does something, and is gone; the node and its job stay."""
        store = SqliteStore(tmp_path / "db")
        clock = SystemClock(store.newest_ms(), tmp_path / "clock.json", machine)
        loop = ControlLoop(store, engine, clock, Policy(), LogStore(tmp_path / "logs"))
        keeper = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), store, clock)
        loop.followers.append(keeper)
        ticking = asyncio.create_task(loop.run())
        try:
            async with asyncio.timeout(60):
                return await goal(loop, keeper)
        finally:
            ticking.cancel()
            keeper.close()
            store.close()

    async def begin(loop: ControlLoop, _: LiveLedger) -> None:
        await loop.request(Submit(spec))
        while loop.state.jobs["j1"].running_ms is None:
            await loop.changed("j1", 1)

    async def go_on(loop: ControlLoop, keeper: LiveLedger) -> tuple[str, int]:
        await loop.request(Nothing())
        loop.drifted(loop.clock.drift_ms())  # type: ignore[attr-defined]
        await loop.request(Nothing())
        assert any(isinstance(one.event, ClockJumped) for one in loop.store.events(0, 1000))
        view = await keeper.view(By.ACCOUNT, 0, 0)
        return loop.state.jobs["j1"].phase.value, view.capacity_gpu_us

    asyncio.run(life(begin))
    machine.go(60_000)
    machine.wall += jump_ms
    phase, booked = asyncio.run(life(go_on))
    assert phase == "running"
    assert booked == 4 * 60_000_000, "four GPUs for one minute"
