"""The bars of a live cluster: nothing twice and nothing missing, however its controllers end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.control.loop import ControlLoop
from shoal.control.past import following
from shoal.control.past import store as bar_store
from shoal.control.past.following import Bars
from shoal.control.store.events import EventStore
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.log import Event
from shoal.core.state.state import State
from shoal.model.report import Report
from shoal.tick import Tick
from tests.past.histories import events_of, held, moments

SEED = 424
FOREVER = 1 << 50


class Loop:
    """As much of a loop as a follower reads."""

    def __init__(self, store: EventStore) -> None:
        self.tick = Tick(store, None, lambda *_: None)
        self.last_seq = store._last

    def now_ms(self) -> int:
        return FOREVER


class Life:
    """A controller's life with this log. It may end at any moment: nothing is closed in order."""

    def __init__(self, home: Path) -> None:
        self.store = SqliteStore(home / "shoal.db")
        self.loop = Loop(self.store)
        self.said: list[str] = []
        self.bars = Bars(
            home / "bars.db", self.store, cast(ControlLoop, self.loop), self.said.append
        )

    def commit(self, events: Sequence[Event]) -> None:
        self.loop.last_seq = self.store.commit(events, [])
        self.bars.stepped(Report(), events, self.loop.last_seq)

    def shown(self, from_ms: int = 0, to_ms: int = FOREVER) -> Any:
        return asyncio.run(self.bars.shown(from_ms, to_ms))

    def close(self) -> None:
        asyncio.run(self.bars.close())
        self.store.close()


def steps(seed: int = SEED) -> list[tuple[int, list[Event]]]:
    return [(at_ms, events) for at_ms, events, _ in moments(events_of(seed))]


def compared(bars: Iterable[Any]) -> list[Any]:
    return sorted(tuple(bar[:9]) for bar in bars)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one life that never ends makes of the history."""
    life = Life(tmp_path_factory.mktemp("whole"))
    for _, events in steps():
        life.commit(events)
    found = compared(life.shown()[0])
    life.close()
    assert len(found) > 20
    return found


def test_lives_that_end_anywhere_leave_no_gap_and_no_bar_twice(
    tmp_path: Path, whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some end before they have written anything; the last is far behind and catches up."""
    monkeypatch.setattr(following, "EVENTS_AT_ONCE", 7)
    every = steps()
    for start in range(0, len(every), 25):
        life = Life(tmp_path)
        for number, (_, events) in enumerate(every[start : start + 25]):
            life.commit(events)
            if number % 10 == 9 and start % 50:
                asyncio.run(life.bars._in_thread(life.bars._write))
        life.close()
    last = Life(tmp_path)
    bars, _, place = last.shown()
    assert compared(bars) == whole
    assert place.seq == last.loop.last_seq
    assert place.known_ms == FOREVER, "all of the log is read"
    last.close()


def test_the_oldest_bars_go_first_and_the_answer_says_since_when_they_are_known(
    tmp_path: Path, whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bar_store, "BARS_KEPT", 10)
    monkeypatch.setattr(bar_store, "DROPPED_AT_ONCE", 5)
    life = Life(tmp_path)
    for number, (_, events) in enumerate(steps()):
        life.commit(events)
        if number % 10 == 0:
            life.shown()
    bars, _, place = life.shown()
    assert 10 <= len(bars) <= 15
    assert place.oldest_ms > whole[0][5]
    later = [bar for bar in whole if bar[6] > place.oldest_ms]
    assert set(later) <= set(compared(bars)), "after that time all are there"
    life.close()


def test_bars_begin_again_with_the_log_if_it_is_another_one(
    tmp_path: Path, whole: list[Any]
) -> None:
    life = Life(tmp_path)
    for _, events in steps(415):
        life.commit(events)
    life.shown()
    life.close()
    for path in tmp_path.glob("shoal.db*"):
        path.unlink()
    life = Life(tmp_path)
    for _, events in steps():
        life.commit(events)
    assert compared(life.shown()[0]) == whole
    life.close()


def test_bars_of_a_log_that_was_cut_begin_with_its_oldest_snapshot(tmp_path: Path) -> None:
    life, last = Life(tmp_path), State()
    for number, (_, events, state) in enumerate(moments(events_of(SEED))):
        life.commit(events)
        last = state
        if number == 30:
            tick = Tick(life.store, None, lambda *_: None)
            tick.load()
            life.store.snapshot(*tick.snapshot())
            cut = life.loop.last_seq
    with life.store.database.transaction() as cursor:
        cursor.execute("DELETE FROM events WHERE seq <= ?", (cut - 5,))
    at_ms = events_of(SEED)[-1].at_ms
    bars, spans, place = life.shown()
    now = [bar for bar in bars if bar.end_ms is None or bar.end_ms > at_ms]
    assert {(b.node, b.job, b.attempt, b.member) for b in now} == {
        (node, job, attempt, member) for node, _, job, attempt, member in held(last)
    }
    assert place.oldest_ms == events_of(SEED)[cut - 1].at_ms
    assert bars and spans
    life.close()


def test_a_file_that_cannot_be_read_is_put_aside_and_made_again(
    tmp_path: Path, whole: list[Any]
) -> None:
    life = Life(tmp_path)
    for _, events in steps():
        life.commit(events)
    life.shown()
    life.close()
    (tmp_path / "bars.db").write_bytes(b"no database at all" * 500)
    life = Life(tmp_path)
    assert compared(life.shown()[0]) == whole
    assert (tmp_path / "bars.db.damaged").exists()
    life.close()
