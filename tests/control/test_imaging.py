"""Snapshots are made beside the loop, and find what is wrong with the state as before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from shoal.control import imaging
from shoal.control.loop import ControlLoop
from shoal.core.invariants import Violation
from shoal.core.state.image import decoded
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.model.job import JobSpec
from shoal.model.report import Accepted, Submit
from tests.control.test_loop import Rig
from tests.control.test_sqlite_store import as_bytes

SPEC = JobSpec(command=("true",), gpus=1)


@pytest.fixture(autouse=True)
def one_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", 1)
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)


def held_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child writes its number to this place, and waits for as long as that is there."""

    def wait(_: State) -> None:
        (place / "new").write_text(str(os.getpid()))
        (place / "new").rename(place / "child")
        while (place / "child").exists():
            time.sleep(0.01)

    monkeypatch.setattr(imaging, "verify", wait)


async def begun(loop: ControlLoop, place: Path) -> int:
    while not (place / "child").exists():
        await loop.changed("", 0.01)
    return int((place / "child").read_text())


async def kept(loop: ControlLoop) -> None:
    if loop.snapshot_task is not None:
        await loop.snapshot_task


def test_requests_are_answered_while_a_snapshot_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(tmp_path, monkeypatch)
    rig = Rig(tmp_path)

    async def work() -> bytes:
        await begun(rig.loop, tmp_path)
        for number in (1, 2):
            answer = await rig.loop.request(Submit(SPEC))
            assert answer == Accepted(f"j{number}")
        assert rig.store.snapshot_seq == 0, "nothing is stored yet"
        monkeypatch.undo()
        (tmp_path / "child").unlink()
        await kept(rig.loop)
        assert 0 < rig.store.snapshot_seq < rig.loop.last_seq, "of the state as it was then"
        return as_bytes(rig.loop.state)

    now = rig.run(work())
    rig.store.close()
    again = Rig(tmp_path)
    assert as_bytes(again.loop.state) == now


def test_a_state_that_is_broken_is_found_and_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", 1_000)
    rig = Rig(tmp_path)

    async def work() -> None:
        assert await rig.loop.request(Submit(SPEC)) == Accepted("j1")
        rig.loop.state.tally.live["nobody"] = 3
        monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", 1)
        while not rig.engine.resends:
            try:
                await rig.loop.request(Submit(SPEC))
            except Violation:
                break  # it had come when the state was given up
        while "nobody" in rig.loop.tick.state.tally.live:
            await rig.loop.changed("", 0.01)
        assert "j1" in rig.loop.state.jobs

    rig.run(work())


def test_a_child_that_is_killed_costs_one_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(tmp_path, monkeypatch)
    rig = Rig(tmp_path)

    async def work() -> None:
        os.kill(await begun(rig.loop, tmp_path), signal.SIGKILL)
        await kept(rig.loop)
        assert any("no snapshot can be written" in text for text in rig.loop.alarms.texts)
        monkeypatch.undo()
        monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", 1)
        while not rig.store.snapshot_seq:
            await rig.loop.request(Submit(SPEC))
            await kept(rig.loop)
        assert not rig.loop.alarms.texts

    rig.run(work())
    assert rig.engine.resends == 0


def test_a_controller_that_is_killed_takes_the_child_along_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(tmp_path, monkeypatch)
    controller = os.fork()
    if not controller:
        try:
            rig = Rig(tmp_path)

            async def work() -> None:
                await begun(rig.loop, tmp_path)
                for _ in range(3):
                    await rig.loop.request(Submit(SPEC))
                (tmp_path / "answered").touch()
                await asyncio.Event().wait()

            rig.run(work())
        finally:
            os._exit(1)
    while not (tmp_path / "answered").exists():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    os.kill(controller, signal.SIGKILL)
    os.waitpid(controller, 0)
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        time.sleep(0.01)
    monkeypatch.undo()
    rig = Rig(tmp_path)
    assert set(rig.loop.state.jobs) == {"j1", "j2", "j3"}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


def test_an_image_is_the_state_as_it_was() -> None:
    async def body(state: State) -> bytes:
        made = imaging.Imaging(state)
        state.next_job = 7
        return await made.body()

    state = State()
    before = as_bytes(state)
    assert as_bytes(restore(decoded(asyncio.run(body(state))))) == before
