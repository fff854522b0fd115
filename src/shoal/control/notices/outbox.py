"""Notices that wait to be sent, stored: a controller that dies loses none of them.

How far the log was read is stored with the notices that it gave rise to, in one transaction. After
a crash the rest of the log is read again, and gives rise to the same notices with the same ids. A
notice is removed when it was delivered, so a head that takes over may deliver it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.database.base import Cursor
from shoal.database.sqlite import Place, closed, opened
from shoal.model.notice import Notice, ReceiverView, masked_receiver

WAITING_MAX = 1_000  # of one receiver; the oldest make room
WAITING_ALL_MAX = 50_000
RECEIVERS_MAX = 10_000  # of which something is remembered
EVER = 2**63 - 1
PART, VERSION = "notices", 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS notices (
    number {counter}, id TEXT NOT NULL UNIQUE, receiver TEXT NOT NULL,
    body {blob} NOT NULL, tries {integer} NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS notices_by_receiver ON notices (receiver, number);
CREATE TABLE IF NOT EXISTS receivers (
    receiver TEXT PRIMARY KEY, tenant TEXT NOT NULL, shown TEXT NOT NULL,
    delivered {integer} NOT NULL DEFAULT 0, failed {integer} NOT NULL DEFAULT 0,
    dropped {integer} NOT NULL DEFAULT 0, in_row {integer} NOT NULL DEFAULT 0,
    delivered_ms {integer} NOT NULL DEFAULT 0, again_ms {integer} NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', used_ms {integer} NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value {integer} NOT NULL)
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

    def __init__(self, place: Place) -> None:
        self._place = place
        self._database = opened(place)
        try:
            if isinstance(place, Path):
                place.chmod(0o600)
            self._database.prepare(PART, VERSION, _SCHEMA.format(**self._database.words._asdict()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        closed(self._place, self._database)

    @property
    def cursor(self) -> int | None:
        """Up to which event the log was read; None: this outbox is new."""
        rows = self._database.read("SELECT value FROM meta WHERE key = 'cursor'")
        return int(rows[0][0]) if rows else None

    @property
    def mark(self) -> int | None:
        """Of the event at the cursor: a log that has lost events has another one there."""
        rows = self._database.read("SELECT value FROM meta WHERE key = 'mark'")
        return int(rows[0][0]) if rows else None

    def take(
        self, notices: Iterable[Notice], cursor: int, now_ms: int, mark: int | None = None
    ) -> None:
        with self._database.transaction() as do:
            touched = dict.fromkeys(_add(do, notice, now_ms) for notice in notices)
            if touched:
                _bound(do, touched)
            do.executemany(
                "INSERT INTO meta (key, value) VALUES (?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                [("cursor", cursor), ("mark", mark or 0)],
            )

    def due(self, now_ms: int, busy: Sequence[str], each: int) -> list[Waiting]:
        """The first notice of each receiver that may be tried now, except the busy ones: of each
        tenant's receivers at most so many that worked last time, and as many that did not."""
        rows = self._database.read(
            "SELECT receiver, body, tries, in_row FROM (SELECT n.receiver, n.body, n.tries, "
            "r.in_row, n.number, row_number() OVER "
            "(PARTITION BY r.tenant, r.in_row > 0 ORDER BY n.number) AS place "
            "FROM notices n JOIN receivers r ON r.receiver = n.receiver WHERE n.number IN "
            "(SELECT min(number) FROM notices GROUP BY receiver) "
            f"AND r.again_ms <= ?{_but('n.receiver', busy)}) AS ranked WHERE place <= ? "
            "ORDER BY place, number",
            (now_ms, *busy, each),
        )
        return [Waiting(row[0], _decode(row[1]), row[2], row[3]) for row in rows]

    def next_ms(self, busy: Sequence[str] = ()) -> int | None:
        """When the next receiver may be tried, except the busy ones; None: no notice waits."""
        rows = self._database.read(
            "SELECT min(again_ms) FROM receivers "
            f"WHERE receiver IN (SELECT receiver FROM notices){_but('receiver', busy)}",
            tuple(busy),
        )
        found: int | None = rows[0][0]
        return found

    def delivered(self, waiting: Waiting, now_ms: int) -> None:
        self._settle(
            waiting,
            "UPDATE receivers SET delivered = delivered + 1, in_row = 0, again_ms = 0, error = '', "
            "delivered_ms = ? WHERE receiver = ?",
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
        with self._database.transaction() as do:
            do.execute(change, (waiting.notice.id,))
            do.execute(query, values)

    def view(self, tenant: str, to: str) -> ReceiverView:
        found = self._views("WHERE r.receiver = ?", (receiver_key(tenant, to),))
        return found[0][1] if found else ReceiverView(to=masked_receiver(to))

    def views(self, tenant: str) -> dict[str, ReceiverView]:
        """By their keys; empty tenant: of all."""
        where = "WHERE r.tenant = ?" if tenant else ""
        return dict(self._views(where, (tenant,) if tenant else ()))

    def _views(self, where: str, values: tuple[object, ...]) -> list[tuple[str, ReceiverView]]:
        rows = self._database.read(
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
        with self._database.transaction() as do:
            do.execute(
                "DELETE FROM notices WHERE receiver IN "
                "(SELECT receiver FROM receivers WHERE tenant = ?)",
                (tenant,),
            )
            do.execute("DELETE FROM receivers WHERE tenant = ?", (tenant,))


def _but(column: str, busy: Sequence[str]) -> str:
    return f" AND {column} NOT IN ({', '.join('?' * len(busy))})" if busy else ""


def _add(do: Cursor, notice: Notice, now_ms: int) -> str:
    key = receiver_key(notice.tenant, notice.to)
    do.execute(
        "INSERT INTO receivers (receiver, tenant, shown, used_ms) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (receiver) DO UPDATE SET used_ms = excluded.used_ms",
        (key, notice.tenant, masked_receiver(notice.to), now_ms),
    )
    do.execute(
        "INSERT INTO notices (id, receiver, body) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (notice.id, key, msgspec.json.encode(notice)),
    )
    return key


def _bound(do: Cursor, touched: Iterable[str]) -> None:
    """The oldest notices of a receiver make room. If all receivers together have too many, those
    that get some now lose as many as it takes."""
    [(every,)] = do.execute("SELECT count(*) FROM notices")
    for key in touched:
        [(own,)] = do.execute("SELECT count(*) FROM notices WHERE receiver = ?", (key,))
        many = max(own - WAITING_MAX, min(own, every - WAITING_ALL_MAX))
        if many > 0:
            do.execute(
                "DELETE FROM notices WHERE number IN (SELECT number FROM notices "
                "WHERE receiver = ? ORDER BY number LIMIT ?)",
                (key, many),
            )
            do.execute("UPDATE receivers SET dropped = dropped + ? WHERE receiver = ?", (many, key))
            every -= many
    do.execute(
        "DELETE FROM receivers WHERE receiver IN (SELECT receiver FROM receivers "
        "WHERE receiver NOT IN (SELECT receiver FROM notices) "
        "ORDER BY used_ms DESC LIMIT ? OFFSET ?)",
        (EVER, RECEIVERS_MAX),
    )
