"""One head leads, and whoever led before cannot write: shown with a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from harness.postgres import Postgres

from shoal.database import lease as leasing
from shoal.database.base import Deposed, StoreAway
from shoal.database.lease import Head, Lease
from shoal.database.postgres import PostgresDatabase
from shoal.ports import StoreError

BOUND_S = 60
INSERT = "INSERT INTO marks VALUES (?)"


class Heads:
    """Two heads, each with its lease and its connections."""

    def __init__(self, server: Postgres, closing: ExitStack) -> None:
        self.server = server
        self.url = server.database()
        self.name = self.url.rpartition("/")[2]
        self.leases = (Lease(self.url), Lease(self.url))
        self.databases = tuple(PostgresDatabase(self.url, one) for one in self.leases)
        for database, lease in zip(self.databases, self.leases, strict=True):
            closing.callback(lease.close)
            closing.callback(database.close)

    def expire(self) -> None:
        """As if it was given up."""
        self.server.sql("UPDATE shoal.lease SET until_ms = 0", self.name)

    def marks(self) -> list[int]:
        return [mark for (mark,) in self.databases[1].read("SELECT mark FROM marks ORDER BY mark")]


@pytest.fixture
def heads(postgres_server: Postgres) -> Iterator[Heads]:
    with ExitStack() as closing:
        made = Heads(postgres_server, closing)
        assert made.leases[0].take("a")
        made.databases[0].prepare("marks", 1, "CREATE TABLE marks (mark BIGINT PRIMARY KEY)")
        yield made


def write(database: PostgresDatabase, *marks: int) -> None:
    with database.transaction() as cursor:
        cursor.executemany(INSERT, [(mark,) for mark in marks])


@contextmanager
def thread(work: Callable[[], None]) -> Iterator[None]:
    """It must end within the bound."""
    running = threading.Thread(target=work, daemon=True)
    running.start()
    yield
    running.join(BOUND_S)
    assert not running.is_alive()


def test_a_lease_is_taken_by_one_kept_by_renewal_and_free_when_it_is_given_up(heads: Heads) -> None:
    first, second = heads.leases
    assert not second.take("b")
    assert first.renew()
    assert first.sure
    first.report(Head("a", "https://a", "1.0", seq=7, loads=b"{}"))
    second.report(Head("b", "https://b", "1.0"))
    leader = second.leader()
    assert leader is not None
    assert (leader.name, leader.url, leader.seq, leader.leads) == ("a", "https://a", 7, True)
    assert [(one.name, one.leads) for one in second.heads()] == [("a", True), ("b", False)]
    assert abs(leader.seen_ms - second.now_ms()) < BOUND_S * 1000
    first.give_up()
    assert second.leader() is None
    assert second.take("b")
    assert (first.term, second.term) == (0, 2)
    second.forget("a")
    assert [(one.name, one.leads) for one in first.heads()] == [("b", True)]


def test_only_one_of_many_heads_gets_a_free_lease(heads: Heads) -> None:
    heads.expire()
    others = [Lease(heads.url) for _ in range(6)]
    won = []

    def reach(lease: Lease) -> None:
        if lease.take("x"):
            won.append(lease.term)

    threads = [threading.Thread(target=reach, args=(one,)) for one in others]
    for one in threads:
        one.start()
    for one in threads:
        one.join(BOUND_S)
    for other in others:
        other.close()
    assert won == [2]


def test_a_leader_that_was_replaced_cannot_write_or_renew(heads: Heads) -> None:
    write(heads.databases[0], 1)
    heads.expire()
    assert heads.leases[1].take("b")
    for _ in range(2):  # its connection was ended, and the next one is refused as well
        with pytest.raises((Deposed, StoreAway)):
            write(heads.databases[0], 2)
    with pytest.raises(Deposed):
        write(heads.databases[0], 2)
    assert not heads.leases[0].renew()
    with pytest.raises(Deposed, match="does not lead"):
        write(heads.databases[0], 3)
    write(heads.databases[1], 4)
    assert heads.marks() == [1, 4]


def test_a_leader_stopped_inside_a_transaction_neither_stores_it_nor_delays_the_next(
    heads: Heads,
) -> None:
    def stopped() -> None:
        with heads.databases[0].transaction() as cursor:
            cursor.execute(INSERT, (1,))
            assert cursor.execute("SELECT mark FROM marks") == [(1,)]  # the server is in the middle
            heads.expire()
            assert heads.leases[1].take("b")
            write(heads.databases[1], 2)

    with pytest.raises(StoreError):
        stopped()
    assert heads.marks() == [2]
    with pytest.raises(Deposed):
        write(heads.databases[0], 3)


def test_renewals_and_writes_do_not_wait_for_each_other(heads: Heads) -> None:
    with heads.databases[0].transaction() as cursor:
        assert cursor.execute("SELECT 1") == [(1,)]
        assert heads.leases[0].renew()
        cursor.execute(INSERT, (1,))
        assert heads.leases[0].renew()
    assert heads.marks() == [1]


def test_what_the_old_leader_stores_is_there_before_the_next_one_reads_or_not_at_all(
    heads: Heads,
) -> None:
    """Writes of one leader race with the take-over by the other, back and forth."""
    stored: list[int] = []

    def leader(number: int, first: int) -> None:
        with suppress(StoreError):
            for mark in range(first, first + 10_000):
                write(heads.databases[number], mark)
                stored.append(mark)

    for turn in range(6):
        now, then = turn % 2, (turn + 1) % 2
        with thread(lambda now=now, turn=turn: leader(now, turn * 10_000)):  # type: ignore[misc]
            while not stored or stored[-1] // 10_000 != turn:
                pass
            heads.expire()
            while not heads.leases[then].take("x"):
                heads.expire()
            there = heads.marks()
        assert heads.marks() == there, "nothing came after the take-over"
        assert set(stored) <= set(there), "nothing that was acknowledged is missing"


def test_a_server_that_is_silent_is_away_and_comes_back(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "ANSWER_S", 0.3)
    quick = Lease(heads.url)
    assert quick.heads() == []
    heads.server.freeze()
    try:
        with pytest.raises(StoreAway, match="does not answer"):
            quick.leader()
    finally:
        heads.server.thaw()
    assert quick.heads() == []
    quick.close()


def test_a_jump_of_the_databases_clock_takes_no_lease_away(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader renewed it a moment ago, and is sure of it."""
    first, second = heads.leases
    second.watch()
    real = leasing._NOW
    monkeypatch.setattr(leasing, "_NOW", f"({real} + 3600000)")
    assert first.sure
    assert not second.take("b")
    assert first.renew()
    monkeypatch.setattr(leasing, "_NOW", real)
    assert not second.take("b")
    # The process that led by this name has ended, or another could not ask.
    heads.server.sql("UPDATE shoal.lease SET until_ms = 1", heads.name)
    assert not second.take("b")
    assert second.take("a")


