"""What neighbors ran for us is owed to them, exactly and beside the accounts of our own GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.verbs.report import _print, _print_owed
from shoal.control.store.sqlite import SqliteStore
from shoal.database import sqlite
from shoal.database.settings import FileSettings
from shoal.database.sqlite import Place
from shoal.forms.ledger_csv import WRITERS
from shoal.ledger.accounts import HOUR_MS, Account, Debt, Only, Owed
from shoal.ledger.book import Book
from shoal.ledger.book_state import BookState
from shoal.ledger.live import LiveLedger, events_of
from shoal.ledger.postings import Addition
from shoal.ledger.store import HOURS_KEPT, LedgerStore
from shoal.model.job import Outcome
from shoal.model.ledger import By, LedgerView
from shoal.model.neighbor import Ending
from shoal.model.report import DeclareGone, Report
from tests.core.test_neighbors import Home
from tests.database import two_heads
from tests.ledger.worlds import Books, again, same_as

PRICE = 10**10  # enough for what is asked below
MIRROR = msgspec.msgpack.encode(BookState())


@pytest.fixture
def home() -> Home:
    made = Home()
    made.join("n1", gpus=1)
    return made


def owing(home: Home) -> None:
    """Two jobs of red and one of blue; one came back once. Hours pass."""
    first, other = (
        home.send(gpus=1, tenant="red", price=PRICE),
        home.send(gpus=2, tenant="blue", price=PRICE),
    )
    home.wait(HOUR_MS)
    home.ended(first, gpu_ms=3_000, money=700_000)
    home.ended(other, "cancelled", gpu_ms=50, money=1)  # by the neighbor: it came back
    home.wait(HOUR_MS)
    home.offered(other, price=PRICE)
    home.wait(2_000)
    home.ended(other, gpu_ms=4_000, money=2_000_000, started=True)
    home.ended(home.send(tenant="red"))  # used nothing


def booked(home: Home) -> Books:
    books = Books()
    for event in home.log:
        books.stepped([event])
    return books


def owed_of(books: Books) -> dict[Debt, Owed]:
    found: dict[Debt, Owed] = {}
    for entry in books.book.drain():
        for (_, debt), one in entry.owed.items() if isinstance(entry, Addition) else ():
            found[debt] = found.get(debt, Owed()).plus(one)
    return found


OWED = {Debt("b", "red"): Owed(1, 3_000, 700_000), Debt("b", "blue"): Owed(2, 4_050, 2_000_001)}


def test_what_a_neighbor_ran_is_owed_for_the_tenant_whose_job_it_was(home: Home) -> None:
    owing(home)
    books = booked(home)
    same_as(books.book.cluster, home.state)
    assert owed_of(books) == OWED
    assert owed_of(booked(home)) == OWED, "a replay of the log comes to the same"


def test_what_is_owed_is_no_part_of_the_capacity(home: Home) -> None:
    owing(home)
    books = booked(home)
    amounts = books.close(home.now_ms)
    assert sum(amounts.values()) == sum(books.totals.capacity.values())
    assert {place.account for place in amounts} <= {Account.FREE, Account.FRAGMENTED, Account.LOST}


def test_a_job_that_is_at_a_neighbor_does_not_want_a_gpu_here(home: Home) -> None:
    home.run(gpus=1)
    job = home.submit(gpus=1, cluster="any")
    assert booked(home).book.cluster.jobs[job].queued
    home.offered(job)
    books = booked(home)
    assert not books.book.cluster.jobs[job].queued
    same_as(books.book.cluster, home.state)
    begun = Book()
    for event in events_of(home.state, home.now_ms):
        begun.take(event)
    same_as(begun.cluster, home.state)
    home.ended(job, "cancelled")
    assert booked(home).book.cluster.jobs[job].queued
    assert not again(booked(home).book.cluster).owes


@pytest.fixture(params=two_heads.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with two_heads.place(request, tmp_path) as found:
        yield found


def test_debts_are_kept_by_the_hour_and_old_hours_become_days(place: Place) -> None:
    store, debt = LedgerStore(place), Debt("west", "red")
    adds = [Addition(owed={(hour, debt): Owed(1, 10, 7)}) for hour in (1, 2, 30, 5_000)]
    store.put([*adds, Addition(owed={(2, Debt("west", "blue")): Owed(1, 99, 0)})], MIRROR, 1)
    assert store.owed(2, 31, "red") == [(debt, Owed(2, 20, 14))]
    assert store.owed(0, 31) == [(Debt("west", "blue"), Owed(1, 99, 0)), (debt, Owed(3, 30, 21))]
    store.roll(5_000 + 1, [])
    store.roll(5_000 + 1, [])
    assert 5_000 - HOURS_KEPT > 48
    assert [one for _, one in store.owed(0, 24, "red")] == [Owed(2, 20, 14)]
    assert [one for _, one in store.owed(0, 6_000, "red")] == [Owed(4, 40, 28)]


def test_a_ledger_of_the_version_before_gets_the_table(place: Place) -> None:
    LedgerStore(place).close()
    database = sqlite.opened(place, durable=False)
    with database.transaction() as cursor:
        cursor.execute("DROP TABLE owed")
        file = isinstance(place, Path)
        cursor.execute("PRAGMA user_version = 5" if file else "UPDATE parts SET version = 5")
    sqlite.closed(place, database)
    assert LedgerStore(place).owed(0, 9) == []


class Clock:
    def __init__(self, ms: int) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


def live(home: Home, folder: Path) -> LiveLedger:
    """Its log is the home's, all of it new to the ledger."""
    log = SqliteStore(folder / "shoal.db")
    seq = log.commit(home.log[:1], [])
    ledger = LiveLedger(folder / "l.db", FileSettings(folder), log, Clock(home.now_ms))
    ledger.book, ledger.seq = Book(), seq
    ledger.stepped(Report(), home.log[1:], log.commit(home.log[1:], []))
    return ledger


