"""The store keeps what it acknowledged and says clearly why it cannot."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from shoal.control.store import keeping
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.nodes import NodeReady
from shoal.core.state.events.runs import JobCheckpointed, JobFinished
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.database import sqlite as sqlite_driver
from shoal.model.finding import JobFilter
from shoal.model.job import JobSpec, MemberRef, Outcome
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import MemberExit, NodeReport, Report, Submit
from shoal.ports import StoreError

NODE = NodeSpec(id="n1", gpus=8, cpu_milli=8000, memory_mb=1000)
KINDS = "SELECT kind FROM events ORDER BY seq"


def history(count: int) -> tuple[State, list[Step]]:
    """A node on which `count` jobs run, one after the other, and one more that is left running."""
    state, policy, steps = State(), Policy(), []
    alive: tuple[MemberRef, ...] = ()
    for number in range(count + 1):
        exits = tuple(MemberExit(ref, 0) for ref in alive)
        report = NodeReport(spec=NODE, incarnation=1, sequence=number + 1, exits=exits)
        request = Submit(JobSpec(command=("true",)), key=f"key-{number}")
        steps.append(
            step(state, Report(nodes=(report,), requests=(request,)), policy, 1000 * number)
        )
        alive = (MemberRef(f"j{number + 1}", 1, 0),)
    return state, steps


def saved(job: str, step: int) -> JobCheckpointed:
    return JobCheckpointed(at_ms=step, job=job, attempt=1, step=step)


def ended(job: str) -> JobFinished:
    return JobFinished(at_ms=9, job=job, attempt=1, outcome=Outcome.SUCCEEDED, code=0, why="")


def as_bytes(state: State) -> bytes:
    return msgspec.json.encode(state.snapshot())


def test_a_reopened_store_gives_the_same_state(tmp_path: Path) -> None:
    state, steps = history(5)
    store = SqliteStore(tmp_path / "db")
    for done in steps:
        store.commit(done.events, done.finished)
    store.close()
    loaded, last = SqliteStore(tmp_path / "db").load()
    assert as_bytes(loaded) == as_bytes(state)
    assert last == sum(len(done.events) for done in steps)


def test_a_snapshot_and_the_events_after_it_give_the_same_state(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    _, steps = history(5)
    for done in steps[:3]:
        last = store.commit(done.events, done.finished)
    middle, _ = store.load()
    store.snapshot(last, as_bytes(middle))
    for done in steps[3:]:
        store.commit(done.events, done.finished)
    assert as_bytes(store.load()[0]) == as_bytes(history(5)[0])


def test_finished_jobs_are_found_by_id_by_key_and_newest_first(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    for done in history(3)[1]:
        store.commit(done.events, done.finished)
    assert [job.id for job in store.finished(10)] == ["j3", "j2", "j1"]
    assert store.keyed("key-1") == "j2"
    assert store.keyed("other") is None
    found = store.job("j1")
    assert found is not None
    assert found.code == 0
    assert store.job("j4") is None, "it still runs"


def test_events_are_read_forwards_backwards_and_by_job_or_node(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    for done in history(3)[1]:
        store.commit(done.events, done.finished)
    everything = store.events(0, 1000)
    assert [recorded.seq for recorded in everything] == list(range(1, len(everything) + 1))
    assert store.events(-2, 1000) == everything[-2:]
    assert store.events(3, 2) == everything[3:5]
    of_j2 = store.events(0, 1000, job="j2")
    assert [type(recorded.event).__name__ for recorded in of_j2] == [
        "JobSubmitted",
        "JobPlaced",
        "JobRunning",
        "MemberExited",
        "JobFinished",
    ]
    assert {type(r.event).__name__ for r in store.events(0, 9, node="n1")} >= {"NodeJoined"}


def test_the_last_to_end_comes_first_and_a_cursor_gives_what_ended_since(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    _, steps = history(3)
    jobs = [job for done in steps for job in done.finished]
    last = store.commit([event for done in steps for event in done.events], jobs[1:])
    assert [job.id for job in store.finished(10)] == ["j3", "j2"]
    assert store.finished(10, after=last) == []
    store.commit([ended("j1")], jobs[:1])  # the oldest ends last
    assert [job.id for job in store.finished(10, after=last)] == ["j1"]
    assert [job.id for job in store.finished(2)] == ["j1", "j3"]


def test_many_checkpoints_hide_nothing_of_what_happened(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    _, steps = history(2)
    for done in steps:
        store.commit(done.events, done.finished)
    lived = [recorded.event for recorded in store.events(0, 1000, job="j3")]
    store.commit([saved("j3", step) for step in range(1, 301)], [])
    running = NodeReady(at_ms=5, node="n1")
    end = ended("j3")
    store.commit([running, *(saved("j3", step) for step in range(301, 601)), end], [])
    told = [recorded.event for recorded in store.history("j3", 200)]
    assert told == [*lived, saved("j3", 600), end], "of those in a row the last is there"
    assert [r.event for r in store.history("j3", 1)] == [saved("j3", 600), end]
    assert store.history("j2", 200) == store.events(0, 1000, job="j2")
    last = [recorded.event for recorded in store.events(-3, 3, notable=True)]
    assert [type(event).__name__ for event in last] == ["JobPlaced", "NodeReady", "JobFinished"]


def test_a_file_of_the_format_before_is_read_and_goes_on(tmp_path: Path) -> None:
    state, steps = history(3)
    store = SqliteStore(tmp_path / "db")
    for done in steps:
        last = store.commit(done.events, done.finished)
    told, ends = store.history("j2", 99), [job.id for job in store.finished(9)]
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as file:
        kinds = file.execute(KINDS).fetchall()
        for index in ("saved", "between", "notable", "policies"):
            file.execute(f"DROP INDEX events_{index}")
        file.execute("DROP INDEX jobs_ended")
        file.execute("CREATE INDEX events_by_job ON events (job, seq) WHERE job IS NOT NULL")
        for table in ("job_events", "log_sizes"):
            file.execute(f"DROP TABLE {table}")
        for column in ("tenant", "bytes"):
            file.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        file.execute("ALTER TABLE events DROP COLUMN kind")
        file.execute("ALTER TABLE jobs DROP COLUMN ended")
        file.execute("PRAGMA user_version = 2")
    again = SqliteStore(tmp_path / "db")
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as file:
        assert file.execute(KINDS).fetchall() == kinds
        indexes = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
        assert "jobs_ended" in indexes and "events_by_job" not in indexes
    assert again.history("j2", 99) == told
    assert [job.id for job in again.finished(9)] == ends
    assert as_bytes(again.load()[0]) == as_bytes(state)
    assert again.commit([saved("j4", 1)], []) == last + 1


def test_old_history_is_dropped_but_what_lives_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "EVENTS_KEPT", 10)
    monkeypatch.setattr(keeping, "FINISHED_JOBS_KEPT", 2)
    store = SqliteStore(tmp_path / "db")
    state, steps = history(8)
    for done in steps:
        last = store.commit(done.events, done.finished)
    dropped = store.snapshot(last, as_bytes(state))
    assert sorted(dropped) == ["j1", "j2", "j3", "j4", "j5", "j6"]
    assert [job.id for job in store.finished(10)] == ["j8", "j7"]
    assert len(store.events(0, 1000)) == 10
    store.close()
    assert as_bytes(SqliteStore(tmp_path / "db").load()[0]) == as_bytes(state)


def test_a_locked_database_is_a_clear_error_and_nothing_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_driver, "BUSY_TIMEOUT_S", 0.01)
    store = SqliteStore(tmp_path / "db")
    _, steps = history(1)
    other = sqlite3.connect(tmp_path / "db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked by another program"):
        store.commit(steps[0].events, steps[0].finished)
    other.execute("ROLLBACK")
    other.close()
    assert store.events(0, 10) == []
    assert store.commit(steps[0].events, steps[0].finished) == len(steps[0].events)


def test_a_full_disk_is_a_clear_error_and_nothing_is_half_written(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    _, steps = history(300)
    pages = store._file._writer.execute("PRAGMA page_count").fetchone()[0]
    store._file._writer.execute(f"PRAGMA max_page_count = {pages + 5}")
    committed = 0

    def commit_all() -> None:
        nonlocal committed
        for done in steps:
            committed = store.commit(done.events, done.finished)

    with pytest.raises(StoreError, match="is full: free some space"):
        commit_all()
    assert 0 < committed == store.events(-1, 1)[0].seq
    store.close()
    assert SqliteStore(tmp_path / "db").load()[1] == committed


def test_what_is_not_our_database_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(os.urandom(8192))
    with pytest.raises(StoreError, match="is damaged"):
        SqliteStore(tmp_path / "junk")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreError, match="another version of shoal"):
        SqliteStore(tmp_path / "newer")
    with pytest.raises(StoreError, match="cannot be written"):
        SqliteStore(tmp_path / "no" / "such" / "place")


def test_the_finished_jobs_of_one_tenant_are_found_whatever_others_write(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    _, steps = history(3)
    jobs = [job for done in steps for job in done.finished]
    replace = msgspec.structs.replace
    jobs[0].spec = replace(jobs[0].spec, tenant="lab")
    jobs[1].spec = replace(jobs[1].spec, tenant="rival", env={"tenant": "lab"})
    store.commit([event for done in steps for event in done.events], jobs)
    assert [job.id for job in store.finished(10, wanted=JobFilter(tenant="lab"))] == ["j1"]
    assert [job.id for job in store.finished(10, wanted=JobFilter(tenant="rival"))] == ["j2"]
    assert store.finished(10, wanted=JobFilter(tenant="la")) == []