def test_what_people_ask_does_not_delay_a_renewal(heads: Heads) -> None:
    with heads.leases[0]._desk.lock, thread(lambda: None):  # somebody waits for a slow answer
        assert heads.leases[0].renew()
        assert heads.leases[0].leader() is not None


def test_a_lease_of_a_clock_that_went_back_ends_by_the_clock_of_the_standby(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "LEASE_MS", 200)
    hour = heads.leases[1].now_ms() + 3_600_000
    heads.server.sql(f"UPDATE shoal.lease SET until_ms = {hour}", heads.name)
    assert not heads.leases[1].take("b")
    until_s = leasing._moment() + BOUND_S
    while not heads.leases[1].take("b"):
        assert leasing._moment() < until_s
    assert heads.leases[1].term == 2


def test_a_take_over_waits_for_a_write_that_it_cannot_end(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the heads have roles of their own, and may not end each other's connections."""
    monkeypatch.setattr(leasing, "end_others", lambda *_: None)
    with heads.databases[0].transaction() as cursor:
        cursor.execute(INSERT, (1,))
        assert cursor.execute("SELECT mark FROM marks") == [(1,)]
        heads.expire()
        with pytest.raises(StoreAway, match="lock"):
            heads.leases[1].take("b")
    assert heads.leases[1].take("b")
    assert heads.marks() == [1]
    with pytest.raises(Deposed):
        write(heads.databases[0], 2)
