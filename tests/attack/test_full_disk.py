"""A full disk under the controller: nothing new is taken, but what runs can still be ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.marks import Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.model.job import JobSpec
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Cancel, Nothing, SetIntent, Submit
from shoal.ports import StoreError, StoreFull
from tests.control.test_loop import BookEngine, HandClock, Rig

SPEC = JobSpec(command=("true",), env={"FILL": "x" * 5000})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "shoal-test", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def rig_on(place: Path) -> Rig:
    rig = Rig.__new__(Rig)
    rig.store = SqliteStore(place / "db", Numbers(place / "marks"), place / "spare")  # type: ignore[assignment]
    rig.engine = BookEngine()
    logs = LogStore(place / "logs")
    rig.loop = ControlLoop(
        rig.store, rig.engine, HandClock(), Policy(), logs, alarms=rig.store.alarms
    )
    return rig


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def test_on_a_full_disk_cancel_and_drain_work_and_submissions_are_refused(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    rig = rig_on(small_disk)
    assert (small_disk / "spare").stat().st_size == 1 << 20

    async def work() -> None:
        jobs = [await rig.loop.request(Submit(SPEC)) for _ in range(60)]
        fill(small_disk / "junk")

        async def submit_on() -> None:
            for _ in range(2_000):
                await rig.loop.request(Submit(SPEC))

        with pytest.raises(StoreFull, match="free some space"):
            await submit_on()
        assert "is full" in rig.loop.alarms.texts[0]
        for job in jobs[:50]:
            assert isinstance(job, Accepted)
            assert isinstance(await rig.loop.request(Cancel(job.id)), Accepted)
        await rig.loop.request(SetIntent("n1", NodeIntent.DRAINING))
        (small_disk / "junk").unlink()
        await rig.loop.request(SetIntent("n1", NodeIntent.OPEN))
        await rig.loop.request(Nothing())
        assert rig.loop.alarms.texts == ()
        assert isinstance(await rig.loop.request(Submit(SPEC)), Accepted)

    rig.run(work())
    rig.store.close()
    assert SqliteStore(small_disk / "db").load()[0].jobs


def test_a_home_that_cannot_be_written_is_told_in_one_line(small_disk: Path) -> None:
    SqliteStore(small_disk / "db").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="check its owner and the disk") as told:
        SqliteStore(small_disk / "db", Numbers(small_disk / "marks"), small_disk / "spare")
    assert "\n" not in str(told.value)
