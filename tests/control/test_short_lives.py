"""A controller that is killed again and again: no start replays more, and no file grows."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.marks import Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ClockJumped
from shoal.database.settings import FileSettings
from shoal.ledger.live import LiveLedger
from shoal.model.job import JobSpec, MemberRef
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Submit
from tests.control.test_loop import BookEngine, HandClock, Rig

LIVES, JOBS = 24, 5
EVENTS_PER_SNAPSHOT, EVENTS_KEPT, FINISHED_KEPT = 60, 120, 20
SPEC = JobSpec(command=("true",), gpus=1, env={"FILL": "x" * 1_000})


class Figures(NamedTuple):
    replayed: int
    events: int
    finished: int
    snapshots: int
    pages: int
    journal_bytes: int
    booked_again: int


def one_life(home: Path) -> None:
    """Some jobs from their submission to their end. It closes nothing, as if it were killed."""
    rig = Rig.__new__(Rig)
    rig.store = SqliteStore(home / "db", Numbers(home / "marks"))  # type: ignore[assignment]
    rig.engine = BookEngine()
    clock = HandClock()
    rig.loop = ControlLoop(rig.store, rig.engine, clock, Policy(), LogStore(home / "logs"))
    book = rig.engine.book
    book.incarnation = rig.loop.state.epoch + 1
    ledger = LiveLedger(home / "ledger.db", FileSettings(home), rig.store, clock)
    rig.loop.followers.append(ledger)

    async def work() -> None:
        keeping = asyncio.create_task(ledger.run(lambda: rig.loop.policy, lambda _: None))
        for _ in range(JOBS):
            answer = await rig.loop.request(Submit(SPEC))
            assert isinstance(answer, Accepted)
            job = answer.id
            while not book.alive:
                await rig.loop.changed(job, 0.01)
            book.exited(MemberRef(job, 1, 0), 0)
            rig.loop.heard(book.report())
            while job in rig.loop.state.jobs:
                await rig.loop.changed(job, 0.01)
        at = rig.loop.last_seq
        while _booked(home) < at - EVENTS_PER_SNAPSHOT // 2:
            await rig.loop.changed("", 0.02)
        if rig.loop.snapshot_task is not None:
            await rig.loop.snapshot_task
        keeping.cancel()

    rig.run(work())


def _booked(home: Path) -> int:
    with closing(sqlite3.connect(home / "ledger.db")) as read:
        row = read.execute("SELECT seq FROM book").fetchone()
    return int(row[0]) if row else 0


def figures(home: Path) -> Figures:
    journal = (home / "db-wal").stat().st_size if (home / "db-wal").exists() else 0
    with closing(sqlite3.connect(f"file:{home / 'db'}?mode=ro", uri=True)) as read:

        def ask(query: str) -> int:
            return int(read.execute(query).fetchone()[0] or 0)

        last, start = ask("SELECT max(seq) FROM events"), ask("SELECT max(seq) FROM snapshots")
        return Figures(
            replayed=last - start,
            events=ask("SELECT count(*) FROM events"),
            finished=ask("SELECT count(*) FROM jobs"),
            snapshots=ask("SELECT count(*) FROM snapshots"),
            pages=ask("PRAGMA page_count"),
            journal_bytes=journal,
            booked_again=last - _booked(home),
        )


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", EVENTS_PER_SNAPSHOT)
    monkeypatch.setattr("shoal.control.store.keeping.EVENTS_KEPT", EVENTS_KEPT)
    monkeypatch.setattr("shoal.control.store.keeping.FINISHED_JOBS_KEPT", FINISHED_KEPT)
    monkeypatch.setattr("shoal.ledger.live.FIRST_WRITE_S", 0.05)
    monkeypatch.setattr("shoal.ledger.live.WRITE_S", 0.05)


@pytest.mark.usefixtures("small_bounds")
def test_many_short_lives_replay_no_more_than_one_and_let_no_file_grow(tmp_path: Path) -> None:
    seen: list[Figures] = []
    for _ in range(LIVES):
        child = os.fork()
        if not child:
            code = 1
            try:
                one_life(tmp_path)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        seen.append(figures(tmp_path))
    of_a_life = 6 * JOBS + 10
    assert max(one.replayed for one in seen) < EVENTS_PER_SNAPSHOT + of_a_life
    assert max(one.events for one in seen) < EVENTS_KEPT + EVENTS_PER_SNAPSHOT + of_a_life
    assert max(one.finished for one in seen) < FINISHED_KEPT + EVENTS_PER_SNAPSHOT
    assert max(one.snapshots for one in seen) <= 3, "the newest two, and one for the past"
    assert max(one.booked_again for one in seen) < EVENTS_PER_SNAPSHOT + of_a_life
    early, late = seen[LIVES // 3 : LIVES * 2 // 3], seen[LIVES * 2 // 3 :]
    assert max(one.pages for one in late) <= max(one.pages for one in early) * 1.1
    assert max(one.journal_bytes for one in seen) < 8 << 20
    assert seen[-1].events < 3 * LIVES * JOBS, "most of the history is gone"


def test_threads_that_read_a_large_store_keep_little_of_it_in_memory(tmp_path: Path) -> None:
    """20 threads with SQLite's own bounds took 45 MB more, once there were enough finished jobs."""
    store = SqliteStore(tmp_path / "db")
    many = [ClockJumped(at_ms=1, drift_ms=1, why="x" * 400) for _ in range(2_000)]
    for _ in range(20):
        store.commit(many, [])
    before = _resident_mb()
    done, ready = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        for after in range(0, 40_000, 500):
            store.events(after, 100)
        ready.release()
        done.wait(60)

    threads = [threading.Thread(target=read) for _ in range(20)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=120)
    grown = _resident_mb() - before
    done.set()
    for thread in threads:
        thread.join()
    store.close()
    assert grown < 20, f"{grown:.1f} MB"


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
