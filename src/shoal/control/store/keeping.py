"""What of the past is kept: the newest part of the log as a whole, and finished jobs by tenant.

Finished jobs are bounded by number and by bytes, and the tenant that has most gives first. The log
is cut at its old end, so its readers never meet a gap. What the log loses of jobs that live or are
still kept moves to a table of their own, counts as a part of their record and goes with it: so
nobody's jobs can push out what others want to know of theirs.
"""

from __future__ import annotations

import msgspec

from shoal.control.shares import kept_shares
from shoal.control.store.schema import BETWEEN
from shoal.database.base import Cursor, Database

# Beyond these, history is dropped with a snapshot; live jobs are never dropped.
EVENTS_KEPT = 1_000_000
EVENT_BYTES_MAX = 4 << 30
FINISHED_JOBS_KEPT = 100_000
FINISHED_BYTES_MAX = 2 << 30  # records, and what the log has lost of their events
FILLED_AT_ONCE = 2_000

_MOVE = f"""
INSERT INTO job_events (seq, job, body, crc, kind)
SELECT seq, job, body, crc, kind FROM events WHERE seq IN (
    SELECT seq FROM (
        SELECT seq, job, kind, lead(kind) OVER (PARTITION BY job ORDER BY seq) AS later
        FROM events WHERE seq <= ? AND job IS NOT NULL) AS old
    WHERE (kind != 'JobCheckpointed' OR later IS NULL OR later != 'JobCheckpointed')
    AND (EXISTS (SELECT 1 FROM jobs WHERE id = old.job)
        OR (kind NOT IN ('JobLabelled', 'JobNoted') AND NOT EXISTS (
            SELECT 1 FROM events WHERE job = old.job AND {BETWEEN}
            AND kind IN ('JobFinished', 'ArrayFinished')))))
"""
_WEIGH = """
UPDATE jobs SET bytes = length(body) + coalesce(
    (SELECT sum(length(job_events.body)) FROM job_events WHERE job = jobs.id), 0)
WHERE ended > ? OR id IN (SELECT job FROM job_events WHERE seq > ?)
"""
_OLDEST = "SELECT number FROM jobs WHERE tenant = ? ORDER BY ended, number LIMIT ?"
_BEYOND = """
SELECT number FROM (
    SELECT number, sum(bytes) OVER (ORDER BY ended DESC, number DESC) AS total
    FROM jobs WHERE tenant = ?) AS own
WHERE total > ?
"""


class _Spec(msgspec.Struct, frozen=True):
    tenant: str = ""


class _Job(msgspec.Struct):
    spec: _Spec = _Spec()


_decode = msgspec.json.Decoder(_Job).decode


def fill_in(database: Database) -> None:
    """Records of earlier versions do not say whose they are. Once, and in small transactions."""
    while rows := database.read(
        "SELECT number, body FROM jobs WHERE tenant IS NULL LIMIT ?", (FILLED_AT_ONCE,)
    ):
        found = [(_tenant(body), len(body), number) for number, body in rows]
        with database.transaction() as cursor:
            cursor.executemany("UPDATE jobs SET tenant = ?, bytes = ? WHERE number = ?", found)


def _tenant(body: bytes) -> str:
    try:
        return _decode(body).spec.tenant
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return ""  # it cannot be read, and goes like any other


def drop_finished(cursor: Cursor) -> list[str]:
    """Returns the jobs whose records are gone."""
    rows = cursor.execute(
        "SELECT tenant, count(*), CAST(sum(bytes) AS BIGINT) FROM jobs GROUP BY tenant"
    )
    counts = {str(tenant): int(count) for tenant, count, _ in rows}
    sizes = {str(tenant): int(size) for tenant, _, size in rows}
    fewer = kept_shares(counts, sum(counts.values()) - FINISHED_JOBS_KEPT)
    smaller = kept_shares(sizes, sum(sizes.values()) - FINISHED_BYTES_MAX)
    dropped: list[str] = []
    drops = [(_OLDEST, tenant, counts[tenant] - most) for tenant, most in fewer.items()]
    drops += [(_BEYOND, tenant, most) for tenant, most in smaller.items()]
    for which, tenant, number in drops:
        query = f"DELETE FROM jobs WHERE number IN ({which}) RETURNING id"
        dropped += [str(job) for (job,) in cursor.execute(query, (tenant, number))]
    if dropped and cursor.execute("SELECT 1 FROM job_events LIMIT 1"):
        cursor.executemany("DELETE FROM job_events WHERE job = ?", [(job,) for job in dropped])
    return dropped


def bytes_since(database: Database) -> int:
    """Bytes of the events that have come since they were last counted."""
    query = "SELECT coalesce(sum(length(body)), 0) FROM events WHERE seq > ?"
    [(counted,)] = database.read("SELECT coalesce(max(seq), 0) FROM log_sizes")
    [(size,)] = database.read(query, (counted,))
    return int(size)


def cut_log(cursor: Cursor, seq: int, size: int, before: int, needed: int) -> int:
    """`size`: bytes of the events since the last count; `before`: the snapshot before this one;
    `needed`: the oldest snapshot that a load may begin with. Events after the one that this
    returns are kept."""
    cursor.execute("DELETE FROM log_sizes WHERE seq = ?", (seq,))
    cursor.execute("INSERT INTO log_sizes (seq, bytes) VALUES (?, ?)", (seq, size))
    cut, total = seq - EVENTS_KEPT, 0
    for one, bytes_ in cursor.execute("SELECT seq, bytes FROM log_sizes ORDER BY seq DESC"):
        if total > EVENT_BYTES_MAX:
            cut = max(cut, int(one))
            break
        total += int(bytes_)
    cut = min(cut, needed)
    [(oldest,)] = cursor.execute("SELECT min(seq) FROM events")
    if oldest is None or oldest > cut:
        return cut
    [(moved,)] = cursor.execute("SELECT coalesce(max(seq), 0) FROM job_events")
    cursor.execute(_MOVE, (cut,))
    cursor.execute(_WEIGH, (before, moved))
    cursor.execute("DELETE FROM events WHERE seq <= ?", (cut,))
    cursor.execute("DELETE FROM log_sizes WHERE seq <= ?", (cut,))
    return cut
