"""Replays that the page asks for: one at a time, bounded, and their failures in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.api.problems import Refusal
from shoal.api.simulate import Ask, Simulator
from tests.control.test_loop import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    (tmp_path / "shoal.db").symlink_to(tmp_path / "db")
    return Rig(tmp_path)


def state(simulator: Simulator) -> str:
    return simulator.view.state


def test_what_cannot_be_replayed_is_told_in_one_line(rig: Rig, tmp_path: Path) -> None:
    async def ask() -> None:
        simulator = Simulator(rig.loop, tmp_path)
        assert state(simulator) == "idle"
        with pytest.raises(Refusal, match="there is no policy 'best'; there are current, fifo"):
            simulator.start(Ask(policies=("best",)))
        with pytest.raises(Refusal, match="no home"):
            Simulator(rig.loop, None).start(Ask(policies=("fifo",)))
        ticking = asyncio.create_task(rig.loop.run())
        await rig.loop.changed("", 40)  # its node has joined
        simulator.start(Ask(policies=("fifo",), days=3))
        await simulator.ended()
        assert state(simulator) == "failed"
        assert simulator.view.problem.endswith("has no job that ran in its last 3 days")
        ticking.cancel()

    asyncio.run(asyncio.wait_for(ask(), 90))


def test_one_replay_runs_at_a_time_and_can_be_cancelled(rig: Rig, tmp_path: Path) -> None:
    async def ask() -> None:
        simulator = Simulator(rig.loop, tmp_path)
        simulator.start(Ask(policies=("current", "fifo")))
        with pytest.raises(Refusal, match="already running"):
            simulator.start(Ask(policies=("fifo",)))
        await asyncio.sleep(0)
        await simulator.cancel()
        assert state(simulator) == "cancelled"
        simulator.start(Ask(policies=("fifo",)))
        await simulator.ended()
        assert state(simulator) == "failed", "the next one runs to its end"

    asyncio.run(asyncio.wait_for(ask(), 90))
