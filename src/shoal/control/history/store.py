"""The file that samples are kept in: whole series now and then, and what came since as it comes.

Losing some samples does no harm, so a write is not synced, and a file that cannot be read is put
aside for another one. A process that is killed loses the samples of the last seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

log = logging.getLogger("shoal.history")

SCHEMA_VERSION = 1
# As many series as the log of events keeps jobs, within these bytes; the oldest go first.
ENDED_KEPT = 100_000
BYTES_MAX = 1 << 30
ENDED_DROPPED_AT_ONCE = 500
PAGES_CHECKED_MAX = 16_384  # 64 MiB
COMPRESSION = 1  # the quickest: series that are kept for long are small anyway

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (
    key TEXT PRIMARY KEY, ended_ms INTEGER, body BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS series_ended ON series (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS tail (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""

Whole = tuple[str, int | None, bytes]  # key, when it ended if it did, body


class HistoryFile:
    """For several threads, one at a time. Without a path it is kept in memory only."""

    def __init__(self, path: Path | None, bytes_max: int = BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._connection = self._open()
        row = self._connection.execute("SELECT max(number) FROM tail").fetchone()
        self.newest = row[0] or 0  # number of the last piece of the tail
        self.size_bytes = self._bytes_used()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if self._path is None:
                raise
            aside = self._path.with_name(self._path.name + ".damaged")
            log.error("%s cannot be read (%s): put aside as %s", self._path, error, aside.name)
            for ending in ("", "-wal", "-shm"):
                old = self._path.with_name(self._path.name + ending)
                with contextlib.suppress(FileNotFoundError):
                    old.replace(aside) if not ending else old.unlink()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        name = str(self._path) if self._path is not None else ":memory:"
        connection = sqlite3.connect(name, timeout=2, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"its format is {version}, not {SCHEMA_VERSION}")
            if version:
                _check(connection)
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def write(self, tail: bytes, wholes: Iterable[Whole], forget_to: int = 0) -> None:
        """One transaction. `forget_to`: pieces of the tail up to it are in whole series now."""
        bodies = [(key, ended, zlib.compress(body, COMPRESSION)) for key, ended, body in wholes]
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            if bodies:
                self._connection.executemany(
                    "INSERT OR REPLACE INTO series VALUES (?, ?, ?)", bodies
                )
            if forget_to:
                self._connection.execute("DELETE FROM tail WHERE number <= ?", (forget_to,))
            if tail:
                self.newest += 1
                packed = zlib.compress(tail, COMPRESSION)
                self._connection.execute("INSERT INTO tail VALUES (?, ?)", (self.newest, packed))
            self.size_bytes = self._bytes_used()

    def read(self, key: str) -> bytes | None:
        with self._lock:
            row = self._connection.execute(
                "SELECT body FROM series WHERE key = ?", (key,)
            ).fetchone()
        return _opened(row[0]) if row else None

    def living(self) -> dict[str, bytes]:
        """Every series that has not ended."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT key, body FROM series WHERE ended_ms IS NULL"
            ).fetchall()
        found = {key: _opened(body) for key, body in rows}
        return {key: body for key, body in found.items() if body is not None}

    def tail(self) -> list[bytes]:
        with self._lock:
            rows = self._connection.execute("SELECT body FROM tail ORDER BY number").fetchall()
        return [body for (packed,) in rows if (body := _opened(packed)) is not None]

    def trim(self) -> None:
        """Drop the oldest ended series beyond the number and the bytes that are kept."""
        with self._lock:
            ended = self._count("SELECT count(*) FROM series WHERE ended_ms IS NOT NULL")
            while ended and (ended > ENDED_KEPT or self._bytes_used() > self._bytes_max):
                gone = min(
                    ended, max(ended - ENDED_KEPT, min(ENDED_DROPPED_AT_ONCE, -(-ended // 10)))
                )
                self._connection.execute(
                    "DELETE FROM series WHERE key IN (SELECT key FROM series "
                    "WHERE ended_ms IS NOT NULL ORDER BY ended_ms LIMIT ?)",
                    (gone,),
                )
                ended -= gone

    def drop(self, keys: Sequence[str]) -> None:
        with self._lock, self._connection:
            self._connection.executemany("DELETE FROM series WHERE key = ?", [(k,) for k in keys])

    def bytes_used(self) -> int:
        with self._lock:
            return self._bytes_used()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _bytes_used(self) -> int:
        pages = self._count("PRAGMA page_count") - self._count("PRAGMA freelist_count")
        return pages * self._count("PRAGMA page_size")

    def _count(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])


def _check(connection: sqlite3.Connection) -> None:
    """A large file is not read as a whole at every start: its damage shows when it is used."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    if pages <= PAGES_CHECKED_MAX:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _opened(packed: bytes) -> bytes | None:
    try:
        return zlib.decompress(packed)
    except zlib.error:
        return None  # one series is lost, not the file
