"""Finding finished jobs and moments in the store, without decoding what cannot be meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from shoal.control.store.schema import JobRow, encode, job_row
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobLabelled, JobNoted
from shoal.database.base import Words
from shoal.model.array import ELEMENT_NUMBERS
from shoal.model.finding import ENDED, LAST_ENDED, Found, JobFilter, Mark, Order
from shoal.model.job import Job
from shoal.model.labels import term_of

ROWS_AT_ONCE = 500
NO_ELEMENT = "id NOT LIKE '%.%'"
OF_ARRAY = "id >= ? AND id < ?"  # between "j7." and "j7/": text is compared by its bytes

LOOKED_MAX = 5_000  # records that one request for a page decodes
INDEXED = {"ended": "ended", "submitted": "number"}  # the orders that the database has itself

Record = tuple[int, int, Job | None]  # its number, the event that ended it, what it says
ReadJobs = Callable[[str, tuple[object, ...]], list[Record]]


class Search:
    """Finished jobs that match, in one order, from one place on. Elements are left out, unless
    `wanted.array` is named. `words`: how the database says it; `after`: only those that ended after
    this event."""

    def __init__(
        self, words: Words, wanted: JobFilter, order: Order = LAST_ENDED, after: int = -1
    ) -> None:
        self.wanted, self.order = wanted, order
        self.where = ["ended > ?", OF_ARRAY if wanted.array else NO_ELEMENT]
        named = (f"{wanted.array}.", f"{wanted.array}/") if wanted.array else ()
        self.values: list[object] = [after, *named]
        if wanted.first_job:
            self.where.append("number >= ?")
            self.values.append(wanted.first_job * ELEMENT_NUMBERS)
        for part in _parts(wanted):
            self.where.append(words.contains.format(column="body"))
            self.values.append(part)
        for word in _needles(wanted):
            self.where.append(words.like.format(column="body"))
            self.values.append(f"%{word}%")

    @property
    def condition(self) -> str:
        return f"WHERE {' AND '.join(self.where)}"

    def page(self, read: ReadJobs, limit: int, mark: Mark | None, most: int) -> Found:
        """`most`: how many records may be looked at."""
        if self.order.by not in INDEXED:
            return self._sorted(read, limit, mark, most)
        column, down = INDEXED[self.order.by], self.order.down
        place, found, looked = mark, list[tuple[Mark, Job]](), 0
        while True:
            many = min(ROWS_AT_ONCE if self.wanted.given else limit - len(found), most - looked)
            rows = self._read(read, column, place, many, down)
            for number, end, job in rows:
                place = (end if column == "ended" else number, number)
                if job is not None and self.wanted.matches(job):
                    found.append((place, job))
                    if len(found) == limit:
                        return Found(found, place)
            looked += len(rows)
            if len(rows) < many:
                return Found(found)
            if looked >= most:
                return Found(found, place)

    def _read(
        self, read: ReadJobs, column: str, place: Mark | None, many: int, down: bool
    ) -> list[Record]:
        where, values = self.condition, list(self.values)
        if place is not None:
            where += f" AND ({column}, number) {'<' if down else '>'} (?, ?)"
            values += place
        way = "DESC" if down else "ASC"
        return read(f"{where} ORDER BY {column} {way}, number {way} LIMIT ?", (*values, many))

    def _sorted(self, read: ReadJobs, limit: int, mark: Mark | None, most: int) -> Found:
        """By what only the records say: of those that ended last, the first in this order."""
        order, place, looked = self.order, None, 0
        best: list[tuple[Mark, Job]] = []
        more = False
        while looked < most:
            many = min(ROWS_AT_ONCE, most - looked)
            rows = self._read(read, "ended", place, many, down=True)
            marked = (
                (order.mark(job, end), job)
                for _, end, job in rows
                if job is not None and self.wanted.matches(job)
            )
            best += [row for row in marked if mark is None or order.after(row[0], mark)]
            more = more or len(best) > limit
            best = order.first(best, limit)
            looked += len(rows)
            if len(rows) < many:
                return Found(best, best[-1][0] if more else None)
            place = (rows[-1][1], rows[-1][0])
        return Found(best, best[-1][0] if more else None, left_out=True)


def _needles(wanted: JobFilter) -> list[str]:
    """A part of each word that the record contains in small or capital letters: what JSON writes
    as it is. A label is written otherwise than people write it, so "=" separates."""
    runs = (re.findall(r"[a-z0-9_.:/-]+", word) for word in wanted.text.lower().split())
    return [max(found, key=len) for found in runs if found]


def _parts(wanted: JobFilter) -> list[bytes]:
    """Bytes that the record of such a job contains; others may contain them, too."""
    parts = []
    for name in ("tenant", "user", "node", "service"):
        if value := getattr(wanted, name):
            parts.append(b'"%s":%s' % (name.encode(), encode(value)))
    outcomes = [state for state in wanted.states if state in ENDED]
    if len(wanted.states) == 1 and outcomes:
        parts.append(b'"outcome":%s' % encode(outcomes[0]))
    for condition in wanted.labels:
        term = term_of(condition)
        if term.holds:
            value = encode(term.values[0]) if len(term.values) == 1 else b""
            parts.append(b"%s:%s" % (encode(term.key), value))
    if wanted.name:
        literal = max(re.split(r"\*|\?|\[[^\]]*\]?", wanted.name), key=len)
        parts += [encode(literal)[1:-1]] if literal else []
    return parts


def seq_at(at_ms: int, last: int, time_of: Callable[[int], int | None]) -> int:
    """The last event before this time: their times never decrease. `time_of` gives the time of the
    first event from that number on; None: there is none."""
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        time_ms = time_of(middle)
        if time_ms is not None and time_ms < at_ms:
            low = middle
        else:
            high = middle - 1
    return low


def annotated(
    events: Sequence[Event], now: set[str], read: Callable[[str], Job | None]
) -> list[JobRow]:
    """The records of jobs that ended earlier, not `now`, and are labeled or noted now."""
    found: dict[str, Job] = {}
    for event in events:
        if isinstance(event, JobLabelled | JobNoted) and event.job not in now:
            job = found.get(event.job) or read(event.job)
            if job is not None:
                found[event.job] = event.changed(job)
    return [job_row(job) for job in found.values()]
