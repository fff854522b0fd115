"""The embedded store: one SQLite file that loses nothing it has acknowledged."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.store.finding import annotated, find_jobs, seq_at
from shoal.control.store.marks import Numbers
from shoal.control.store.rows import (
    JobRow,
    Unreadable,
    checksum,
    event_of,
    event_row,
    job_of,
    job_row,
    snapshot_of,
)
from shoal.control.store.spare import Spare
from shoal.core.state.apply import apply
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.model.events import QUIET, ArrayFinished, Event, JobFinished, Recorded
from shoal.model.finding import EVERY_JOB, JobFilter
from shoal.model.job import Job
from shoal.model.report import Ended
from shoal.ports import StoreDamaged, StoreError, StoreFull

log = logging.getLogger("shoal.control")

SCHEMA_VERSION = 3
# History beyond these is dropped with a snapshot; live jobs are never dropped.
EVENTS_KEPT = 1_000_000
FINISHED_JOBS_KEPT = 100_000
SNAPSHOTS_KEPT = 2  # if the newest is damaged, the one before it loses nothing
# Another program may hold the file for a moment (a backup, say); longer is an error.
BUSY_TIMEOUT_S = 2.0
TIGHT_PAGES, USUAL_PAGES = 16, 1_000  # of the journal, before they are put into the file
NEWEST_EVENTS = 1_000  # the newest time is looked for among this many events

# A long run saves thousands of times: a search for other events must not read all of those.
# The conditions below are those of partial indexes, so a query uses the very same words.
_SAVED = "kind = 'JobCheckpointed'"
_BETWEEN = "kind != 'JobCheckpointed'"
_NOTABLE = f"kind NOT IN ({', '.join(repr(kind) for kind in QUIET)})"

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, job TEXT, node TEXT, body BLOB NOT NULL, crc INTEGER,
    kind TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS events_by_job ON events (job, seq) WHERE job IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_by_node ON events (node, seq) WHERE node IS NOT NULL;
CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, body BLOB NOT NULL,
    crc INTEGER, ended INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS events_saved ON events (job, seq) WHERE {_SAVED};
CREATE INDEX IF NOT EXISTS events_between ON events (job, seq) WHERE {_BETWEEN};
CREATE INDEX IF NOT EXISTS events_notable ON events (seq) WHERE {_NOTABLE};
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended);
"""

# What each format lacks beside the next. Rows without a checksum stay as they are; an event's body
# begins {"event":"KIND", and the event that ended a job may be dropped already.
_STEPS = {
    1: """
ALTER TABLE events ADD COLUMN crc INTEGER;
ALTER TABLE snapshots ADD COLUMN crc INTEGER;
ALTER TABLE jobs ADD COLUMN crc INTEGER
""",
    2: """
ALTER TABLE events ADD COLUMN kind TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN ended INTEGER NOT NULL DEFAULT 0;
UPDATE events SET kind =
    substr(CAST(body AS TEXT), 11, instr(substr(CAST(body AS TEXT), 11), '"') - 1);
UPDATE jobs SET ended = coalesce(
    (SELECT max(seq) FROM events WHERE job = jobs.id AND kind = 'JobFinished'), 0)
""",
}

INSERT_EVENT = "INSERT INTO events (seq, job, node, body, crc, kind) VALUES (?, ?, ?, ?, ?, ?)"
# A key belongs to the first job that had it; a second one, which an old log may hold, must not keep
# what follows from being stored. An element that was retried and its array replace their records.
INSERT_JOB = """
INSERT OR REPLACE INTO jobs (number, id, key, body, crc, ended)
SELECT ?1, ?2, iif(EXISTS (SELECT 1 FROM jobs WHERE key = ?3 AND id != ?2), NULL, ?3), ?4, ?5, ?6
"""

_ENDS = (JobFinished.__name__, ArrayFinished.__name__)
_DAMAGE = ("malformed", "not a database", "no such column", "no such table")


class _When(msgspec.Struct):
    at_ms: int


_decode_when = msgspec.json.Decoder(_When).decode


