"""A server that restarts, crashes, fails over, swallows an answer or refuses us: what was
acknowledged is there afterwards, and the store finds its way back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from harness.postgres import Postgres, folder, postgres
from harness.waiting import until

from shoal.control.store.events import EventStore
from shoal.control.store.marks import JOBS_AHEAD
from shoal.core.state.events.cluster import ControllerStarted, PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.events.supply import NodesOrdered
from shoal.database import postgres as near
from shoal.database.base import Deposed, StoreAway
from shoal.database.lease import Lease
from shoal.database.postgres import PostgresDatabase
from shoal.database.server import Server, clear_error, name_of
from shoal.model.policy import Policy
from shoal.model.supply import Supply
from shoal.ports import StoreDamaged, StoreError, StoreFull


class Leader:
    """A store, and what it has acknowledged."""

    def __init__(self, url: str) -> None:
        self.lease = Lease(url)
        assert self.lease.take("a")
        self.store = EventStore(PostgresDatabase(url, self.lease))
        self.acknowledged = 0

    def commit(self) -> None:
        at_ms = self.acknowledged + 1
        events: list[Event] = [PolicyChanged(at_ms=at_ms, policy=Policy())]
        self.acknowledged = self.store.commit(events, [])

    def commit_again(self) -> None:
        """As a controller does whose connection died under a commit."""
        with contextlib.suppress(StoreAway):
            self.commit()
        self.commit()

    def stored(self) -> list[int]:
        return [one.event.at_ms for one in self.store.events(0, 1000)]

    def is_whole(self) -> bool:
        return self.stored() == list(range(1, self.acknowledged + 1))

    def close(self) -> None:
        self.store.close()
        self.lease.close()


@contextlib.contextmanager
def leading(url: str) -> Iterator[Leader]:
    leader = Leader(url)
    try:
        yield leader
    finally:
        leader.close()


def test_a_restart_is_not_noticed_and_after_a_crash_everything_is_there() -> None:
    with postgres() as server, leading(server.database()) as leader:
        leader.commit()
        server.restart()
        leader.commit()
        assert leader.lease.renew()
        assert leader.is_whole()
        server.kill()
        for ask in (leader.commit, leader.stored, leader.lease.renew):
            with pytest.raises(StoreAway, match="does not answer"):
                ask()
        server.start()
        assert leader.lease.renew()
        assert leader.is_whole()
        leader.commit()
        assert leader.is_whole()


def test_a_promoted_replica_has_everything_that_was_acknowledged() -> None:
    with postgres() as first, folder() as root:
        first.database("d")
        second = first.replica(root)
        try:
            with leading(first.url("d", second)) as leader:
                for _ in range(20):
                    leader.commit()
                first.kill()
                with pytest.raises(StoreAway):  # the replica answers, but may not be written yet
                    leader.commit()
                second.promote()
                assert leader.is_whole()
                assert leader.lease.renew()
                leader.commit()
                assert leader.is_whole()
        finally:
            second.kill()


def test_a_server_that_has_lost_events_gets_no_log_with_a_hole(postgres_server: Postgres) -> None:
    """As after a fail-over to a replica that nobody waited for."""
    url = postgres_server.database()
    with leading(url) as leader:
        leader.store.commit([ControllerStarted(at_ms=1, epoch=5, first_job=30)], [])
        for _ in range(2):
            leader.commit()
        placed = JobPlaced(at_ms=4, job="j7", attempt=3, slices=(), master="", why="")
        ordered = NodesOrdered(
            at_ms=5, order="o8", supply=Supply(name="s", engine="slurm"), nodes=("n",), why=""
        )
        leader.acknowledged = leader.store.commit([placed, ordered], [])
        name = url.rpartition("/")[2]
        postgres_server.sql("DELETE FROM shoal.events WHERE seq > 3", name)
        postgres_server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{name}' AND pid <> pg_backend_pid()"
        )
        with pytest.raises(Deposed, match="has lost the newest 2 events"):
            leader.commit_again()
        assert leader.store.load()[1] == 3
        used = leader.store.used(20, 4)
        assert used.first_job > JOBS_AHEAD, "a lost job's number must not be given out again"
        assert used.epoch > 4
        assert used.first_attempt > 3, "nor a lost attempt's"
        assert used.first_order > 8, "nor a lost order's"
        leader.commit()
        assert len(leader.stored()) == 4


class Line:
    """Stands between us and the server, and can swallow what the server answers."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.swallow = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listening.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [ours, theirs]
                threading.Thread(target=self._carry, args=(ours, theirs), daemon=True).start()
                threading.Thread(target=self._carry, args=(theirs, ours), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.swallow and source.getpeername()[1] == self._target:
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for one in (self._listening, *self._ends):
            one.close()


def test_a_commit_whose_answer_is_lost_is_stored_once(postgres_server: Postgres) -> None:
    url = postgres_server.database()
    line = Line(postgres_server.port)
    try:
        with leading(url.replace(str(postgres_server.port), str(line.port))) as leader:
            leader.commit()
            line.swallow = True
            with pytest.raises(StoreAway):
                leader.commit()
            line.swallow = False
            with pytest.raises(StoreError):  # it is not known what became of the one before
                leader.commit()
            seq = leader.store.load()[1]
            assert seq == 2, "the server had all of it, and only its answer was lost"
            leader.acknowledged = seq
            leader.commit()
            assert leader.is_whole()
    finally:
        line.close()


def test_a_server_that_hangs_holds_up_an_event_loop_once_and_not_again_before_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near, "WAIT_S", 0.3)
    monkeypatch.setattr(near, "AGAIN_S", 0.05)
    asked: list[str] = []
    real = Server.execute

    def execute(self: Server, query: str, *rest: Any) -> Any:
        asked.append(query)
        return real(self, query, *rest)

    with postgres() as server, leading(server.database()) as leader:
        leader.commit()

        async def on_loop() -> list[int]:
            return [one.seq for one in leader.store.events(0, 9)]

        assert asyncio.run(on_loop()) == [1]
        monkeypatch.setattr(Server, "execute", execute)
        server.freeze()
        for _ in range(5):
            with pytest.raises(StoreAway, match="does not answer"):
                asyncio.run(on_loop())
        server.thaw()
        assert len(asked) == 1, "only the first has waited"

        def back() -> bool:
            with contextlib.suppress(StoreAway):
                return asyncio.run(on_loop()) == [1]
            return False

        until(back, "the server")


