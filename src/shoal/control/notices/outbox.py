"""Notices that wait to be sent, on disk: a controller that dies loses none of them.

How far the log was read is stored with the notices that it gave rise to, in one transaction. After
a crash the rest of the log is read again, and gives rise to the same notices with the same ids.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.model.notice import Notice, ReceiverView, masked_receiver

WAITING_MAX = 1_000  # of one receiver; the oldest make room
WAITING_ALL_MAX = 50_000
RECEIVERS_MAX = 10_000  # of which something is remembered
BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS notices (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, receiver TEXT NOT NULL,
    body BLOB NOT NULL, tries INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS notices_by_receiver ON notices (receiver, number);
CREATE TABLE IF NOT EXISTS receivers (
    receiver TEXT PRIMARY KEY, tenant TEXT NOT NULL, shown TEXT NOT NULL,
    delivered INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0, in_row INTEGER NOT NULL DEFAULT 0,
    delivered_ms INTEGER NOT NULL DEFAULT 0, again_ms INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', used_ms INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""

_decode = msgspec.json.Decoder(Notice).decode


class Waiting(NamedTuple):
    """The next notice of a receiver. `in_row`: how often the receiver has failed since it last took
    one; `tries`: how often this notice was tried."""

    receiver: str
    notice: Notice
    tries: int
    in_row: int


def receiver_key(tenant: str, to: str) -> str:
    return hashlib.sha256(f"{tenant}\n{to}".encode()).hexdigest()[:24]


class Outbox:
    """Any thread may call it; each call is one transaction."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            path.chmod(0o600)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @property
    def cursor(self) -> int | None:
        """Up to which event the log was read; None: this outbox is new."""
        rows = self._ask("SELECT value FROM meta WHERE key = 'cursor'")
        return int(rows[0][0]) if rows else None

    def take(self, notices: Iterable[Notice], cursor: int, now_ms: int) -> None:
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            touched = dict.fromkeys(self._add(notice, now_ms) for notice in notices)
            if touched:
                self._bound(touched)
            self._database.execute("INSERT OR REPLACE INTO meta VALUES ('cursor', ?)", (cursor,))

    def _add(self, notice: Notice, now_ms: int) -> str:
        do, key = self._database.execute, receiver_key(notice.tenant, notice.to)
        do(
            "INSERT INTO receivers (receiver, tenant, shown, used_ms) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (receiver) DO UPDATE SET used_ms = excluded.used_ms",
            (key, notice.tenant, masked_receiver(notice.to), now_ms),
        )
        do(
            "INSERT OR IGNORE INTO notices (id, receiver, body) VALUES (?, ?, ?)",
            (notice.id, key, msgspec.json.encode(notice)),
        )
        return key

    def _bound(self, touched: Iterable[str]) -> None:
        """The oldest notices of a receiver make room. If all receivers together have too many,
        those that get some now lose as many as it takes."""
        do = self._database.execute
        (every,) = do("SELECT count(*) FROM notices").fetchone()
        for key in touched:
            (own,) = do("SELECT count(*) FROM notices WHERE receiver = ?", (key,)).fetchone()
            many = max(own - WAITING_MAX, min(own, every - WAITING_ALL_MAX))
            if many > 0:
                do(
                    "DELETE FROM notices WHERE number IN (SELECT number FROM notices "
                    "WHERE receiver = ? ORDER BY number LIMIT ?)",
                    (key, many),
                )
                do("UPDATE receivers SET dropped = dropped + ? WHERE receiver = ?", (many, key))
                every -= many
        do(
            "DELETE FROM receivers WHERE receiver IN (SELECT receiver FROM receivers "
            "WHERE receiver NOT IN (SELECT receiver FROM notices) "
            "ORDER BY used_ms DESC LIMIT -1 OFFSET ?)",
            (RECEIVERS_MAX,),
        )

    def due(self, now_ms: int, busy: Sequence[str], each: int) -> list[Waiting]:
        """The first notice of each receiver that may be tried now, except the busy ones: of each
        tenant's receivers at most so many that worked last time, and as many that did not."""
        marks = ", ".join("?" * len(busy))
        rows = self._ask(
            "SELECT receiver, body, tries, in_row FROM (SELECT n.receiver, n.body, n.tries, "
            "r.in_row, n.number, row_number() OVER "
            "(PARTITION BY r.tenant, r.in_row > 0 ORDER BY n.number) AS place "
            "FROM notices n JOIN receivers r ON r.receiver = n.receiver WHERE n.number IN "
            "(SELECT min(number) FROM notices GROUP BY receiver) "
            f"AND r.again_ms <= ? AND n.receiver NOT IN ({marks})) WHERE place <= ? "
            "ORDER BY place, number",
            (now_ms, *busy, each),
        )
        return [Waiting(row[0], _decode(row[1]), row[2], row[3]) for row in rows]

    def next_ms(self, busy: Sequence[str] = ()) -> int | None:
        """When the next receiver may be tried, except the busy ones; None: no notice waits."""
        marks = ", ".join("?" * len(busy))
        rows = self._ask(
            "SELECT min(again_ms) FROM receivers WHERE receiver IN (SELECT receiver FROM notices) "
            f"AND receiver NOT IN ({marks})",
            tuple(busy),
        )
        found: int | None = rows[0][0]
        return found

    def delivered(self, waiting: Waiting, now_ms: int) -> None:
        self._settle(
            waiting,
            "UPDATE receivers SET delivered = delivered + 1, in_row = 0, again_ms = 0, error = '', "
            "delivered_ms = ?1 WHERE receiver = ?2",
            (now_ms, waiting.receiver),
            gone=True,
        )

    def failed(self, waiting: Waiting, error: str, again_ms: int, *, give_up: bool) -> None:
        self._settle(
            waiting,
            "UPDATE receivers SET failed = failed + 1, in_row = in_row + 1, again_ms = ?, "
            "error = ?, dropped = dropped + ? WHERE receiver = ?",
            (again_ms, error, int(give_up), waiting.receiver),
            gone=give_up,
        )

    def _settle(
        self, waiting: Waiting, query: str, values: tuple[object, ...], *, gone: bool
    ) -> None:
        change = "DELETE FROM notices WHERE id = ?"
        if not gone:
            change = "UPDATE notices SET tries = tries + 1 WHERE id = ?"
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(change, (waiting.notice.id,))
            self._database.execute(query, values)

    def view(self, tenant: str, to: str) -> ReceiverView:
        found = self._views("WHERE r.receiver = ?", (receiver_key(tenant, to),))
        return found[0][1] if found else ReceiverView(to=masked_receiver(to))

    def views(self, tenant: str) -> dict[str, ReceiverView]:
        """By their keys; empty tenant: of all."""
        where = "WHERE r.tenant = ?" if tenant else ""
        return dict(self._views(where, (tenant,) if tenant else ()))

    def _views(self, where: str, values: tuple[object, ...]) -> list[tuple[str, ReceiverView]]:
        rows = self._ask(
            "SELECT r.receiver, r.shown, (SELECT count(*) FROM notices n WHERE n.receiver = "
            "r.receiver), r.delivered, r.failed, r.dropped, r.delivered_ms, r.error, r.again_ms "
            f"FROM receivers r {where} ORDER BY r.used_ms DESC LIMIT 1000",
            values,
        )
        return [
            (
                row[0],
                ReceiverView(
                    to=row[1],
                    waiting=row[2],
                    delivered=row[3],
                    failed=row[4],
                    dropped=row[5],
                    delivered_ms=row[6],
                    error=row[7],
                    again_ms=row[8],
                ),
            )
            for row in rows
        ]

    def forget(self, tenant: str) -> None:
        """The tenant was removed."""
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "DELETE FROM notices WHERE receiver IN "
                "(SELECT receiver FROM receivers WHERE tenant = ?)",
                (tenant,),
            )
            self._database.execute("DELETE FROM receivers WHERE tenant = ?", (tenant,))

    def _ask(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()
