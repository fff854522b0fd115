"""Pages are told what changed, once found for all of them; a slow one is let go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.api.feed import BEHIND_MAX, KEPT_MAX, PAGES_MAX, Feed, Page, TooMany
from shoal.api.feed_rows import job_line
from shoal.api.page import pieces
from shoal.core.books.hang import Pace
from shoal.core.state.heard import Watch
from shoal.model.job import JobSpec
from shoal.model.progress import Beat
from shoal.model.report import Cancel, Submit
from shoal.model.series import GpuSample, NodeSample
from tests.control.test_loop import SPEC, HandClock, Rig

# The first has the only node; a cancel ends those that wait behind it at once.
LARGE = JobSpec(command=("true",), gpus=4)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def told(piece: bytes | None) -> tuple[str, str, dict[str, Any]]:
    """The id, the kind and what it says."""
    assert piece is not None
    lines = dict(line.split(": ", 1) for line in piece.decode().strip().splitlines())
    return lines["id"], lines["event"], json.loads(lines["data"])


async def until(page: Page, what: str) -> tuple[str, dict[str, Any]]:
    """Read on until a change tells of it."""
    async with asyncio.timeout(120):
        while True:
            name, _, change = told(await page.pieces.get())
            if what in json.dumps(change):
                return name, change


def test_a_page_gets_everything_and_then_what_changes(rig: Rig) -> None:
    async def watch() -> None:
        await rig.loop.changed("", 5)
        feed = Feed(rig.loop)
        page = feed.open()
        _, kind, whole = told(await page.pieces.get())
        assert kind == "snapshot"
        assert [node["id"] for node in whole["nodes"]] == ["n1"]
        await rig.loop.request(Submit(SPEC))
        _, change = await until(page, '"held": [["j1", 0, [0], 1000]]')
        assert [node["id"] for node in change["nodes"]] == ["n1"]
        assert change["status"]["gpus_held"] == 1
        await rig.loop.request(Cancel("j1"))
        await until(page, '"j1"')
        feed.end()
        while (piece := page.pieces.get_nowait()) is not None:
            assert piece

    rig.run(watch())


def test_a_page_that_comes_back_is_told_what_it_missed_if_that_is_known(rig: Rig) -> None:
    async def watch() -> None:
        await rig.loop.changed("", 5)
        feed = Feed(rig.loop)
        page = feed.open()
        seen, _, _ = told(await page.pieces.get())
        feed.close(page)
        await rig.loop.request(Submit(SPEC))
        feed.advance()
        again = feed.open(seen)
        _, kind, change = told(await again.pieces.get())
        assert kind == "change"
        assert change["jobs"][0]["id"] == "j1"
        for _ in range(KEPT_MAX + 1):
            rig.loop.tick.last_seq += 1
            feed.advance()
        for last in (seen, "other-1", f"{seen.partition('-')[0]}-999999", "nonsense", "-", "1-²"):
            assert told(await feed.open(last).pieces.get())[1] == "snapshot"
        feed.end()

    rig.run(watch())


def test_a_slow_page_is_let_go_and_the_others_are_not(rig: Rig) -> None:
    async def watch() -> None:
        feed = Feed(rig.loop)
        slow, quick = feed.open(), feed.open()
        for _ in range(2 * BEHIND_MAX):
            rig.loop.tick.last_seq += 1
            piece = feed.advance()
            assert piece is not None
            feed.send(piece)
            while not quick.pieces.empty():
                assert quick.pieces.get_nowait() is not None
        assert slow.pieces.qsize() == BEHIND_MAX, "what waits for it is bounded"
        last = [slow.pieces.get_nowait() for _ in range(BEHIND_MAX)][-1]
        assert last is None, "and it is told to come back"
        for _ in range(PAGES_MAX - 1):
            feed.open()
        with pytest.raises(TooMany, match="pages are open already"):
            feed.open()
        feed.end()

    rig.run(watch())


def test_how_busy_gpus_are_is_told_when_it_changes(rig: Rig) -> None:
    def sample(*busy: int) -> NodeSample:
        gpus = tuple(GpuSample(busy_milli=share) for share in busy)
        return NodeSample(at_ms=0, gpus=gpus)

    async def watch() -> None:
        await rig.loop.changed("", 5)
        samples = {"n1": sample(0, 510)}
        feed = Feed(rig.loop, lambda: samples)
        feed.look()
        assert told(feed.snapshot())[2]["busy"] == {"n1": [0, 50]}
        samples["n1"] = sample(4, 509)
        assert feed.look() is None, "what is finer than a step is no news"
        samples["n1"] = sample(1000, 509)
        change = feed.look()
        assert change is not None
        assert change.busy == {"n1": (100, 50)}

    rig.run(watch())


def test_a_page_hears_the_time_of_now_beside_what_was_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.page.BEAT_S", 0)

    async def watch() -> None:
        await rig.loop.changed("", 5)
        rig.loop.clock = clock = HandClock()
        feed = Feed(rig.loop)
        page = feed.open()
        clock.ms += 60_000  # the snapshot is a minute old when it is sent
        heard = pieces(feed, page)
        assert b"retry" in await anext(heard)
        kept, beat = (await anext(heard)).decode().strip().split("\n\n")
        assert kept.split("\n")[1] == "event: snapshot"
        assert beat == f'event: beat\ndata: {{"now_ms":{clock.ms}}}'
        clock.ms += 1000
        while not (quiet := (await anext(heard)).decode()).startswith("event: beat"):
            pass
        assert quiet == f'event: beat\ndata: {{"now_ms":{clock.ms}}}\n\n'
        await heard.aclose()
        feed.end()

    rig.run(watch())


async def _ended(rig: Rig, job: str) -> None:
    while rig.store.job(job) is None:
        await rig.loop.changed(job, 1)


def test_a_job_that_comes_and_goes_between_two_looks_is_told_of(rig: Rig) -> None:
    async def watch() -> None:
        await rig.loop.changed("", 5)
        await rig.loop.request(Submit(LARGE))
        feed = Feed(rig.loop)
        feed.look()
        await rig.loop.request(Submit(LARGE))
        await rig.loop.request(Cancel("j2"))
        await _ended(rig, "j2")
        change = feed.look()
        assert change is not None
        assert [(job.id, job.state) for job in change.ended] == [("j2", "cancelled")]
        await rig.loop.request(Submit(LARGE))
        change = feed.look()
        assert change is not None
        assert change.ended == [], "once, and not with every look"

    rig.run(watch())


def test_a_job_that_comes_and_goes_while_the_page_is_away_is_told_of(rig: Rig) -> None:
    async def watch() -> None:
        await rig.loop.changed("", 5)
        await rig.loop.request(Submit(LARGE))
        feed = Feed(rig.loop)
        page = feed.open()
        seen, _, _ = told(await page.pieces.get())
        feed.close(page)
        feed.end()
        await rig.loop.request(Submit(LARGE))
        await rig.loop.request(Cancel("j2"))
        await _ended(rig, "j2")
        _, kind, change = told(await feed.open(seen).pieces.get())
        assert kind == "change"
        assert [job["id"] for job in change["ended"]] == ["j2"]
        feed.end()

    rig.run(watch())


def test_the_end_of_a_job_too_far_back_in_the_queue_to_be_shown_is_told_of(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.feed.WAITING_MAX", 3)

    async def watch() -> None:
        await rig.loop.changed("", 5)
        await rig.loop.request(Submit(LARGE))
        feed = Feed(rig.loop)
        for _ in range(4):
            await rig.loop.request(Submit(LARGE))
        change = feed.look()
        assert change is not None
        assert [job.id for job in change.jobs] == ["j1", "j2", "j3", "j4"]
        await rig.loop.request(Cancel("j5"))
        await _ended(rig, "j5")
        change = feed.look()
        assert change is not None
        assert [job.id for job in change.ended] == ["j5"]
        assert change.gone_jobs == []

    rig.run(watch())


def test_a_snapshot_has_the_last_to_end_whatever_their_age(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.feed.ENDED_MAX", 2)

    async def watch() -> None:
        await rig.loop.changed("", 5)
        await rig.loop.request(Submit(LARGE))
        for _ in range(4):
            await rig.loop.request(Submit(LARGE))
        for job in ("j3", "j4", "j5", "j2"):
            await rig.loop.request(Cancel(job))
            await _ended(rig, job)
        feed = Feed(rig.loop)
        feed.look()
        ended = told(feed.snapshot())[2]["ended"]
        assert [job["id"] for job in ended] == ["j2", "j5"]

    rig.run(watch())


def test_a_job_that_trains_tells_when_it_last_moved(rig: Rig) -> None:
    async def watch() -> None:
        await rig.loop.changed("", 5)
        await rig.loop.request(Submit(SPEC))
        job = rig.loop.state.jobs["j1"]
        assert job_line(rig.loop, job).moved_ms == 0, "nothing is known of its steps"
        pace = Pace(began_ms=5, moved_ms=7)
        beats = {0: Beat(ref="j1.1.0", step=3, steps=3)}
        rig.loop.state.heard.watches["j1"] = Watch(attempt=1, pace=pace, beats=beats)
        assert job_line(rig.loop, job).moved_ms == 7

    rig.run(watch())
