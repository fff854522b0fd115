"""The event log in a database: what it has acknowledged is never lost."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.store import formats, keeping, schema
from shoal.control.store.finding import LOOKED_MAX, Search, annotated, seq_at
from shoal.control.store.marks import Numbers, ServedNumbers
from shoal.control.store.schema import (
    Unreadable,
    checksum,
    event_of,
    event_row,
    job_of,
    job_row,
    snapshot_of,
)
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply import apply
from shoal.core.state.events.arrays import ArrayFinished
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.runs import JobFinished
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.database.base import Cursor, Database, Deposed, Row
from shoal.model.finding import EVERY_JOB, LAST_ENDED, Found, JobFilter, Mark, Order
from shoal.model.job import Job
from shoal.model.report import Ended
from shoal.ports import StoreDamaged, StoreError, Used

log = logging.getLogger("shoal.control")

SNAPSHOTS_KEPT = 2  # if the newest is damaged, the one before it loses nothing
# Of older ones, so that any moment is near one: one of this many events, and within these bytes.
EVENTS_PER_OLD_SNAPSHOT = 30_000
OLD_SNAPSHOT_BYTES_MAX = 256 << 20
NEWEST_EVENTS = 1_000  # the newest time is looked for among this many events
EVENTS_AT_ONCE = 5_000  # that are read when the log is replayed

_NO_END = 2**63 - 1
_TENANTS = "SELECT id, tenant FROM jobs"
_BEGINS = b'{"event":"ControllerStarted"'
_ENDS = (JobFinished.__name__, ArrayFinished.__name__)


class _When(msgspec.Struct):
    at_ms: int


_decode_when = msgspec.json.Decoder(_When).decode


class Warm(NamedTuple):
    """A state that followed the log up to an event, which is `newest`. `lost`: on the way it has
    seen events that are no longer in the log."""

    state: State
    seq: int
    newest: Recorded | None = None
    lost: bool = False


class WentBack(Deposed):
    """The database has lost events that were stored: only a new start from what is left helps."""


class EventStore:
    """One writer (the control loop), and readers in any thread, which never wait for it."""

    def __init__(self, database: Database, numbers: Numbers | None = None) -> None:
        self.database = database
        self.alarms = Alarms()
        self.snapshot_seq = 0
        # A state, and the number of the last event in it, for the next load to begin with. The
        # load takes it: nobody else may use it any more.
        self.warm: Warm | None = None
        self._numbers = numbers or ServedNumbers(database)
        self._generation = -1
        schema.prepare(database)
        formats.refuse_newer(database)
        self._last = self._newest(database.read)
        rows = database.read("SELECT value FROM meta WHERE key = 'unbroken'")
        self.unbroken_from: int = rows[0][0] if rows else 0

    # -- the log ---------------------------------------------------------------------------

    def load(self) -> tuple[State, int]:
        """Nothing that it makes is garbage, and looking for some took a third of the time."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._load()
        finally:
            if collecting:
                gc.enable()

    def _load(self) -> tuple[State, int]:
        warm, self.warm = self.warm, None
        if warm is not None and (warm.lost or not self._goes_on(warm)):
            # The log that was followed has other events than this one, and nodes may have seen
            # what they led to: no number of theirs may be given out again.
            log.error("%s has lost events that were stored", self.database.name)
            self._numbers.skip()
            warm = None
        if warm is None:
            state, start = self._snapshot()
        else:
            state, start = warm.state, warm.seq
            rows = self.database.read("SELECT max(seq) FROM snapshots")
            self.snapshot_seq = rows[0][0] or 0
        self._last = self.follow(state, start)
        return state, self._last

    def _goes_on(self, warm: Warm) -> bool:
        """Whether this log has the last event of that state, and not another one in its place."""
        there = self.events(warm.seq - 1, 1) if warm.seq else []
        if not warm.seq or warm.newest is None:
            return not warm.seq or [one.seq for one in there] == [warm.seq]
        return there == [warm.newest]

    def follow(self, state: State, seq: int) -> int:
        """Apply the events after `seq`, the last that the state knows; returns the last one now.
        If it raises, the state may not be used any more."""
        while True:
            rows = self.database.read(
                "SELECT seq, body, crc FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
                (seq, EVENTS_AT_ONCE),
            )
            begins = (isinstance(body, bytes) and body.startswith(_BEGINS) for _, body, _ in rows)
            if any(begins):  # perhaps a newer leader
                formats.refuse_newer(self.database)
            for row in rows:
                self._replay(state, seq, row)
                seq += 1
            if len(rows) < EVENTS_AT_ONCE:
                return seq

    def _snapshot(self) -> tuple[State, int]:
        for (seq,) in self.database.read("SELECT seq FROM snapshots ORDER BY seq DESC"):
            rows = self.database.read("SELECT body, crc FROM snapshots WHERE seq = ?", (seq,))
            if not rows:
                continue  # a leader has just replaced it by a newer one
            try:
                state = restore(snapshot_of(seq, *rows[0]), FUNCTIONS)
            except Unreadable as error:
                text = f"{self.database.name}: the snapshot at event {seq} is damaged ({error})"
                self.alarms.raise_("snapshot", f"{text}; an older one is used, nothing is lost")
                continue
            self.snapshot_seq = seq
            return state, seq
        self.snapshot_seq = 0
        return State(FUNCTIONS), 0

    def _replay(self, state: State, last: int, row: Row) -> None:
        seq, body, crc = row
        if seq != last + 1:
            raise self._damaged(f"event {last + 1} is missing")
        try:
            apply(state, event_of(seq, body, crc))
        except Unreadable as error:
            raise self._damaged(f"event {seq} cannot be read: {error}") from None
        except Exception as error:
            log.exception("event %s cannot be replayed", seq)
            what = f"event {seq} does not fit to those before it: {error!r}"
            raise self._damaged(what) from error

    def used(self, next_job: int, epoch: int) -> Used:
        used = self._numbers.floor(next_job, epoch)
        if used.first_job > next_job:
            text = f"{self.database.name} may lack its newest part: it does not know j{next_job}"
            text += f", but job numbers below j{used.first_job} were used"
            self.alarms.raise_("store old", text)
        return used

    def newest_ms(self) -> int:
        """No event that can be read is later than this."""
        rows = self.database.read(
            "SELECT body FROM events ORDER BY seq DESC LIMIT ?", (NEWEST_EVENTS,)
        )
        newest_ms = 0
        for (body,) in rows:
            try:
                newest_ms = max(newest_ms, _decode_when(body).at_ms)
            except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
                continue
        return newest_ms

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        self._numbers.cover(events)
        rows = [event_row(seq, event) for seq, event in enumerate(events, self._last + 1)]
        last = self._last + len(rows)
        ends = {row[1]: row[0] for row in rows if row[5] in _ENDS}
        jobs = [(*job_row(job), ends.get(job.id, last)) for job in finished]
        changes = [
            (body, crc, number)
            for number, _, _, body, crc, _ in annotated(
                events, {job.id for job in finished}, self.job
            )
        ]
        try:
            self._append(rows, jobs, changes)
        except WentBack:
            with contextlib.suppress(StoreError):
                self._numbers.skip()
            raise
        self._last = last
        return last

    def _append(self, rows: Sequence[Row], jobs: Sequence[Row], changes: Sequence[Row]) -> None:
        with self.database.transaction() as cursor:
            if self._generation != self.database.generation:
                self._look_at_end(cursor)
            if any(row[5] == ControllerStarted.__name__ for row in rows):
                formats.record(cursor)
            cursor.executemany(schema.INSERT_EVENT, rows)
            if jobs:
                cursor.executemany(schema.FORGET_JOB, [(row[1], row[0]) for row in jobs])
                cursor.executemany(schema.INSERT_JOB, jobs)
            if changes:
                cursor.executemany(schema.CHANGE_JOB, changes)
        self._generation = self.database.generation

    def _look_at_end(self, cursor: Cursor) -> None:
        """Behind a connection that was made again may be another server, or the end of a commit
        whose answer was lost."""
        there, name = self._newest(cursor.execute), self.database.name
        if there > self._last:
            raise StoreError(f"{name} has newer events than this controller: it reads them first")
        if there < self._last:
            lost = self._last - there
            raise WentBack(
                f"{name} has lost the newest {lost} events, so this controller starts again "
                "from those that are left: another server took over that did not have them yet"
            )

    def _newest(self, read: Callable[[str], list[Row]]) -> int:
        rows = [*read("SELECT max(seq) FROM events"), *read("SELECT max(seq) FROM snapshots")]
        return max(seq or 0 for (seq,) in rows)

    @property
    def tight(self) -> bool:
        return False  # a server's disk is its administrator's

    def relax(self) -> None: ...

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        """It took a while to make: meanwhile another server may have taken over that lacks the
        newest events, and a snapshot of those would bring them back by halves."""
        keeping.fill_in(self.database)
        size = keeping.bytes_since(self.database)
        with self.database.transaction() as cursor:
            if self._newest(cursor.execute) < seq <= self._last:
                raise StoreError(f"{self.database.name} has lost events that it is made of")
            newest = cursor.execute(
                "SELECT seq FROM snapshots WHERE seq < ? ORDER BY seq DESC LIMIT ?",
                (seq, SNAPSHOTS_KEPT - 1),
            )
            needed = min((old for (old,) in newest), default=seq)
            cursor.execute(schema.INSERT_SNAPSHOT, (seq, body, checksum(seq, body)))
            dropped = keeping.drop_finished(cursor)
            oldest = keeping.cut_log(cursor, seq, size, self.snapshot_seq, needed)
            for (old,) in self._superfluous(cursor, oldest):
                cursor.execute("DELETE FROM snapshots WHERE seq = ?", (old,))
        self.snapshot_seq = seq
        return dropped

    def _superfluous(self, cursor: Cursor, oldest: int) -> list[Row]:
        """Snapshots to drop: those that another one stands for, those whose events are dropped,
        and the oldest beyond the bytes."""
        return cursor.execute(
            """SELECT seq FROM (
                SELECT seq,
                    row_number() OVER (ORDER BY seq DESC) AS age,
                    min(seq) OVER (PARTITION BY seq / ?) AS first,
                    sum(length(body)) OVER (ORDER BY seq DESC) AS bytes
                FROM snapshots) AS kept
            WHERE age > ? AND (seq != first OR seq < ? OR bytes > ?)""",
            (
                EVENTS_PER_OLD_SNAPSHOT,
                SNAPSHOTS_KEPT,
                oldest,
                OLD_SNAPSHOT_BYTES_MAX,
            ),
        )

    # -- reading ---------------------------------------------------------------------------

    def events(
        self, after: int, limit: int, job: str = "", node: str = "", notable: bool = False
    ) -> list[Recorded]:
        """A negative `after` counts from the end. Rows that cannot be read are left out."""
        order, last = "seq", 0
        if after < 0:
            order, limit, last, after = "seq DESC", min(limit, -after), after, 0
        where, values = ["seq > ?"], list[object]([after])
        if notable:
            where.append(schema.NOTABLE)
        for column, value in (("job", job), ("node", node)):
            if value:
                where.append(f"{column} = ?")
                values.append(value)
        # Two indexes share the events of jobs.
        parts = [[*where, schema.BETWEEN], [*where, schema.SAVED]] if job else [where]
        queries = [
            f"SELECT seq, body, crc FROM events WHERE {' AND '.join(part)} ORDER BY {order} LIMIT ?"
            for part in parts
        ]
        rows = [row for query in queries for row in self.database.read(query, (*values, limit))]
        rows.sort(key=itemgetter(0), reverse=last < 0)
        rows = rows[:limit]
        if last < 0:
            rows.reverse()
        return self._recorded(rows)

    def policies(self, limit: int) -> list[Recorded]:
        query = f"SELECT seq, body, crc FROM events WHERE {schema.POLICIES}"
        rows = self.database.read(f"{query} ORDER BY seq DESC LIMIT ?", (limit,))
        return self._recorded(rows)

    def history(self, job: str, limit: int) -> list[Recorded]:
        """From the log, and before that what was kept of the job when the log was cut."""
        found = self._history("events", job, limit)
        if len(found) < limit:
            found = [*self._history("job_events", job, limit - len(found)), *found]
        return self._recorded(found)

    def _history(self, table: str, job: str, limit: int) -> list[Row]:
        query = f"""
            WITH shown AS (SELECT seq FROM {table} WHERE job = ?1 AND {schema.BETWEEN}
                          ORDER BY seq DESC LIMIT ?2),
            marks AS (SELECT seq FROM shown UNION SELECT ?3),
            saved AS (SELECT DISTINCT (SELECT max(seq) FROM {table}
                          WHERE job = ?1 AND {schema.SAVED} AND seq < marks.seq) AS seq FROM marks)
            SELECT seq, body, crc FROM {table}
            WHERE seq IN (SELECT seq FROM shown UNION SELECT seq FROM saved) ORDER BY seq"""
        return self.database.read(query, (job, limit, _NO_END))

    def _recorded(self, rows: list[Row]) -> list[Recorded]:
        found = []
        for seq, body, crc in rows:
            try:
                found.append(Recorded(seq, event_of(seq, body, crc)))
            except Unreadable as error:
                self._left_out(f"event {seq}", error)
        return found

    def job(self, job_id: str) -> Job | None:
        found = self._jobs("WHERE id = ?", (job_id,))
        return found[0] if found else None

    def finished(
        self, limit: int, after: int = -1, wanted: JobFilter = EVERY_JOB, before: str = ""
    ) -> list[Job]:
        place = None
        if before:
            rows = self.database.read("SELECT ended, number FROM jobs WHERE id = ?", (before,))
            if not rows:
                return []
            place = (rows[0][0], rows[0][1])
        search = self._search(wanted, LAST_ENDED, after)
        return [job for _, job in search.page(self._ended, limit, place, _NO_END).jobs]

    def listed(self, limit: int, wanted: JobFilter, order: Order, mark: Mark | None) -> Found:
        search = self._search(wanted, order)
        return search.page(self._ended, limit, mark, LOOKED_MAX)

    def count(self, wanted: JobFilter) -> int:
        search = self._search(wanted, LAST_ENDED)
        query = f"SELECT count(*) FROM jobs {search.condition}"
        return int(self.database.read(query, tuple(search.values))[0][0])

    def _search(self, wanted: JobFilter, order: Order, after: int = -1) -> Search:
        since = self.seq_at(wanted.since_ms) if wanted.since_ms else 0
        return Search(self.database.words, wanted, order, max(after, since or -1))

    def seq_at(self, at_ms: int) -> int:
        def time_of(seq: int) -> int | None:
            query = "SELECT seq, body, crc FROM events WHERE seq >= ? ORDER BY seq LIMIT 1"
            found = self._recorded(self.database.read(query, (seq,)))
            return found[0].event.at_ms if found else None

        return seq_at(at_ms, self._last, time_of)

    def tenants(self) -> dict[str, str]:
        """Of finished jobs."""
        return {str(job): tenant or "" for job, tenant in self.database.read(_TENANTS)}

    def mark(self, seq: int) -> int | None:
        rows = self.database.read("SELECT crc FROM events WHERE seq = ?", (seq,))
        return rows[0][0] or 0 if rows else None

    def keyed(self, key: str) -> str | None:
        rows = self.database.read("SELECT id FROM jobs WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def ended(self, job_id: str) -> Ended | None:
        job = self.job(job_id)
        if job is None or job.outcome is None:
            return None
        return Ended(job.id, job.spec.tenant, job.outcome, job.why, job.spec.name or "")

    def _jobs(self, where: str, values: tuple[object, ...]) -> list[Job]:
        return [job for _, _, job in self._ended(where, values) if job is not None]

    def _ended(self, where: str, values: tuple[object, ...]) -> list[tuple[int, int, Job | None]]:
        """With the numbers and ends of jobs; None in place of a record that cannot be read."""
        found = []
        query = f"SELECT number, ended, body, crc FROM jobs {where}"
        for number, ended, body, crc in self.database.read(query, values):
            job = None
            try:
                job = job_of(number, body, crc)
            except Unreadable as error:
                self._left_out(f"the record of j{number}", error)
            found.append((number, ended, job))
        return found

    def _left_out(self, what: str, error: Exception) -> None:
        """Leave it out: it is history, and no live job depends on it."""
        text = f"{self.database.name}: {what} is damaged ({error}) and left out"
        self.alarms.raise_("history", text)

    def _damaged(self, what: str) -> StoreDamaged:
        return self.database.damaged(what)

    def close(self) -> None:
        self.database.close()
