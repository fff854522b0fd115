"""Damaged files: nothing damaged is believed, what can be saved is saved, and no id comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from shoal.control import loop as control_loop
from shoal.control.history.store import HistoryFile
from shoal.control.home import Home
from shoal.control.logs import LogStore
from shoal.control.store.marks import JOBS_AHEAD, Numbers
from shoal.control.store.salvage import salvage
from shoal.control.store.sqlite import SqliteStore
from shoal.core.invariants import verify
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.identity import IdentityEvent
from shoal.database.settings import FileSettings
from shoal.ledger.live import LiveLedger
from shoal.ledger.store import LedgerStore
from shoal.machine.files import write_private
from shoal.model.identity import Role, Token, User
from shoal.model.job import JobSpec
from shoal.model.ledger import By
from shoal.model.policy import Policy
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    Nothing,
    RemoveToken,
    Report,
    SetToken,
    SetUser,
    Submit,
)
from shoal.ports import StoreDamaged, StoreError
from tests.control.test_loop import Rig
from tests.control.test_sqlite_store import as_bytes, history
from tests.core.build import Cluster


class HandClock:
    def now_ms(self) -> int:
        return 7_000


SPEC = JobSpec(command=("true",), gpus=1)


def filled(path: Path, jobs: int = 6) -> SqliteStore:
    store = SqliteStore(path)
    for done in history(jobs)[1]:
        store.commit(done.events, done.finished)
    return store


def execute(path: Path, statement: str, *values: object) -> None:
    other = sqlite3.connect(path)
    with other:
        other.execute(statement, values)
    other.close()


def flip(body: bytes) -> bytes:
    """One bit, in the middle: still JSON, perhaps, but not what was written."""
    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    return bytes(changed)


def damage(path: Path, table: str, key: str, number: int) -> None:
    other = sqlite3.connect(path)
    (body,) = other.execute(f"SELECT body FROM {table} WHERE {key} = ?", (number,)).fetchone()
    other.close()
    execute(path, f"UPDATE {table} SET body = ? WHERE {key} = ?", flip(body), number)


def test_a_garbled_event_is_told_in_one_line_with_the_command_that_helps(tmp_path: Path) -> None:
    filled(tmp_path / "shoal.db").close()
    damage(tmp_path / "shoal.db", "events", "seq", 9)
    with pytest.raises(StoreDamaged, match=r"event 9 cannot be read.*shoal salvage --home") as told:
        SqliteStore(tmp_path / "shoal.db").load()
    assert "\n" not in str(told.value)


def test_an_event_that_is_missing_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "shoal.db").close()
    execute(tmp_path / "shoal.db", "DELETE FROM events WHERE seq = 9")
    with pytest.raises(StoreDamaged, match="event 9 is missing"):
        SqliteStore(tmp_path / "shoal.db").load()


def test_a_damaged_snapshot_costs_nothing_but_time(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    for number, done in enumerate(history(6)[1]):
        last = store.commit(done.events, done.finished)
        if number in (2, 4):
            store.snapshot(last, as_bytes(store.load()[0]))
    newest = store.snapshot_seq
    store.close()
    damage(tmp_path / "shoal.db", "snapshots", "seq", newest)
    reopened = SqliteStore(tmp_path / "shoal.db")
    assert as_bytes(reopened.load()[0]) == as_bytes(history(6)[0])
    assert 0 < reopened.snapshot_seq < newest
    assert "an older one is used, nothing is lost" in reopened.alarms.texts[0]


def test_damaged_history_is_left_out_with_an_alarm(tmp_path: Path) -> None:
    store = filled(tmp_path / "shoal.db")
    store.snapshot(store._last, as_bytes(store.load()[0]))
    damage(tmp_path / "shoal.db", "events", "seq", 9)
    damage(tmp_path / "shoal.db", "jobs", "number", 2 << 20)
    assert as_bytes(store.load()[0]) == as_bytes(history(6)[0]), "nothing that lives needs it"
    assert 9 not in [recorded.seq for recorded in store.events(0, 1000)]
    assert [job.id for job in store.finished(10)] == ["j6", "j5", "j4", "j3", "j1"]
    assert "is damaged" in store.alarms.texts[0]


def test_a_file_of_the_first_format_is_taken_over_in_place(tmp_path: Path) -> None:
    filled(tmp_path / "shoal.db").close()
    old = sqlite3.connect(tmp_path / "shoal.db")
    with old:
        for index in (
            "events_saved",
            "events_between",
            "events_notable",
            "events_policies",
            "jobs_ended",
        ):
            old.execute(f"DROP INDEX {index}")
        for table in ("job_events", "log_sizes"):
            old.execute(f"DROP TABLE {table}")
        for column in ("tenant", "bytes"):
            old.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        old.execute("ALTER TABLE events DROP COLUMN kind")
        old.execute("ALTER TABLE jobs DROP COLUMN ended")
        for table in ("events", "snapshots", "jobs"):
            old.execute(f"ALTER TABLE {table} DROP COLUMN crc")
        old.execute("DROP TABLE meta")
        old.execute("PRAGMA user_version = 1")
    old.close()
    store = SqliteStore(tmp_path / "shoal.db")
    assert as_bytes(store.load()[0]) == as_bytes(history(6)[0])
    assert len(store.finished(10)) == 6
    store.commit(history(6)[1][-1].events, [])


def test_lives_shorter_than_a_snapshot_still_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "EVENTS_PER_SNAPSHOT", 10)

    async def life(rig: Rig) -> Answer:
        await rig.loop.request(Submit(SPEC))
        answer = await rig.loop.request(Nothing())  # looked at when the first is done with
        if rig.loop.snapshot_task is not None:
            await rig.loop.snapshot_task
        return answer

    for _ in range(4):  # each of them stores about four events
        rig = Rig(tmp_path)
        rig.run(life(rig))
        rig.store.close()
    assert rig.store.snapshot_seq > 0


def submitted(home: Path) -> str:
    """A controller's life in this home: the id of the one job that it is given."""

    class Kept(SqliteStore):
        def __init__(self, path: Path) -> None:
            super().__init__(path, Numbers(home / "marks.json", (home / "logs",)))

    rig = Rig(home)
    rig.store.close()
    store = Kept(home / "db")
    rig.loop = control_loop.ControlLoop(
        store, rig.engine, HandClock(), Policy(), LogStore(home / "logs")
    )
    answer: Answer = rig.run(rig.loop.request(Submit(SPEC)))
    store.close()
    assert isinstance(answer, Accepted)
    return answer.id


