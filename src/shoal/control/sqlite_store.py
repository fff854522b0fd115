"""The embedded store: one SQLite file that loses nothing it has acknowledged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shoal.core.apply import apply
from shoal.core.state import Snapshot, State
from shoal.model.events import Event, JobEvent, NodeEvent, Recorded
from shoal.model.job import Job
from shoal.ports import StoreError

SCHEMA_VERSION = 1
# History beyond these is dropped when a snapshot is taken; what lives is never dropped.
EVENTS_KEPT = 1_000_000
FINISHED_JOBS_KEPT = 100_000
# Another program may hold the file for a moment (a backup, say); longer is an error.
BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, job TEXT, node TEXT, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_job ON events (job, seq) WHERE job IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_by_node ON events (node, seq) WHERE node IS NOT NULL;
CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, body BLOB NOT NULL);
"""

# A key belongs to the first job that had it. A log of an earlier version may hold a second one:
# that must not keep everything after it from being stored.
_INSERT_JOB = """
INSERT INTO jobs SELECT ?1, ?2, iif(EXISTS (SELECT 1 FROM jobs WHERE key = ?3), NULL, ?3), ?4
"""

_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_job = msgspec.json.Decoder(Job).decode
_decode_snapshot = msgspec.json.Decoder(Snapshot).decode


class SqliteStore:
    """One writer (the control loop) and a second connection for readers, who never wait for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._clear_errors():
            self._writer = self._connect()
            version = self._writer.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"{path} was written by another version of shoal (its format is {version}, "
                    f"this one reads {SCHEMA_VERSION})"
                )
            self._writer.executescript(_SCHEMA)
            self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._reader = self._connect()
            self._last = self._writer.execute("SELECT max(seq) FROM events").fetchone()[0] or 0

    def load(self) -> tuple[State, int]:
        with self._clear_errors():
            row = self._writer.execute(
                "SELECT seq, body FROM snapshots ORDER BY seq DESC LIMIT 1"
            ).fetchone()
            start, state = 0, State()
            if row is not None:
                start, state = row[0], State.restore(_decode_snapshot(row[1]))
            self._last = start
            cursor = self._writer.execute(
                "SELECT seq, body FROM events WHERE seq > ? ORDER BY seq", (start,)
            )
            for seq, body in cursor:
                apply(state, _decode_event(body))
                self._last = seq
        return state, self._last

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        rows = [
            (
                seq,
                event.job if isinstance(event, JobEvent) else None,
                event.node if isinstance(event, NodeEvent) else None,
                _encode(event),
            )
            for seq, event in enumerate(events, self._last + 1)
        ]
        jobs = [(job.number, job.id, job.key or None, _encode(job)) for job in finished]
        with self._clear_errors(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
            if jobs:
                self._writer.executemany(_INSERT_JOB, jobs)
        self._last += len(rows)
        return self._last

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        with self._clear_errors(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, body))
            self._writer.execute("DELETE FROM snapshots WHERE seq < ?", (seq,))
            self._writer.execute("DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
            dropped = self._writer.execute(
                "DELETE FROM jobs WHERE number IN "
                "(SELECT number FROM jobs ORDER BY number DESC LIMIT -1 OFFSET ?) RETURNING id",
                (FINISHED_JOBS_KEPT,),
            ).fetchall()
        return [job_id for (job_id,) in dropped]

    def events(self, after: int, limit: int, job: str = "", node: str = "") -> list[Recorded]:
        """A negative `after` counts from the end."""
        where, values = ["seq > ?"], [after]
        for column, value in (("job", job), ("node", node)):
            if value:
                where.append(f"{column} = ?")
                values.append(value)  # type: ignore[arg-type]
        order = "seq"
        if after < 0:
            where[0], values[0] = "seq > ?", 0
            order, limit = "seq DESC", min(limit, -after)
        query = f"SELECT seq, body FROM events WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?"
        with self._clear_errors():
            rows = self._reader.execute(query, (*values, limit)).fetchall()
        if after < 0:
            rows.reverse()
        return [Recorded(seq, _decode_event(body)) for seq, body in rows]

    def job(self, job_id: str) -> Job | None:
        with self._clear_errors():
            row = self._reader.execute("SELECT body FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return _decode_job(row[0]) if row else None

    def finished(self, limit: int, before: int = 0) -> list[Job]:
        with self._clear_errors():
            rows = self._reader.execute(
                "SELECT body FROM jobs WHERE ? = 0 OR number < ? ORDER BY number DESC LIMIT ?",
                (before, before, limit),
            ).fetchall()
        return [_decode_job(body) for (body,) in rows]

    def keyed(self, key: str) -> str | None:
        with self._clear_errors():
            row = self._reader.execute("SELECT id FROM jobs WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an acknowledged event survives power loss
        return connection

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreError(self._advice(str(error))) from error

    def _advice(self, message: str) -> str:
        if "full" in message:
            return f"the disk that holds {self._path} is full: free some space; nothing was lost"
        if "locked" in message or "busy" in message:
            return f"{self._path} is locked by another program: end it, then try again"
        if "readonly" in message or "unable to open" in message:
            return f"{self._path} cannot be written ({message}): check who owns it and the disk"
        if "malformed" in message or "not a database" in message:
            return f"{self._path} is damaged ({message}): restore it from a copy, or move it away"
        return f"{self._path}: {message}"