def test_errors_are_one_line_without_a_password(
    postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of("postgresql://me:secret@a:5432,b:5433/shoal?sslmode=require")
    assert name == "postgresql://a,b:5433/shoal"
    for wrong in ("postgresql://me:secret@h/d?nonsense=1", "mysql://me:secret@h/d", "secret"):
        with pytest.raises(StoreError, match="postgresql://USER@HOST:PORT/DATABASE") as seen:
            name_of(wrong)
        assert "secret" not in str(seen.value)
    cases = {
        psycopg.errors.DiskFull: StoreFull,
        psycopg.errors.DataCorrupted: StoreDamaged,
        psycopg.errors.UndefinedTable: StoreDamaged,
        psycopg.errors.AdminShutdown: StoreAway,
        psycopg.errors.TooManyConnections: StoreAway,
        psycopg.errors.ReadOnlySqlTransaction: StoreAway,
        psycopg.errors.QueryCanceled: StoreAway,
        psycopg.errors.UniqueViolation: StoreError,
    }
    for error, kind in cases.items():
        assert type(clear_error("it", error("why\nnot"))) is kind
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match="shoal\\[postgres\\]"):
        Lease(postgres_server.url("postgres"))


def test_a_database_that_cannot_be_used_says_what_to_do(postgres_server: Postgres) -> None:
    def refusal(url: str) -> str:
        lease = Lease(url)
        with pytest.raises(StoreError) as seen:
            lease.take("a")
        lease.close()
        assert "\n" not in str(seen.value)
        return str(seen.value)

    assert "create it: docs/several-heads.md" in refusal(postgres_server.url("nothing_here"))
    postgres_server.sql("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
    assert "create the database with ENCODING 'UTF8'" in refusal(postgres_server.url("ascii"))
    postgres_server.sql("CREATE DATABASE foreign_one")
    assert "permission denied" in refusal(postgres_server.url("foreign_one"))
    postgres_server.sql("CREATE SCHEMA shoal AUTHORIZATION shoal", "foreign_one")
    with leading(postgres_server.url("foreign_one")) as leader:  # it needs no more than that
        leader.commit()
        assert leader.is_whole()
