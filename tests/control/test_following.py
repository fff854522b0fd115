"""A standby shows what the leader has stored, and decides nothing."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.control import following
from shoal.control.following import Following
from shoal.control.leading import Leadership
from shoal.control.logs import LogStore
from shoal.control.loop import Busy, ControlLoop, Unreadable
from shoal.control.store.sqlite import SqliteStore
from shoal.core.invariants import verify
from shoal.database.base import StoreAway
from shoal.head import standby
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Submit
from shoal.ports import Store
from tests.control.test_loop import SPEC, BookEngine, HandClock


class Pair:
    """A leader and a standby of one log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "shoal.db"
        self.away = False
        store = SqliteStore(self.path)
        self.leader = ControlLoop(
            store, BookEngine(), HandClock(), Policy(), LogStore(folder / "logs")
        )
        self.standby = Following(self.open, HandClock(), LogStore(folder / "logs"))

    def open(self) -> Store:
        if self.away:
            raise StoreAway("the server does not answer")
        return SqliteStore(self.path)

    async def begin(self) -> None:
        self.tasks = [asyncio.create_task(one.run()) for one in (self.leader, self.standby)]
        await self.leader.settled()

    async def submit(self, number: int) -> str:
        answer = await self.leader.request(Submit(SPEC, f"key {number}"))
        assert isinstance(answer, Accepted)
        return answer.id

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize("at_once", [5_000, 3])
def test_a_standby_knows_what_the_leader_has_stored_and_wakes_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """One that is far behind (`at_once` events) takes a snapshot instead."""
    monkeypatch.setattr(following, "EVENTS_AT_ONCE", at_once)

    async def story() -> None:
        pair = Pair(tmp_path)
        await pair.begin()
        assert await pair.standby.wait_for(1, 120)
        woken = asyncio.create_task(pair.standby.changed("", 20))
        await asyncio.sleep(0)
        jobs = [await pair.submit(number) for number in range(12)]
        await woken
        assert await pair.standby.wait_for(pair.leader.last_seq, 120)
        assert set(pair.standby.state.jobs) == set(pair.leader.state.jobs)
        assert jobs[-1] in pair.standby.state.jobs
        assert pair.standby.last_seq == pair.leader.last_seq
        assert not await pair.standby.wait_for(pair.leader.last_seq + 1, 0.2)
        verify(pair.standby.state)
        with pytest.raises(Busy, match="no head leads"):
            await pair.standby.request(Submit(SPEC, "other"))
        await pair.end()

    asyncio.run(story())


def test_a_standby_whose_database_is_away_says_so_and_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.READ_WAIT_S", 0.2)

    async def story() -> None:
        pair = Pair(tmp_path)
        pair.away = True
        await pair.begin()
        await pair.submit(1)
        await asyncio.sleep(0.2)
        with pytest.raises(Unreadable, match="the database is away: the server does not answer"):
            await pair.standby.settled()
        assert not pair.standby.refused
        pair.away = False
        assert await pair.standby.wait_for(pair.leader.last_seq, 120)
        for _ in range(2_000):  # the alarm ends with the look that found the log
            if not pair.standby.alarms.texts:
                break
            await asyncio.sleep(0.01)
        assert not pair.standby.alarms.texts
        await pair.end()

    asyncio.run(story())


def test_a_store_that_hangs_holds_up_neither_the_loop_nor_the_look_at_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every thread of the API waiting for it."""
    monkeypatch.setattr(following, "ENDED_S", 0.05)
    answered = threading.Event()

    class Lease:
        term = 1

        def take(self, name: str) -> bool:
            return name == "b"

    class Clock:
        def follow(self) -> None: ...

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        pair = Pair(tmp_path)
        await pair.begin()
        job = await pair.submit(1)
        assert await pair.standby.wait_for(pair.leader.last_seq, 120)
        monkeypatch.setattr(pair.standby.store, "job", lambda _: answered.wait(120))
        asked = [asyncio.create_task(pair.standby.ended(f"j{number}")) for number in range(7, 17)]
        assert not await pair.standby.ended(job), "it lives"
        assert await asyncio.gather(*asked) == [False] * 10
        monkeypatch.setattr(Leadership, "start", lambda _: None)
        taken: Any = standby._take(Lease(), "b", pair.standby, Clock())  # type: ignore[arg-type]
        async with asyncio.timeout(120):
            assert await taken
        more = await pair.submit(2)
        assert await pair.standby.wait_for(pair.leader.last_seq, 120)
        assert more in pair.standby.state.jobs, "it follows on"
        answered.set()
        await pair.end()

    asyncio.run(story())


def test_a_standby_begins_again_if_a_server_took_over_that_lacks_the_last_events(
    tmp_path: Path,
) -> None:
    """The log goes on from an earlier event, with others."""
    lost, left = tmp_path / "lost", tmp_path / "left"
    lost.mkdir()
    left.mkdir()

    async def written(folder: Path, jobs: int) -> Pair:
        pair = Pair(folder)
        await pair.begin()
        for number in range(jobs):
            await pair.submit(number + 100 * jobs)
        return pair

    async def story() -> None:
        one, other = await written(lost, 6), await written(left, 12)
        assert await one.standby.wait_for(one.leader.last_seq, 120)
        one.standby.store = SqliteStore(other.path)
        assert await one.standby.wait_for(other.leader.last_seq, 120)
        assert set(one.standby.state.jobs) == set(other.leader.state.jobs)
        assert one.standby.state.epoch == other.leader.state.epoch
        verify(one.standby.state)
        await one.end()
        await other.end()

    asyncio.run(story())


def test_after_the_hand_over_the_state_is_the_next_leaders_and_readers_come_again(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        pair = Pair(tmp_path)
        await pair.begin()
        await pair.submit(1)
        assert await pair.standby.wait_for(pair.leader.last_seq, 120)
        waiting = asyncio.create_task(pair.standby.changed("", 20))
        await asyncio.sleep(0)
        before = set(pair.standby.state.jobs)
        warm = pair.standby.hand_over()
        assert warm is not None and set(warm[0].jobs) == before
        with pytest.raises(Busy, match="begins to lead"):
            await waiting
        with pytest.raises(Unreadable):
            _ = pair.standby.state
        await pair.end()

    asyncio.run(story())
