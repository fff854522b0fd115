"""The time of several heads is the database's, whatever their own clocks show."""

from __future__ import annotations

import asyncio

from shoal.control import clock as database_clock
from shoal.control.alarms import Alarms
from shoal.control.clock import Clocks, DatabaseClock

HOUR_MS = 3_600_000


class Machine(Clocks):
    def __init__(self, off_ms: int) -> None:
        self._off_ms = off_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self._off_ms


class Database:
    def __init__(self) -> None:
        self.off_ms = 0

    def now_ms(self) -> int:
        return Clocks().wall_ms() + self.off_ms


def test_a_head_whose_clock_is_off_by_an_hour_has_the_databases_time() -> None:
    for off_ms in (-HOUR_MS, HOUR_MS):
        database = Database()
        clock = DatabaseClock(database.now_ms, Machine(off_ms))
        clock.follow()
        assert abs(clock.now_ms() - database.now_ms()) < 1_000
        assert abs(clock.drift_ms() - off_ms) < 1_000


def test_a_database_whose_clock_is_set_makes_no_time_pass_and_none_come_back() -> None:
    database = Database()
    clock = DatabaseClock(database.now_ms, Machine(0))
    clock.follow()
    for off_ms in (HOUR_MS, -HOUR_MS):
        before = clock.now_ms()
        database.off_ms = off_ms
        for _ in range(10):
            clock.follow()
        assert 0 <= clock.now_ms() - before < 1_000


def test_a_new_leader_does_not_go_back_behind_a_stored_event() -> None:
    database = Database()
    newest_ms = database.now_ms() + HOUR_MS
    clock = DatabaseClock(database.now_ms, Machine(0))
    clock.set(newest_ms)
    assert newest_ms <= clock.now_ms() < newest_ms + 1_000


def test_a_head_that_followed_the_time_begins_to_lead_without_a_jump() -> None:
    database = Database()
    clock = DatabaseClock(database.now_ms, Machine(0))
    clock.follow()
    before = clock.now_ms()
    database.off_ms = HOUR_MS
    clock.set(before - 5)
    assert 0 <= clock.now_ms() - before < 1_000


def test_clocks_that_are_wrong_are_shown() -> None:
    async def story() -> None:
        alarms, database = Alarms(), Database()
        clock = DatabaseClock(database.now_ms, Machine(HOUR_MS))
        clock.follow()
        watching = asyncio.create_task(database_clock.watch_database(clock, alarms))
        await asyncio.sleep(0)
        assert "the machine's clock is 60 min ahead" in alarms.texts[0]
        watching.cancel()

    asyncio.run(story())
