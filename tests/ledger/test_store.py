"""The ledger's file: the same sums as in memory, old hours and jobs rolled up, trouble told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.nodes import NodeLabelled, NodeReady
from shoal.core.step import step
from shoal.database import sqlite
from shoal.database.settings import FileSettings
from shoal.database.sqlite import Place
from shoal.ledger.accounts import HOUR_MS, Account, Move
from shoal.ledger.accounts import Place as Spot
from shoal.ledger.book import Book
from shoal.ledger.book_state import BookState, Hardware, Owner
from shoal.ledger.live import LiveLedger
from shoal.ledger.postings import Addition, Nap, Posting
from shoal.ledger.report import Tariff
from shoal.ledger.store import HOURS_KEPT, JOBS_KEPT_HOURS, OLDER_JOBS, LedgerStore
from shoal.model.ledger import By, PriceList
from shoal.model.report import NodeReport, Report, Submit
from shoal.ports import StoreError
from tests.core.build import job_spec, node_spec
from tests.database import two_heads

MIRROR = msgspec.msgpack.encode(BookState())


@pytest.fixture(params=two_heads.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with two_heads.place(request, tmp_path) as found:
        yield found


def opened(place: Place) -> LedgerStore:
    store = LedgerStore(place)
    owners = {"j1": Owner("red", "ann", "one"), "j2": Owner("red", "ann", "two")}
    machines = {"n1": Hardware("H100", 8)}
    store.put([Addition(owners=owners, machines=machines)], MIRROR, 1)
    return store


def sums(store: LedgerStore, by: By) -> dict[tuple[str | int, str], int]:
    rates = Tariff(PriceList(), store.machines()).of_machine
    return {(one.key, one.account.value): one.gpu_us for one in store.sums(by, 0, 1 << 40, rates)}


def adds(hour: int, job: str, amount: int, account: Account = Account.USEFUL) -> Addition:
    place = Spot(hour, "n1", job, account)
    return Addition(amounts={place: amount}, capacity={(hour, "n1"): amount})


def test_moves_take_what_came_before_them_and_leave_what_is_firm(place: Place) -> None:
    store = opened(place)
    move = Move("j1", "n1", 5, 30, Account.RECOMPUTE)
    entries: list[Posting] = [
        adds(4, "j1", 7),
        adds(5, "j1", 100),
        adds(6, "j1", 50),
        move,
        adds(6, "j1", 1),
    ]
    store.put(entries, MIRROR, 2)
    assert sums(store, By.JOB) == {("j1", "useful"): 7 + 30 + 1, ("j1", "recompute"): 70 + 50}
    assert store.capacity(0, 10) == 158


def test_power_naps_and_owners_are_read_as_they_were_put(place: Place) -> None:
    store = opened(place)
    more = Addition(energy={(3, "n1", "j1"): (900, 70)}, naps={(3, "j1"): (40, 50)})
    store.put([adds(3, "j1", 100), more, more], MIRROR, 9, 99)
    assert (store.mark(9), store.mark(8)) == (99, 0)
    (told,) = store.sums(By.JOB, 0, 10, {1: 0}, measured=True)
    assert (told.gpu_us, told.measured_us, told.energy_mj) == (100, 100, 1800 / 140 * 100)
    spots = [Spot(3, "n1", job, Account.USEFUL) for job in ("j1", "j2")]
    assert store.draws(spots) == {spots[0]: 1800 / 140}
    assert (store.measured(0, 10), store.measured(4, 10), store.naps(4, 10)) == (True, False, Nap())
    assert store.naps(0, 10) == Nap(80, 100)
    assert (store.owner("j1"), store.owner("j7")) == (Owner("red", "ann", "one"), None)
    assert store.load() == (BookState(), 9)
    assert opened(place).load() == (BookState(), 1)


def test_a_ledger_of_before_keeps_what_its_machines_drew(place: Place) -> None:
    """Up to version 3 a machine had one power for all its jobs."""
    store = opened(place)
    store.put([adds(3, "j1", 100), adds(3, "j2", 300)], MIRROR, 2)
    database = sqlite.opened(place, durable=False)
    old = database.words.integer
    with database.transaction() as cursor:
        cursor.execute("DROP TABLE energy")
        cursor.execute(
            f"CREATE TABLE power (hour {old}, machine {old}, watt_ms {old}, gpu_us {old})"
        )
        cursor.execute("INSERT INTO power VALUES (3, 1, 800, 400)")
        file = isinstance(place, Path)
        cursor.execute("PRAGMA user_version = 3" if file else "UPDATE parts SET version = 3")
    sqlite.closed(place, database)
    store.close()
    drawn = LedgerStore(place).sums(By.JOB, 0, 10, {1: 0}, measured=True)
    assert {one.key: one.energy_mj for one in drawn} == {"j1": 200, "j2": 600}


def test_old_hours_become_days_and_old_jobs_are_forgotten_but_their_time_is_not(
    place: Place,
) -> None:
    store = opened(place)
    now = JOBS_KEPT_HOURS + 10_000
    hours = [1, 2, 30, now - HOURS_KEPT - 100, now - 1]
    entries = [adds(hour, job, 5) for hour in hours for job in ("j1", "j2")]
    drawn = [Addition(energy={(hour, "n1", "j1"): (10 * hour, 5)}) for hour in hours]
    store.put([*entries, *drawn], MIRROR, 2)
    energy_mj = sum(
        one.energy_mj for one in store.sums(By.TENANT, 0, 1 << 40, {1: 0}, measured=True)
    )
    before = store.capacity(0, 1 << 40)
    store.roll(now, ["j2"])  # which lives
    store.roll(now, ["j2"])
    assert store.capacity(0, 1 << 40) == before == 50
    (told,) = store.sums(By.TENANT, 0, 1 << 40, {1: 0}, measured=True)
    assert told.energy_mj == pytest.approx(energy_mj) == 10 * sum(hours)
    assert sums(store, By.TENANT) == {("red", "useful"): 50}
    assert sums(store, By.JOB) == {
        (OLDER_JOBS, "useful"): 15,
        ("j1", "useful"): 10,
        ("j2", "useful"): 25,
    }
    of_j1 = [hour for hour, _ in sums(store, By.HOUR)]
    assert 0 in of_j1  # hours 1 and 2 are one day now
    assert {2, 30} <= set(of_j1)  # but not of a job that lives, which may yet lose its work


def test_what_could_not_be_written_leaves_nothing_behind(place: Place) -> None:
    store = opened(place)
    wrong = Addition(amounts={Spot(1, "nowhere", "j1", Account.USEFUL): 5})
    new = Addition(machines={"n2": Hardware("T4", 1)}, owners={"j9": Owner("blue", "", "")})
    with pytest.raises(KeyError):
        store.put([new, adds(1, "j1", 5), wrong], MIRROR, 2)
    assert sums(store, By.JOB) == {}
    store.put([new, Addition(amounts={Spot(1, "n2", "j9", Account.IDLE): 3})], MIRROR, 2)
    assert sums(store, By.TENANT) == {("blue", "idle"): 3}


def test_a_damaged_or_foreign_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"ledger\.db"):
        LedgerStore(tmp_path / "ledger.db")
    other = sqlite3.connect(tmp_path / "new.db")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(StoreError, match="another version"):
        LedgerStore(tmp_path / "new.db")


class Clock:
    ms = 1_000_000 * HOUR_MS

    def now_ms(self) -> int:
        return self.ms


def cluster(path: Path, clock: Clock) -> SqliteStore:
    """A log with a node and a running job, made by a controller that kept no ledger."""
    log = SqliteStore(path / "shoal.db")
    state, _ = log.load()
    spec = node_spec("a", gpus=4)
    heard = NodeReport(spec=spec, incarnation=1, sequence=1)
    done = step(state, Report(nodes=(heard,)), state.policy, clock.ms)
    log.commit(done.events, done.finished)
    submitted = Report(requests=(Submit(job_spec(gpus=1, tenant="red", user="ann")),))
    done = step(state, submitted, state.policy, clock.ms)
    log.commit(done.events, done.finished)
    return log


def test_a_ledger_begins_in_the_middle_of_a_clusters_life(tmp_path: Path) -> None:
    clock = Clock()
    log = cluster(tmp_path, clock)
    clock.ms += 5_000
    ledger = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock)
    clock.ms += 10_000
    view = asyncio.run(ledger.view(By.TENANT, 0, 0))
    assert view.capacity_gpu_us == 4 * 10_000 * 1000
    assert {row.key: row.gpu_us for row in view.rows} == {"": 30_000_000, "red": 10_000_000}
    ledger.close()
    # Of a log that it does not know, it says so and begins anew; what was booked stays.
    (tmp_path / "other").mkdir()
    again = LiveLedger(
        tmp_path / "ledger.db",
        FileSettings(tmp_path),
        SqliteStore(tmp_path / "other/s.db"),
        clock,
    )
    clock.ms += 60_000
    assert asyncio.run(again.view(By.ACCOUNT, 0, 0)).capacity_gpu_us == 40_000_000
    again.close()


def test_a_look_before_the_first_step_of_a_controller_books_the_log_up_to_then_first(
    tmp_path: Path,
) -> None:
    """Time never goes back in the book: a node that joined before that look would be short of the
    time in between."""
    clock = Clock()
    log = SqliteStore(tmp_path / "shoal.db")
    log.commit([ControllerStarted(at_ms=clock.ms, epoch=1)], [])
    LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock).close()
    state, _ = log.load()
    clock.ms += 1_000
    heard = NodeReport(spec=node_spec("a", gpus=4), incarnation=1, sequence=1)
    done = step(state, Report(nodes=(heard,)), state.policy, clock.ms)
    log.commit(done.events, done.finished)  # the controller dies, and its ledger did not hear it
    clock.ms += 2_000
    log.commit([ControllerStarted(at_ms=clock.ms, epoch=2)], [])
    ledger = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock)
    clock.ms += 3
    assert asyncio.run(ledger.view(By.NODE, 0, 0)).capacity_gpu_us == 4 * 2_003 * 1000
    clock.ms += 10
    event = NodeLabelled(at_ms=clock.ms, node="a")
    ledger.stepped(Report(), [event], log.commit([event], []))
    assert asyncio.run(ledger.view(By.NODE, 0, 0)).capacity_gpu_us == 4 * 2_013 * 1000
    ledger.close()


def test_events_that_a_first_look_has_read_from_the_log_are_booked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored a moment before the ledger hears of them."""
    clock, taken = Clock(), list[str]()
    log = SqliteStore(tmp_path / "shoal.db")
    log.commit([ControllerStarted(at_ms=clock.ms, epoch=1)], [])
    ledger = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock)
    take = Book.take

    def noted(book: Book, event: Any) -> None:
        taken.append(event.node)
        take(book, event)

    monkeypatch.setattr(Book, "take", noted)
    events = [NodeLabelled(at_ms=clock.ms, node=name) for name in ("a", "b")]
    first = log.commit(events[:1], [])
    asyncio.run(ledger.view(By.NODE, 0, 0))
    ledger.stepped(Report(), events, log.commit(events[1:], []))
    assert (taken, ledger.seq) == (["a", "b"], first + 1)
    ledger.close()


