"""Where samples are kept: whole series now and then, and what came since as it comes.

Losing some samples does no harm, so a file is not synced, and one that cannot be read is put aside
for another one. A process that is killed loses the samples of the last seconds.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shoal.control.shares import kept_shares
from shoal.database.base import Cursor
from shoal.database.sqlite import IN_MEMORY, Place, closed, renewable

log = logging.getLogger("shoal.history")

PART, VERSION = "samples", 1
# As many series as the log of events keeps jobs, within these bytes; the oldest go first.
ENDED_KEPT = 100_000
BYTES_MAX = 1 << 30
ENDED_DROPPED_AT_ONCE = 500
FREED_PART = 10  # a tenth more than needed goes, so that not every look removes something
KEYS_AT_ONCE = 500
LAST_LETTER = "\U0010ffff"  # no key has it
COMPRESSION = 1  # the quickest: series that are kept for long are small anyway

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (
    key TEXT PRIMARY KEY, ended_ms {integer}, body {blob} NOT NULL) {table_end};
CREATE INDEX IF NOT EXISTS series_ended ON series (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS tail (number {integer} PRIMARY KEY, body {blob} NOT NULL)
"""

Whole = tuple[str, int | None, bytes]  # key, when it ended if it did, body


class HistoryFile:
    """For several threads, one at a time. Without a place it is kept in memory only."""

    def __init__(self, place: Place | None, bytes_max: int = BYTES_MAX) -> None:
        self._place = Path(IN_MEMORY) if place is None else place
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._database = renewable(self._place, PART, VERSION, _SCHEMA, log)
        self.newest = self._count("SELECT max(number) FROM tail")  # the last piece of the tail
        self.size_bytes = sum(self._sizes())  # of what is kept, not of the file

    def _sizes(self) -> tuple[int, int]:
        return (
            self._count("SELECT CAST(sum(length(body)) AS BIGINT) FROM series"),
            self._count("SELECT CAST(sum(length(body)) AS BIGINT) FROM tail"),
        )

    def write(self, tail: bytes, wholes: Iterable[Whole], forget_to: int = 0) -> None:
        """One transaction. `forget_to`: pieces of the tail up to it are in whole series now."""
        bodies = {
            key: (key, ended, zlib.compress(body, COMPRESSION)) for key, ended, body in wholes
        }
        packed = zlib.compress(tail, COMPRESSION) if tail else b""
        with self._lock:
            more, number = (
                len(packed) + sum(len(body) for _, _, body in bodies.values()),
                self.newest,
            )
            with self._database.transaction() as cursor:
                more -= _take(cursor, bodies)
                cursor.executemany("INSERT INTO series VALUES (?, ?, ?)", bodies.values())
                if forget_to:
                    more -= _sum(cursor, "tail WHERE number <= ?", forget_to)
                    cursor.execute("DELETE FROM tail WHERE number <= ?", (forget_to,))
                if packed:
                    number += 1
                    cursor.execute(  # a server that was lost may have stored it already
                        "INSERT INTO tail VALUES (?, ?) "
                        "ON CONFLICT (number) DO UPDATE SET body = excluded.body",
                        (number, packed),
                    )
            self.newest, self.size_bytes = number, self.size_bytes + more

    def read(self, key: str) -> bytes | None:
        rows = self._database.read("SELECT body FROM series WHERE key = ?", (key,))
        return _opened(rows[0][0]) if rows else None

    def read_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those that are there."""
        found: dict[str, bytes | None] = {}
        for start in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[start : start + KEYS_AT_ONCE]
            which = ", ".join("?" * len(some))
            query = f"SELECT key, body FROM series WHERE key IN ({which})"
            found |= {key: _opened(body) for key, body in self._database.read(query, tuple(some))}
        return {key: body for key, body in found.items() if body is not None}

    def keys(self, prefix: str) -> list[str]:
        """In order. All keys of a kind begin with the same letter."""
        rows = self._database.read(
            "SELECT key FROM series WHERE key >= ? AND key < ? ORDER BY key",
            (prefix, prefix + LAST_LETTER),
        )
        return [key for (key,) in rows]

    def living(self) -> dict[str, bytes]:
        """Every series that has not ended."""
        rows = self._database.read("SELECT key, body FROM series WHERE ended_ms IS NULL")
        found = {key: _opened(body) for key, body in rows}
        return {key: body for key, body in found.items() if body is not None}

    def tail(self) -> list[bytes]:
        rows = self._database.read("SELECT body FROM tail ORDER BY number")
        return [body for (packed,) in rows if (body := _opened(packed)) is not None]

    def trim(self, tenants: Callable[[], Mapping[str, str]] = dict) -> None:
        """Drop ended series beyond the number and the bytes that are kept: the oldest of whichever
        tenant has most. `tenants`: of finished jobs."""
        with self._lock:
            ended = self._count("SELECT count(*) FROM series WHERE ended_ms IS NOT NULL")
            if not ended or (ended <= ENDED_KEPT and self.size_bytes <= self._bytes_max):
                return
            known = tenants()
            counts: dict[str, int] = {}
            sizes: dict[str, int] = {}
            rows = self._database.read(
                "SELECT key, length(body) FROM series WHERE ended_ms IS NOT NULL ORDER BY ended_ms"
            )
            for key, size in rows:
                tenant = known.get(key[2:], "")
                counts[tenant] = counts.get(tenant, 0) + 1
                sizes[tenant] = sizes.get(tenant, 0) + size
            spare = self._bytes_max // FREED_PART if self.size_bytes > self._bytes_max else 0
            fewer = kept_shares(counts, ended - ENDED_KEPT)
            smaller = kept_shares(sizes, self.size_bytes - self._bytes_max + spare)
            gone = []
            for key, size in rows:
                tenant = known.get(key[2:], "")
                many = counts[tenant] > fewer.get(tenant, ended)
                if many or sizes[tenant] > smaller.get(tenant, self.size_bytes):
                    gone.append(key)
                    counts[tenant] -= 1
                    sizes[tenant] -= size
            for start in range(0, len(gone), ENDED_DROPPED_AT_ONCE):
                with self._database.transaction() as cursor:
                    self.size_bytes -= _take(cursor, gone[start : start + ENDED_DROPPED_AT_ONCE])

    def drop(self, keys: Sequence[str]) -> None:
        with self._lock:
            with self._database.transaction() as cursor:
                less = _take(cursor, keys)
            self.size_bytes -= less

    def close(self) -> None:
        with self._lock:
            closed(self._place, self._database)

    def _count(self, query: str) -> int:
        [(found,)] = self._database.read(query)
        return found or 0


def _take(cursor: Cursor, keys: Iterable[str]) -> int:
    """Remove series; returns how many bytes they had."""
    every, size = list(keys), 0
    for start in range(0, len(every), KEYS_AT_ONCE):
        some = every[start : start + KEYS_AT_ONCE]
        which = f"series WHERE key IN ({', '.join('?' * len(some))})"
        size += _sum(cursor, which, *some)
        cursor.execute(f"DELETE FROM {which}", some)
    return size


def _sum(cursor: Cursor, which: str, *values: object) -> int:
    query = f"SELECT CAST(sum(length(body)) AS BIGINT) FROM {which}"
    [(found,)] = cursor.execute(query, values)
    return found or 0


def _opened(packed: bytes) -> bytes | None:
    try:
        return zlib.decompress(packed)
    except zlib.error:
        return None  # one series is lost, not the file
