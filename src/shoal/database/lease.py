"""Which head leads: one row in the database, and one row for each head.

The leader's writes lock the lease's row with `FOR KEY SHARE`, and a take-over with `FOR UPDATE`,
which excludes it. So a write of the old leader is either stored before the new one begins to read
the log, or refused. A renewal changes no key, so it waits for neither.

Whether a lease is over is decided by a standby's own clock, which nobody sets: it is when the
leader has not renewed it for as long as it lasts. The database's clock may jump; it only tells
people who leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shoal.database.base import Row, Values
from shoal.database.server import DEPOSED, Server, name_of

LEASE_MS = 2_500
RENEW_S = 0.7
LOOK_S = 0.3  # how often a standby looks whether the lease has expired
SURE_S = 2.0  # a leader that could not renew for this long no longer answers
ANSWER_S = 1.5  # a server that takes longer than this for a look at the lease does not answer
CONNECT_S = 2  # for each host
TAKE_MS = 500  # how long a take-over waits for a write of the leader before
WRITER = "shoal writer"  # how the connections that write are called at the server

_SETUP_LOCK = 0x7368_6F61_6C  # of the two heads that come first, only one makes the tables
_TABLES = f"""
CREATE TABLE IF NOT EXISTS parts (part TEXT COLLATE "C" PRIMARY KEY, version BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS lease (
    id BIGINT PRIMARY KEY, term BIGINT NOT NULL UNIQUE, holder TEXT NOT NULL,
    until_ms BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS heads (
    name TEXT COLLATE "C" PRIMARY KEY, url TEXT NOT NULL, version TEXT NOT NULL,
    seen_ms BIGINT NOT NULL, seq BIGINT NOT NULL, loads BYTEA NOT NULL);
INSERT INTO lease VALUES (1, 0, '', 0) ON CONFLICT DO NOTHING;
CREATE OR REPLACE FUNCTION must_lead(mine BIGINT) RETURNS VOID LANGUAGE plpgsql AS $body$
DECLARE theirs BIGINT;
BEGIN
    SELECT term INTO theirs FROM shoal.lease WHERE id = 1 FOR KEY SHARE;
    IF theirs IS DISTINCT FROM mine THEN
        RAISE EXCEPTION 'another head leads' USING ERRCODE = '{DEPOSED}';
    END IF;
END $body$;
"""
_NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::BIGINT"
_HEAD = f"""
SELECT h.name, h.url, h.version, h.seen_ms, l.holder = h.name AND l.until_ms > {_NOW}, h.seq,
    h.loads FROM heads h, lease l"""


class Head(msgspec.Struct, frozen=True):
    """A machine that runs a controller. `loads`: what its gateway sees, as JSON."""

    name: str
    url: str = ""
    version: str = ""
    seen_ms: int = 0  # by the database's clock
    leads: bool = False
    seq: int = 0  # the newest event that it knows
    loads: bytes = b""


class Lease:
    """One head's hold on it. It has a connection of its own, so that no write delays a renewal.
    Threads may share it. Every call may raise `StoreAway`."""

    def __init__(self, url: str) -> None:
        self.name = name_of(url)
        self.term = 0  # 0: not held
        self._url = url
        # One connection for the lease alone, and one for everything else: what others ask must not
        # delay a renewal or a take-over.
        self._own, self._desk = _Link(url), _Link(url)
        self._renewed = 0.0  # when the newest renewal began, by `_moment`
        self._offset_ms: float | None = None  # the database's clock minus `_moment`
        self._seen: tuple[int, int] = (0, 0)  # term and end of the lease as they were last seen,
        self._seen_since = _moment()  # and since when they are the same

    @property
    def sure(self) -> bool:
        """It is held, and no other head can have it yet, whatever the database says by now."""
        return self.term > 0 and _moment() - self._renewed < SURE_S

    def take(self, holder: str) -> bool:
        """Take it if it has expired; whoever led before can no longer write when this returns."""
        with self._own.lock:
            began = _moment()
            seen = self._look()
            if not self._expired(seen, holder):
                return False
            server = self._own.ready()
            end_others(server, f"{WRITER} {seen.term} ")
            try:
                with server.clear_errors(), server.link.transaction():
                    server.rows(f"SET LOCAL lock_timeout = {TAKE_MS}")
                    [row] = server.rows("SELECT term, until_ms FROM lease WHERE id = 1 FOR UPDATE")
                    if row != (seen.term, seen.until_ms):
                        return False
                    [(term,)] = server.rows(
                        "UPDATE lease SET term = term + 1, holder = ?, "
                        f"until_ms = {_NOW} + {LEASE_MS} WHERE id = 1 RETURNING term",
                        (holder,),
                    )
            except BaseException:
                server.close()
                raise
            self.term, self._renewed = int(term), began
            return True

    def watch(self) -> None:
        """Look at it without taking it: whoever takes it must know how long it was not renewed."""
        with self._own.lock:
            self._look()

    def renew(self) -> bool:
        """False: another head has it, and this one must not go on."""
        if not self.term:
            return False
        began = _moment()
        rows = self._own.ask(
            f"UPDATE lease SET until_ms = {_NOW} + {LEASE_MS} WHERE id = 1 AND term = ? "
            f"RETURNING {_NOW}",
            (self.term,),
        )
        if not rows:
            self.term = 0
            return False
        self._clock(began, rows[0][0])
        self._renewed = began
        return True

    def give_up(self) -> None:
        """The next head need not wait. If the server is away, it waits for the end of the lease."""
        term, self.term = self.term, 0
        if term:
            self._own.ask("UPDATE lease SET until_ms = 0 WHERE id = 1 AND term = ?", (term,))

    def leader(self) -> Head | None:
        """None: the lease has expired, so no head leads."""
        found = self._own.ask(
            "SELECT l.holder, coalesce(h.url, ''), coalesce(h.version, ''), "
            "coalesce(h.seen_ms, 0), TRUE, coalesce(h.seq, 0), coalesce(h.loads, '') "
            f"FROM lease l LEFT JOIN heads h ON h.name = l.holder WHERE l.until_ms > {_NOW}"
        )
        return Head(*found[0]) if found else None

    def heads(self) -> list[Head]:
        return [Head(*row) for row in self._desk.ask(f"{_HEAD} ORDER BY h.name")]

    def report(self, head: Head) -> None:
        """What a head says of itself; `seen_ms` and `leads` are the database's to say."""
        self._desk.ask(
            f"INSERT INTO heads VALUES (?, ?, ?, {_NOW}, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "url = excluded.url, version = excluded.version, seen_ms = excluded.seen_ms, "
            "seq = excluded.seq, loads = excluded.loads",
            (head.name, head.url, head.version, head.seq, head.loads),
        )

    def forget(self, name: str) -> None:
        """A head that will not come back."""
        self._desk.ask("DELETE FROM heads WHERE name = ?", (name,))

    def hand_in(self, lines: Iterable[tuple[str, bytes]]) -> None:
        """Lines of the audit log from a head that may not write it. The leader takes them from
        there; the id of a line shows whether it has it already."""
        for id_, line in lines:
            query = "INSERT INTO handed_in (id, line) VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._desk.ask(query, (id_, line))

    def now_ms(self) -> int:
        """The database's clock, as of the newest answer."""
        if self._offset_ms is None:
            self.watch()
        assert self._offset_ms is not None
        return int(_moment() * 1000 + self._offset_ms)

    def close(self) -> None:
        for link in (self._own, self._desk):
            link.close()

    def _look(self) -> _Row:
        began = _moment()
        query = f"SELECT term, until_ms, {_NOW}, holder FROM lease WHERE id = 1"
        [row] = self._own.ready().execute(query)
        found = _Row(*row)
        self._clock(began, found.now_ms)
        if self._seen != (found.term, found.until_ms):
            self._seen, self._seen_since = (found.term, found.until_ms), _moment()
        return found

    def _expired(self, seen: _Row, name: str) -> bool:
        """It was given up, or nobody has renewed it for long enough. A head that led itself until
        its last process ended need not wait that long: no other head can be it."""
        mine = seen.holder == name and seen.until_ms <= seen.now_ms
        return not seen.until_ms or mine or _moment() - self._seen_since > LEASE_MS / 1000

    def _clock(self, began: float, now_ms: int) -> None:
        self._offset_ms = now_ms - (began + _moment()) / 2 * 1000


class _Row(NamedTuple):
    """The lease, and the database's time."""

    term: int
    until_ms: int
    now_ms: int
    holder: str


class _Link:
    """One connection, which threads share."""

    def __init__(self, url: str) -> None:
        self.lock = threading.Lock()
        self._url = url
        self._server: Server | None = None
        self._made = False

    def ask(self, query: str, values: Values = ()) -> list[Row]:
        with self.lock:
            return self.ready().execute(query, values)

    def ready(self) -> Server:
        """With the lock held."""
        if self._server is None or not self._server.usable:
            if self._server is not None:
                self._server.close()
            self._server = Server(self._url, "shoal lease", ANSWER_S, connect_s=CONNECT_S)
        if not self._made:
            _make(self._server)
            self._made = True
        return self._server

    def close(self) -> None:
        with self.lock:
            if self._server is not None:
                self._server.close()


def end_others(server: Server, name: str) -> None:
    """End connections whose names begin so, and what they have not stored yet. A leader that was
    stopped inside of a transaction would hold its locks otherwise."""
    server.execute(
        f"SELECT pg_terminate_backend(pid, {TAKE_MS}) FROM pg_stat_activity "
        "WHERE starts_with(application_name, ?) AND datname = current_database() "
        "AND usename = current_user AND pid <> pg_backend_pid()",
        (name,),
    )


def _make(server: Server) -> None:
    """The tables that even a head without the lease may write."""
    [(there,)] = server.execute("SELECT to_regprocedure('shoal.must_lead(bigint)') IS NOT NULL")
    if there:
        return
    try:
        with server.clear_errors(), server.link.transaction():
            server.link.execute(f"SELECT pg_advisory_xact_lock({_SETUP_LOCK})")
            [(schema,)] = server.rows("SELECT to_regnamespace('shoal') IS NULL")
            if schema:
                server.link.execute("CREATE SCHEMA shoal")
            server.link.execute(_TABLES)
    except BaseException:
        server.close()
        raise


def _moment() -> float:
    """A clock that goes on while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