def test_a_ledger_does_not_go_on_with_another_log_of_the_same_numbers(tmp_path: Path) -> None:
    """As after a fail-over of the database that lost events, and others took their numbers."""
    clock = Clock()
    log = cluster(tmp_path, clock)
    ledger = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock)
    assert ledger._follows(ledger.seq, log.mark(ledger.seq) or 0)
    known = ledger.seq
    ledger.close()
    with log.database.transaction() as cursor:
        cursor.execute("DELETE FROM events WHERE seq = ?", (known,))
    other = SqliteStore(tmp_path / "shoal.db")
    other.commit([NodeReady(at_ms=clock.ms, node="a")] * 2, [])
    again = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), other, clock)
    assert again.seq == known + 1, "it begins with what is there now"
    again.close()


def test_trouble_with_the_file_is_told_and_stops_nothing(tmp_path: Path) -> None:
    clock = Clock()
    log = cluster(tmp_path, clock)
    (tmp_path / "ledger.db").mkdir()
    ledger = LiveLedger(tmp_path / "ledger.db", FileSettings(tmp_path), log, clock)
    ledger.stepped(Report(), [], 3)
    with pytest.raises(StoreError, match="the ledger cannot be kept"):
        asyncio.run(ledger.view(By.ACCOUNT, 0, 0))
    ledger.close()