def test_a_lost_database_does_not_give_ids_out_twice(tmp_path: Path) -> None:
    assert [submitted(tmp_path), submitted(tmp_path)] == ["j1", "j2"]
    for name in ("db", "db-wal", "db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    assert submitted(tmp_path) == f"j{2 + JOBS_AHEAD}", "beyond every number that was set aside"
    epoch = SqliteStore(tmp_path / "db").load()[0].epoch
    assert epoch == 3, "nodes obey the newest epoch only"


def test_what_jobs_left_behind_counts_even_without_the_marks(tmp_path: Path) -> None:
    submitted(tmp_path)
    for name in ("db", "db-wal", "db-shm", "marks.json"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "logs" / "j77").mkdir(parents=True)
    (tmp_path / "logs" / "no job").mkdir()
    assert submitted(tmp_path) == "j78"


def saved(home: Home) -> list[str]:
    return salvage(home.database, home.salvaged, Numbers(home.marks))


def test_whichever_event_is_lost_the_rest_is_saved_and_holds_together(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole.db", jobs=2)
    last, records = whole._last, {job.id for job in whole.finished(10)}
    whole.close()
    for seq in range(1, last + 1):
        for number, how in enumerate(("damage", "delete")):
            home = Home(tmp_path / f"{seq}-{number}")
            home.path.mkdir()
            shutil.copy(tmp_path / "whole.db", home.database)
            if how == "damage":
                damage(home.database, "events", "seq", seq)
            else:
                execute(home.database, "DELETE FROM events WHERE seq = ?", seq)
            if how == "delete" and seq == last:
                continue  # nothing tells that there was one more
            lines = saved(home)
            store = SqliteStore(home.database)
            state, _ = store.load()
            verify(state)
            assert {job.id for job in store.finished(10)} == records
            assert not records & set(state.jobs), "what has ended does not run again"
            assert state.next_job >= 4, "and nobody gets its number"
            assert "lost: 1 events that cannot be read" in lines[1], (seq, how, lines)
            assert Path(lines[-1].removeprefix("the damaged file is ")).exists()
            assert store.commit([ControllerStarted(at_ms=1, epoch=9)], []) > last
            store.close()


def test_whichever_event_about_people_is_lost_no_removed_token_comes_back(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.join("n1", gpus=1)
    token = Token(id="abcd1234", user="ann", tenant="lab", role=Role.MEMBER, hash="a" * 64)
    ann = User(name="ann", roles={"lab": Role.MEMBER})
    for request in (
        AddTenant("lab"),
        SetUser(ann, add=True),
        SetToken(token),
        SetToken(msgspec.structs.replace(token, id="efgh5678")),
        RemoveToken("abcd1234"),
    ):
        assert isinstance(cluster.ask(request), Accepted)
    cluster.submit(tenant="lab", user="ann", gpus=1)
    people = [n for n, event in enumerate(cluster.log, 1) if isinstance(event, IdentityEvent)]
    assert len(people) == 5
    for seq in people:
        home = Home(tmp_path / str(seq))
        home.path.mkdir()
        store = SqliteStore(home.database)
        store.commit(cluster.log, [])
        store.close()
        damage(home.database, "events", "seq", seq)
        lines = saved(home)
        state, _ = SqliteStore(home.database).load()
        verify(state)
        assert state.identity.tokens == {}
        none_left = seq == people[3]  # the only one that was not removed
        assert none_left or any(line.startswith("void: ") for line in lines)
        assert "lab" in state.identity.tenants, "its jobs do not run as the agent"


def test_a_finished_job_whose_record_is_lost_is_named(tmp_path: Path) -> None:
    home = Home(tmp_path)
    filled(home.database, jobs=3).close()
    damage(home.database, "jobs", "number", 2 << 20)
    lines = saved(home)
    assert "0 jobs, 1 records of finished jobs" in lines[1], lines
    assert "finished jobs that are no longer listed: j2" in lines


def test_a_file_with_pages_overwritten_gives_what_is_on_the_others(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = filled(home.database, jobs=300)
    last = store._last
    store.close()
    data = bytearray(home.database.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 8192] = os.urandom(8192)
    home.database.write_bytes(data)
    lines = saved(home)
    reopened = SqliteStore(home.database)
    state, _ = reopened.load()
    verify(state)
    kept = len(reopened.events(0, 10_000))
    assert 0 < kept <= last
    assert lines[0].startswith("kept: ")


def test_what_is_no_database_at_all_begins_empty_behind_every_id(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.database.write_bytes(os.urandom(65536))
    write_private(home.marks, b'{"job": 1234, "epoch": 7}')
    lines = saved(home)
    state, _ = SqliteStore(home.database).load()
    assert (state.next_job, state.epoch, len(state.jobs)) == (1234, 7, 0)
    assert "0 live jobs" in lines[0]


def keeper_of(tmp_path: Path, store: SqliteStore, told: list[str] | None = None) -> LiveLedger:
    told = [] if told is None else told
    return LiveLedger(
        tmp_path / "ledger.db", FileSettings(tmp_path), store, HandClock(), told.append
    )


async def booked(keeper: LiveLedger, store: SqliteStore) -> int:
    keeper.stepped(Report(), [], store._last)
    return (await keeper.view(By.ACCOUNT, 0, 0)).capacity_gpu_us


def test_a_damaged_ledger_is_set_aside_and_booked_again(tmp_path: Path) -> None:
    store = filled(tmp_path / "shoal.db")
    whole = LiveLedger(
        tmp_path / "other.db", FileSettings(tmp_path), filled(tmp_path / "x.db"), HandClock()
    )
    first = keeper_of(tmp_path, store)
    first.close()
    ledger = tmp_path / "ledger.db"
    good = ledger.read_bytes()
    for number, spoil in enumerate(("header", "pages", "mirror"), 1):
        ledger.write_bytes(good)
        if spoil == "mirror":
            execute(ledger, "UPDATE book SET mirror = ?", os.urandom(400))
        else:
            data = bytearray(good)
            at = 0 if spoil == "header" else 4096
            data[at : at + 3000] = os.urandom(3000)
            ledger.write_bytes(data)
        told: list[str] = []
        keeper = keeper_of(tmp_path, store, told)
        assert asyncio.run(booked(keeper, store)) == 8 * 7_000_000, spoil
        keeper.close()
        assert "is booked again from the log" in told[0]
        assert (tmp_path / f"ledger.db.damaged-{number}").exists()
    whole.close()


def test_a_roll_that_fails_books_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "shoal.db")
    keeper_of(tmp_path, store).close()
    (tmp_path / "ledger.db").write_bytes(b"not a ledger" * 500)  # it is booked from the first event
    keeper = keeper_of(tmp_path, store)

    def failing(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(LedgerStore, "roll", failing)
    keeper._rolled = -1  # it is due

    async def twice() -> tuple[int, int]:
        with contextlib.suppress(StoreError):
            await booked(keeper, store)
        monkeypatch.undo()
        view = await keeper.view(By.ACCOUNT, 0, 0)
        return view.capacity_gpu_us, sum(row.gpu_us for row in view.accounts)

    assert asyncio.run(twice()) == (8 * 7_000_000, 8 * 7_000_000)


def test_a_damaged_file_of_samples_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    file = HistoryFile(path)
    for number in range(50):
        file.write(os.urandom(500), [(f"j/{number}", 1, os.urandom(500))])
    file.close()
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 512] = os.urandom(512)
    path.write_bytes(data)
    again = HistoryFile(path)
    again.write(b"tail", [])
    assert again.tail() == [b"tail"]
    assert (tmp_path / "history.db.damaged").exists()
    again.close()
