"""The queue as the page shows it: in order, and without holding up the loop."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.api import queue
from shoal.api.queue import Foresight, Outlook, first_in_line
from shoal.control.loop import ControlLoop
from shoal.model.job import Job, JobSpec
from shoal.model.report import Submit
from tests.control.test_loop import SPEC, Rig

WIDE: JobSpec = msgspec.structs.replace(SPEC, gpus=4)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def fill(rig: Rig) -> None:
    await rig.loop.changed("", 5)
    for spec in (WIDE, WIDE, WIDE, msgspec.structs.replace(WIDE, priority=5)):
        await rig.loop.request(Submit(spec))


def test_the_line_is_in_the_schedulers_order(rig: Rig) -> None:
    async def look() -> None:
        await fill(rig)
        assert [job.id for job in first_in_line(rig.loop, 10)] == ["j4", "j2", "j3"]
        assert [job.id for job in first_in_line(rig.loop, 1)] == ["j4"]

    rig.run(look())


def test_a_slow_look_into_the_future_is_rare_and_the_front_comes_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    now_s = [100.0]

    def slow(_loop: ControlLoop, job: Job, seen_s: float) -> Outlook:
        asked.append(job.id)
        now_s[0] += 1.0
        return Outlook(seen_s, None, None, "", [])

    monkeypatch.setattr(queue, "_outlook", slow)
    monkeypatch.setattr(queue, "monotonic", lambda: now_s[0])

    async def look() -> None:
        await fill(rig)
        front, foresight = first_in_line(rig.loop, 10), Foresight()
        for _ in range(3):
            assert list(foresight.of(rig.loop, front)) == ["j4"]
        assert asked == ["j4"], "a second of looking is paid for with twenty of rest"
        now_s[0] = 119.9
        foresight.of(rig.loop, front)
        assert asked == ["j4"]
        now_s[0] = 120.1
        assert set(foresight.of(rig.loop, front[:1])) == {"j4"}
        assert asked == ["j4", "j4"], "and what is old is looked at again"

    rig.run(look())
