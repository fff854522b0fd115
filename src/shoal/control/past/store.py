"""Where bars are kept: a row for each, the marks of the book, and their place in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from shoal.control.past.bars import Bar, Book, Changed, JobMark, NodeMark, Span
from shoal.database.base import Cursor, Row
from shoal.database.sqlite import Place, closed, renewable

log = logging.getLogger("shoal.past")

PART, VERSION = "bars", 1
# More than the log has room for, so bars reach back further; the oldest go first.
BARS_KEPT = 500_000
SPANS_KEPT = 100_000
DROPPED_AT_ONCE = 5_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bars (
    number {integer} PRIMARY KEY, node TEXT NOT NULL, gpus TEXT NOT NULL, milli {integer} NOT NULL,
    job TEXT NOT NULL, attempt {integer} NOT NULL, member {integer} NOT NULL,
    begin_ms {integer} NOT NULL, end_ms {integer}, cause TEXT NOT NULL, why TEXT NOT NULL,
    name TEXT NOT NULL, tenant TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS bars_by_end ON bars (end_ms);
CREATE INDEX IF NOT EXISTS bars_by_job ON bars (job);
CREATE TABLE IF NOT EXISTS bar_spans (
    number {integer} PRIMARY KEY, node TEXT NOT NULL, state TEXT NOT NULL,
    begin_ms {integer} NOT NULL, end_ms {integer}, why TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS bar_spans_by_end ON bar_spans (end_ms);
CREATE TABLE IF NOT EXISTS bar_marks (key TEXT PRIMARY KEY, body {blob} NOT NULL);
CREATE TABLE IF NOT EXISTS bar_place (
    one {integer} PRIMARY KEY, seq {integer} NOT NULL, mark {integer} NOT NULL,
    known_ms {integer} NOT NULL, oldest_ms {integer} NOT NULL)
"""
_PUT_BAR = """
INSERT INTO bars (number, node, gpus, milli, job, attempt, member, begin_ms, end_ms, cause, why,
    name, tenant) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (number) DO UPDATE SET
    end_ms = excluded.end_ms, cause = excluded.cause, why = excluded.why
"""
_PUT_SPAN = """
INSERT INTO bar_spans (number, node, state, begin_ms, end_ms, why) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (number) DO UPDATE SET end_ms = excluded.end_ms
"""
_PUT_MARK = """
INSERT INTO bar_marks (key, body) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET body = excluded.body
"""
_PUT_PLACE = """
INSERT INTO bar_place (one, seq, mark, known_ms, oldest_ms) VALUES (1, ?, ?, ?, ?)
ON CONFLICT (one) DO UPDATE SET seq = excluded.seq, mark = excluded.mark,
    known_ms = excluded.known_ms, oldest_ms = excluded.oldest_ms
"""
_BAR = "number, node, gpus, milli, job, attempt, member, begin_ms, end_ms, cause, why"
_SHOWN = "node, gpus, job, attempt, member, begin_ms, end_ms, cause, why, name, tenant, milli"
_JOB, _NODE = "j/", "n/"

Owner = tuple[str, str]  # the name and the tenant of a job


class PlaceInLog(NamedTuple):
    """Everything up to the event `seq`, whose checksum is `mark`, is in the bars. All that ended
    before `oldest_ms` may be missing."""

    seq: int
    mark: int
    known_ms: int
    oldest_ms: int


class ShownBar(NamedTuple):
    node: str
    gpus: str  # "0,1"
    job: str
    attempt: int
    member: int
    begin_ms: int
    end_ms: int | None
    cause: str
    why: str
    name: str
    tenant: str
    milli: int


class ShownSpan(NamedTuple):
    node: str
    state: str
    begin_ms: int
    end_ms: int | None
    why: str