def view(ledger: LiveLedger, **only: Any) -> LedgerView:
    return asyncio.run(ledger.view(By.ACCOUNT, 0, 0, Only(**only)))


def test_a_report_names_each_neighbor_and_what_it_is_owed(home: Home, tmp_path: Path) -> None:
    owing(home)
    ledger = live(home, tmp_path)
    told = view(ledger)
    rows = [(one.neighbor, one.tenant, one.jobs, one.gpu_ms, one.cost) for one in told.owed]
    assert rows == [("b", "blue", 2, 4_050, 2.000_001), ("b", "red", 1, 3_000, 0.7)]
    assert not any("balance" in note for note in told.notes)
    assert [one.tenant for one in view(ledger, tenant="red").owed] == ["red"]
    assert view(ledger, user="ann").owed == []
    ledger.close()
    assert [one.gpu_ms for one in view(live_again(ledger, tmp_path)).owed] == [4_050, 3_000]


def test_a_report_in_the_terminal_has_it_below_the_accounts(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owing(home)
    told = view(live(home, tmp_path))
    _print(told)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:] == [
        ["OWED", "TO", "TENANT", "JOBS", "GPU-HOURS", "COST"],
        ["b", "blue", "2", "0.0011", "2.00"],
        ["b", "red", "1", "0.0008", "0.70"],
    ]
    _print_owed(msgspec.structs.replace(told, owed=[]))
    none = "no neighbor has run a job of ours to its end in this time\n"
    assert capsys.readouterr().out == none


def live_again(ledger: LiveLedger, folder: Path) -> LiveLedger:
    log = SqliteStore(folder / "shoal.db")
    return LiveLedger(folder / "l.db", FileSettings(folder), log, ledger._clock)


def test_a_file_has_what_is_owed(home: Home, tmp_path: Path) -> None:
    owing(home)
    with (tmp_path / "owed.csv").open("w") as file:
        WRITERS["owed"](file, view(live(home, tmp_path)))
    assert (tmp_path / "owed.csv").read_text().splitlines()[:2] == [
        "neighbor,tenant,jobs,gpu_hours,gpu_ms,cost",
        "b,blue,2,0.001125000,4050,2.000001",
    ]


def test_what_was_given_up_is_owed_though_its_job_has_ended_long_ago(home: Home) -> None:
    job = home.send(gpus=1, tenant="red", restart="never", price=PRICE)
    home.ask(DeclareGone("b"))
    assert job in home.finished
    home.wait(HOUR_MS)
    home.told(job, attempt=1, ended=Ending(outcome=Outcome.CANCELLED, gpu_ms=1_000, money=5))
    assert owed_of(booked(home)) == {Debt("b", "red"): Owed(1, 1_000, 5)}
