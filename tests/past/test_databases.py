"""The past in a file and on a server: both answer alike."""

from __future__ import annotations

import pytest
from storm.disk import image_of

from shoal.control.past import store as bar_store
from shoal.control.past.log import Log, Moments
from shoal.control.past.store import BarStore, PlaceInLog
from shoal.core.state.events.queue import JobSubmitted
from tests.control.test_store import Place, place
from tests.past.histories import events_of, held, moments

__all__ = ["place"]  # the fixture: a file, and a server
SEED = 424


def test_bars_and_moments_are_the_same_in_a_file_and_on_a_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bars, last = (
        place.open(),
        BarStore(place.path / "bars.db" if place.lease is None else place.database()),
        0,
    )
    book, was = bars.load(), dict[int, tuple[bytes, object]]()
    for number, (at_ms, events, state) in enumerate(moments(events_of(SEED))):
        last = store.commit(events, [])
        for event in events:
            book.take(event)
        if number % 20 == 0:
            bars.write(book.drain(), {}, PlaceInLog(last, 0, at_ms, 0))
            book = bars.load()
            store.snapshot(last, image_of(state))
            was[at_ms] = image_of(state), held(state)
    bars.write(book.drain(), {}, PlaceInLog(last, 0, 0, 0))
    rebuilt = Moments(Log(store.database))
    for at_ms, (image, holds) in was.items():
        assert image_of(rebuilt.at(at_ms, 60)[0]) == image
        shown = bars.bars(at_ms, at_ms + 1)
        assert {
            (b.node, tuple(map(int, b.gpus.split(","))), b.job, b.attempt, b.member) for b in shown
        } == holds
    log = rebuilt.log
    notable = log.notable(last, 5)
    assert [one.seq for one in notable] == sorted(one.seq for one in notable)[-5:]
    stored = (one.event for one in log.events(0, last))
    submitted = next(one for one in stored if isinstance(one, JobSubmitted))
    assert log.submitted(submitted.job) == submitted
    assert (log.mark(last + 1), bool(log.mark(last))) == (None, True)
    bars.begin_again(list(was)[-2])
    assert bars.place() is None
    assert all(bar.end_ms is not None for bar in bars.bars(0, 1 << 50))
    monkeypatch.setattr(bar_store, "BARS_KEPT", 3)
    monkeypatch.setattr(bar_store, "DROPPED_AT_ONCE", 0)
    bars.write(book.drain(), {}, PlaceInLog(last, 0, 0, 0))
    assert len(bars.bars(0, 1 << 50)) == 3