class SqliteStore:
    """One writer (the control loop), and a connection for each thread that reads: readers never
    wait for the writer."""

    def __init__(
        self, path: Path, numbers: Numbers | None = None, spare: Path | None = None
    ) -> None:
        self._path = path
        self._numbers = numbers or Numbers(None)
        self.alarms = Alarms()
        self.spare = Spare(spare)
        self.snapshot_seq = 0
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        with self._clear_errors():
            self._writer = self._connect()
            self._migrate()
            self._last = self._writer.execute("SELECT max(seq) FROM events").fetchone()[0] or 0
            row = self._writer.execute("SELECT value FROM meta WHERE key = 'unbroken'").fetchone()
            self.unbroken_from = row[0] if row else 0
            self._reader = self._local.reader = self._connect()

    def _migrate(self) -> None:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= version <= SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} was written by another version of shoal (its format is {version}, "
                f"this one reads {SCHEMA_VERSION})"
            )
        with self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            missing = [_STEPS[known] for known in range(version, SCHEMA_VERSION) if version]
            for statement in ";".join([*missing, _SCHEMA]).split(";"):
                self._writer.execute(statement)
            self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def load(self) -> tuple[State, int]:
        with self._clear_errors():
            snapshots = self._writer.execute(
                "SELECT seq, body, crc FROM snapshots ORDER BY seq DESC"
            ).fetchall()
            for seq, body, crc in snapshots:
                try:
                    start, state = seq, restore(snapshot_of(seq, body, crc))
                    break
                except Unreadable as error:
                    text = f"{self._path}: the snapshot at event {seq} is damaged ({error})"
                    self.alarms.raise_("snapshot", f"{text}; an older one is used, nothing is lost")
            else:
                start, state = 0, State()
            self._last = self.snapshot_seq = start
            for seq, body, crc in self._writer.execute(
                "SELECT seq, body, crc FROM events WHERE seq > ? ORDER BY seq", (start,)
            ):
                self._replay(state, seq, body, crc)
        return state, self._last

    def _replay(self, state: State, seq: int, body: bytes, crc: int | None) -> None:
        if seq != self._last + 1:
            raise self._damaged(f"event {self._last + 1} is missing")
        try:
            apply(state, event_of(seq, body, crc))
        except Unreadable as error:
            raise self._damaged(f"event {seq} cannot be read: {error}") from None
        except Exception as error:
            log.exception("event %s cannot be replayed", seq)
            what = f"event {seq} does not fit to those before it: {error!r}"
            raise self._damaged(what) from error
        self._last = seq

    def used(self, next_job: int, epoch: int) -> tuple[int, int]:
        floor = self._numbers.floor(next_job, epoch)
        return floor.job, floor.epoch

    def newest_ms(self) -> int:
        """No event that can be read is later than this."""
        with self._clear_errors():
            rows = self._writer.execute(
                "SELECT body FROM events ORDER BY seq DESC LIMIT ?", (NEWEST_EVENTS,)
            ).fetchall()
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
        changes = annotated(events, {job.id for job in finished}, self.job)
        try:
            self._append(rows, jobs, changes)
        except StoreFull as error:
            if not self.spare.give_up():
                raise
            self.alarms.raise_("full", f"{error}; new jobs are refused until then")
            # The journal is overwritten again and again, and does not use up the freed room.
            self._writer.execute(f"PRAGMA wal_autocheckpoint = {TIGHT_PAGES}")
            self._append(rows, jobs, changes)
        self.relax()
        self._last = last
        return last

    def relax(self) -> None:
        if self.spare.tight and self.spare.take():
            self._writer.execute(f"PRAGMA wal_autocheckpoint = {USUAL_PAGES}")
            self.alarms.clear("full")

    @property
    def tight(self) -> bool:
        return self.spare.tight

    def _append(
        self,
        rows: Sequence[tuple[Any, ...]],
        jobs: Sequence[tuple[Any, ...]],
        changes: Sequence[JobRow],
    ) -> None:
        with self._clear_errors(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(INSERT_EVENT, rows)
            if jobs:
                self._writer.executemany(INSERT_JOB, jobs)
            for number, _, _, body, crc in changes:
                row = (body, crc, number)
                self._writer.execute("UPDATE jobs SET body = ?, crc = ? WHERE number = ?", row)

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        with self._clear_errors(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            row = (seq, body, checksum(seq, body))
            self._writer.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)
            self._writer.execute(
                "DELETE FROM snapshots WHERE seq NOT IN "
                "(SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )
            self._writer.execute("DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
            dropped = self._writer.execute(
                "DELETE FROM jobs WHERE number IN "
                "(SELECT number FROM jobs ORDER BY ended DESC, number DESC LIMIT -1 OFFSET ?) "
                "RETURNING id",
                (FINISHED_JOBS_KEPT,),
            ).fetchall()
        self.snapshot_seq = seq
        return [job_id for (job_id,) in dropped]

    def events(
        self, after: int, limit: int, job: str = "", node: str = "", notable: bool = False
    ) -> list[Recorded]:
        """A negative `after` counts from the end. Rows that cannot be read are left out."""
        where, values = ["seq > ?"], [after]
        if notable:
            where.append(_NOTABLE)
        for column, value in (("job", job), ("node", node)):
            if value:
                where.append(f"{column} = ?")
                values.append(value)  # type: ignore[arg-type]
        order = "seq"
        if after < 0:
            where[0], values[0] = "seq > ?", 0
            order, limit = "seq DESC", min(limit, -after)
        query = f"SELECT seq, body, crc FROM events WHERE {' AND '.join(where)}"
        rows = self._read(f"{query} ORDER BY {order} LIMIT ?", (*values, limit))
        if after < 0:
            rows.reverse()
        return self._recorded(rows)

    def history(self, job: str, limit: int) -> list[Recorded]:
        query = f"""
            WITH shown AS (SELECT seq FROM events WHERE job = ?1 AND {_BETWEEN}
                          ORDER BY seq DESC LIMIT ?2),
            marks AS (SELECT seq FROM shown UNION SELECT ?3),
            saved AS (SELECT DISTINCT (SELECT max(seq) FROM events
                          WHERE job = ?1 AND {_SAVED} AND seq < marks.seq) AS seq FROM marks)
            SELECT seq, body, crc FROM events
            WHERE seq IN (SELECT seq FROM shown UNION SELECT seq FROM saved) ORDER BY seq"""
        return self._recorded(self._read(query, (job, limit, 2**63 - 1)))

    def _recorded(self, rows: list[tuple[Any, ...]]) -> list[Recorded]:
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
            rows = self._read("SELECT ended, number FROM jobs WHERE id = ?", (before,))
            if not rows:
                return []
            place = (rows[0][0], rows[0][1])
        return find_jobs(self._ended, limit, after, place, wanted)

    def seq_at(self, at_ms: int) -> int:
        def time_of(seq: int) -> int | None:
            query = "SELECT seq, body, crc FROM events WHERE seq >= ? ORDER BY seq LIMIT 1"
            found = self._recorded(self._read(query, (seq,)))
            return found[0].event.at_ms if found else None

        return seq_at(at_ms, self._last, time_of)

    def keyed(self, key: str) -> str | None:
        rows = self._read("SELECT id FROM jobs WHERE key = ?", (key,))
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
        for number, ended, body, crc in self._read(query, values):
            job = None
            try:
                job = job_of(number, body, crc)
            except Unreadable as error:
                self._left_out(f"the record of j{number}", error)
            found.append((number, ended, job))
        return found

    def _read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        reader: sqlite3.Connection | None = getattr(self._local, "reader", None)
        with self._clear_errors():
            if reader is None:
                reader = self._local.reader = self._connect()
            return reader.execute(query, values).fetchall()

    def _left_out(self, what: str, error: Exception) -> None:
        """Leave it out: it is history, and no live job depends on it."""
        self.alarms.raise_("history", f"{self._path}: {what} is damaged ({error}) and left out")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an acknowledged event survives power loss
        self._connections.append(connection)
        return connection

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            message = str(error)
            if any(word in message for word in _DAMAGE):
                raise self._damaged(message) from error
            kind = StoreFull if "full" in message else StoreError
            raise kind(self._advice(message)) from error

    def _damaged(self, what: str) -> StoreDamaged:
        return StoreDamaged(
            f"{self._path} is damaged ({what}). Jobs on the nodes go on. Put a copy of the file "
            f"back, or save what can be read with: shoal salvage --home {self._path.parent}"
        )

    def _advice(self, message: str) -> str:
        if "full" in message:
            return f"the disk that holds {self._path} is full: free some space; nothing was lost"
        if "locked" in message or "busy" in message:
            return f"{self._path} is locked by another program: end it, then try again"
        if "readonly" in message or "unable to open" in message:
            return f"{self._path} cannot be written ({message}): check its owner and the disk"
        return f"{self._path}: {message}"