class BarStore:
    """One thread writes, any thread reads. All of it can be made again from the log, so a file is
    not synced, and one that cannot be read is put aside."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._database = renewable(self._place, PART, VERSION, _SCHEMA, log)
        self._bars = self._count("bars")
        self._spans = self._count("bar_spans")

    def _count(self, table: str) -> int:
        [(count,)] = self._database.read(f"SELECT count(*) FROM {table}")
        return int(count)

    # -- the book --------------------------------------------------------------------------

    def place(self) -> PlaceInLog | None:
        rows = self._database.read("SELECT seq, mark, known_ms, oldest_ms FROM bar_place")
        return PlaceInLog(*rows[0]) if rows else None

    def load(self) -> Book:
        """The book as it was when it was last written."""
        book = Book()
        for row in self._database.read(f"SELECT {_BAR} FROM bars WHERE end_ms IS NULL"):
            number, node, gpus, *rest = row
            book.resume(Bar(number, node, gpus_of(gpus), *rest))
        columns = "number, node, state, begin_ms, end_ms, why"
        for row in self._database.read(f"SELECT {columns} FROM bar_spans WHERE end_ms IS NULL"):
            book.spans[row[1]] = Span(*row)
        for key, body in self._database.read("SELECT key, body FROM bar_marks"):
            if key.startswith(_JOB):
                book.jobs[key[len(_JOB) :]] = msgspec.msgpack.decode(body, type=JobMark)
            else:
                book.nodes[key[len(_NODE) :]] = msgspec.msgpack.decode(body, type=NodeMark)
        book.next_bar = self._last("bars", book) + 1
        book.next_span = self._last("bar_spans", book) + 1
        return book

    def _last(self, table: str, book: Book) -> int:
        """Also of bars that are only in marks: their numbers must not be given out again."""
        [(last,)] = self._database.read(f"SELECT max(number) FROM {table}")
        away = (bar.number for mark in book.jobs.values() for bar in mark.away.values())
        return max([last or 0, *away])

    def begin_again(self, from_ms: int) -> None:
        """Forget the book, and all bars that had not ended by then: they are made again."""
        with self._database.transaction() as cursor:
            for table in ("bars", "bar_spans"):
                cursor.execute(
                    f"DELETE FROM {table} WHERE end_ms IS NULL OR end_ms > ?", (from_ms,)
                )
            cursor.execute("DELETE FROM bar_marks")
            cursor.execute("DELETE FROM bar_place")
        self._bars, self._spans = self._count("bars"), self._count("bar_spans")

    def next_numbers(self) -> tuple[int, int]:
        return self._last("bars", Book()) + 1, self._last("bar_spans", Book()) + 1

    def write(self, changed: Changed, owners: Mapping[str, Owner], place: PlaceInLog) -> PlaceInLog:
        """One transaction, with the place in the log, which is returned as it was written."""
        bars = [_bar_row(bar, owners.get(bar.job, ("", ""))) for bar in changed.bars]
        spans = [msgspec.structs.astuple(span) for span in changed.spans]
        gone = [(_JOB + job,) for job, mark in changed.jobs.items() if mark is None]
        marks = [
            (_JOB + job, msgspec.msgpack.encode(mark))
            for job, mark in changed.jobs.items()
            if mark is not None
        ]
        marks += [(_NODE + n, msgspec.msgpack.encode(mark)) for n, mark in changed.nodes.items()]
        with self._database.transaction() as cursor:
            cursor.executemany(_PUT_BAR, bars)
            cursor.executemany(_PUT_SPAN, spans)
            cursor.executemany("DELETE FROM bar_marks WHERE key = ?", gone)
            cursor.executemany(_PUT_MARK, marks)
            dropped_ms = self._trim(cursor, len(bars), len(spans))
            place = place._replace(oldest_ms=max(place.oldest_ms, dropped_ms))
            cursor.execute(_PUT_PLACE, place)
        return place

    def _trim(self, cursor: Cursor, bars: int, spans: int) -> int:
        """Returns the latest end among what is dropped. Rows that were there already are counted
        twice, so the count is taken again before anything goes."""
        self._bars, self._spans = self._bars + bars, self._spans + spans
        latest_ms = 0
        for table, kept in (("bars", BARS_KEPT), ("bar_spans", SPANS_KEPT)):
            counted = self._bars if table == "bars" else self._spans
            if counted <= kept + DROPPED_AT_ONCE:
                continue
            [(count,)] = cursor.execute(f"SELECT count(*) FROM {table}")
            if count > kept:
                query = f"SELECT number FROM {table} WHERE end_ms IS NOT NULL ORDER BY number"
                dropped = cursor.execute(
                    f"DELETE FROM {table} WHERE number IN ({query} LIMIT ?) RETURNING end_ms",
                    (count - kept,),
                )
                latest_ms = max([latest_ms, *(end_ms for (end_ms,) in dropped)])
                count -= len(dropped)
            if table == "bars":
                self._bars = count
            else:
                self._spans = count
        return latest_ms

    # -- what was in a range ---------------------------------------------------------------

    def bars(self, from_ms: int, to_ms: int, node: str = "", job: str = "") -> list[ShownBar]:
        """That overlap the range; in the order of their beginnings."""
        rows = self._between("bars", _SHOWN, from_ms, to_ms, (("node", node), ("job", job)))
        return [ShownBar(*row) for row in rows]

    def spans(self, from_ms: int, to_ms: int, node: str = "") -> list[ShownSpan]:
        columns = "node, state, begin_ms, end_ms, why"
        rows = self._between("bar_spans", columns, from_ms, to_ms, (("node", node),))
        return [ShownSpan(*row) for row in rows]

    def _between(
        self,
        table: str,
        columns: str,
        from_ms: int,
        to_ms: int,
        wanted: Sequence[tuple[str, str]],
    ) -> list[Row]:
        where, values = "", list[object]()
        for column, value in wanted:
            if value:
                where += f" AND {column} = ?"
                values.append(value)
        query = (
            f"SELECT {columns} FROM {table} WHERE end_ms > ? AND begin_ms < ?{where} "
            f"UNION ALL SELECT {columns} FROM {table} WHERE end_ms IS NULL AND begin_ms < ?{where} "
            "ORDER BY begin_ms"
        )
        return self._database.read(query, (from_ms, to_ms, *values, to_ms, *values))

    def close(self) -> None:
        closed(self._place, self._database)


def gpus_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _bar_row(bar: Bar, owner: Owner) -> tuple[object, ...]:
    return (
        bar.number,
        bar.node,
        ",".join(map(str, bar.gpus)),
        bar.milli,
        bar.job,
        bar.attempt,
        bar.member,
        bar.begin_ms,
        bar.end_ms,
        bar.cause,
        bar.why,
        *owner,
    )
