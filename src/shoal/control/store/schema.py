"""The tables of the event log, and how older formats become this one."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec

from shoal.core.state import image
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.base import JobEvent, NodeEvent
from shoal.core.state.events.log import QUIET, Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.state import Snapshot
from shoal.database.base import Database
from shoal.model.job import Job
from shoal.model.lean import lean

FORMAT = 5
PART = "events"

# A long run saves thousands of times: a search for other events must not read all of those.
# The conditions below are those of partial indexes, so a query uses the very same words.
SAVED = "kind = 'JobCheckpointed'"
BETWEEN = "kind != 'JobCheckpointed'"
POLICIES = "kind = 'PolicyChanged'"
NOTABLE = f"kind NOT IN ({', '.join(repr(kind) for kind in QUIET)})"

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS events (
    seq {{integer}} PRIMARY KEY, job TEXT, node TEXT, body {{blob}} NOT NULL, crc {{integer}},
    kind TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS events_by_node ON events (node, seq) WHERE node IS NOT NULL;
CREATE TABLE IF NOT EXISTS snapshots (
    seq {{integer}} PRIMARY KEY, body {{blob}} NOT NULL, crc {{integer}});
CREATE TABLE IF NOT EXISTS jobs (
    number {{integer}} PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE,
    body {{blob}} NOT NULL, crc {{integer}}, ended {{integer}} NOT NULL DEFAULT 0,
    tenant TEXT, bytes {{integer}});
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value {{integer}} NOT NULL);
CREATE INDEX IF NOT EXISTS events_saved ON events (job, seq) WHERE {SAVED};
CREATE INDEX IF NOT EXISTS events_between ON events (job, seq) WHERE {BETWEEN};
CREATE INDEX IF NOT EXISTS events_notable ON events (seq) WHERE {NOTABLE};
CREATE INDEX IF NOT EXISTS events_policies ON events (seq) WHERE {POLICIES};
CREATE INDEX IF NOT EXISTS jobs_ended ON jobs (ended, number, tenant, bytes);
CREATE TABLE IF NOT EXISTS job_events (
    seq {{integer}} PRIMARY KEY, job TEXT NOT NULL, body {{blob}} NOT NULL, crc {{integer}},
    kind TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS job_events_by_job ON job_events (job, seq);
CREATE TABLE IF NOT EXISTS log_sizes (seq {{integer}} PRIMARY KEY, bytes {{integer}} NOT NULL);
"""

# What each format lacks beside the next. Rows without a checksum stay as they are; an event's body
# begins {"event":"KIND", and the event that ended a job may be dropped already. No server has ever
# held a format before the third.
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
    3: """
ALTER TABLE jobs ADD COLUMN tenant TEXT;
ALTER TABLE jobs ADD COLUMN bytes BIGINT
""",
    # Each index costs every commit a page: two did what others do as well.
    4: """
DROP INDEX IF EXISTS events_by_job;
DROP INDEX IF EXISTS jobs_by_end;
DROP INDEX IF EXISTS jobs_by_tenant
""",
}

INSERT_EVENT = "INSERT INTO events (seq, job, node, body, crc, kind) VALUES (?, ?, ?, ?, ?, ?)"
# An element that was retried and its array replace their records, also those that an old version
# has stored under another number. A key belongs to the first job that had it; a second one, which
# an old log may hold, must not keep what follows from being stored.
FORGET_JOB = "DELETE FROM jobs WHERE id = ? AND number != ?"
INSERT_JOB = """
INSERT INTO jobs (number, id, key, body, crc, tenant, ended, bytes)
SELECT ?1, ?2,
    CASE WHEN EXISTS (SELECT 1 FROM jobs WHERE key = ?3 AND id != ?2) THEN NULL ELSE ?3 END,
    ?4, ?5, ?6, ?7, length(?4) WHERE TRUE
ON CONFLICT (number) DO UPDATE SET id = excluded.id, key = excluded.key, body = excluded.body,
    crc = excluded.crc, ended = excluded.ended, tenant = excluded.tenant, bytes = excluded.bytes
"""
CHANGE_JOB = """
UPDATE jobs SET bytes = bytes + length(?1) - length(body), body = ?1, crc = ?2 WHERE number = ?3
"""
INSERT_SNAPSHOT = """
INSERT INTO snapshots (seq, body, crc) VALUES (?, ?, ?)
ON CONFLICT (seq) DO UPDATE SET body = excluded.body, crc = excluded.crc
"""
SET_META = """
INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""


def prepare(database: Database) -> None:
    words = database.words
    schema = _SCHEMA.format(integer=words.integer, blob=words.blob)
    database.prepare(PART, FORMAT, schema, _STEPS)


# Rows of the store: written with a checksum, and refused when it does not match.


encode = msgspec.json.Encoder().encode
_event: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode
_job = msgspec.json.Decoder(Job).decode


class Unreadable(Exception):
    """A row is not what was written; the message says what is wrong."""


EventRow = tuple[int, str | None, str | None, bytes, int, str]
JobRow = tuple[int, str, str | None, bytes, int, str]


def checksum(number: int, body: bytes) -> int:
    """It covers the row's number, so that a body in another row does not match either."""
    return zlib.crc32(body, (number ^ number >> 32) & 0xFFFFFFFF)


def event_row(seq: int, event: Event) -> EventRow:
    if isinstance(event, JobSubmitted | ArraySubmitted):
        body = encode(lean(event, spec=lean(event.spec)))
    else:
        body = encode(lean(event))
    job = event.job if isinstance(event, JobEvent | ReplicaReady) else None  # of its start, too
    node = event.node if isinstance(event, NodeEvent) else None
    return seq, job, node, body, checksum(seq, body), type(event).__name__


def job_row(job: Job) -> JobRow:
    body = encode(lean(job, spec=lean(job.spec)))
    key, crc = job.key or None, checksum(job.number, body)
    return job.number, job.id, key, body, crc, job.spec.tenant


def event_of(seq: int, body: bytes, crc: int | None) -> Event:
    _verify(seq, body, crc)
    try:
        return _event(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise Unreadable(str(error)) from None


def job_of(number: int, body: bytes, crc: int | None) -> Job:
    _verify(number, body, crc)
    try:
        return _job(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise Unreadable(str(error)) from None


def snapshot_of(seq: int, body: bytes, crc: int | None) -> Snapshot:
    _verify(seq, body, crc)
    try:
        return image.decoded(body)
    except (ValueError, TypeError, LookupError) as error:
        raise Unreadable(str(error)) from None


def _verify(number: int, body: bytes, crc: int | None) -> None:
    """Rows of the first format have no checksum: they count if they can be decoded."""
    if not isinstance(body, bytes):
        raise Unreadable("it is no row of ours")
    if crc is not None and crc != checksum(number, body):
        raise Unreadable("its checksum does not match")
