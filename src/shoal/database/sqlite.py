"""Stores in SQLite files: a connection that writes, one for each thread that reads, and where a
store is."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import Logger
from pathlib import Path

from shoal.database.base import Database, Row, Values, Words
from shoal.ports import StoreDamaged, StoreError, StoreFull

# Another program may hold the file for a moment (a backup, say); longer is an error.
BUSY_TIMEOUT_S = 2.0
JOURNAL_BYTES_KEPT = 8 << 20
# Of each thread that reads. SQLite's default is 2,000, which 20 threads let grow to 45 MB with the
# number of finished jobs; the kernel has the pages anyway.
READER_CACHE_KB = 256

IN_MEMORY = ":memory:"

WORDS = Words(
    blob="BLOB",
    integer="INTEGER",
    counter="INTEGER PRIMARY KEY AUTOINCREMENT",
    contains="instr({column}, ?) > 0",
    like="CAST({column} AS TEXT) LIKE ?",
    table_end="WITHOUT ROWID",
)

_DAMAGE = ("malformed", "not a database", "no such column", "no such table")


class SqliteDatabase:
    """Readers never wait for the writer (WAL). `durable`: what is committed survives a power loss;
    without it, the newest commits may be lost then, but the file stays whole."""

    generation = 0  # the file has no connection that could break

    def __init__(self, path: Path, durable: bool = True, advice: str = "") -> None:
        """`advice`: what to do about a damaged file, for people."""
        self.path = path
        self.name = str(path)
        self.words = WORDS
        self._durable = durable
        self._damage_advice = advice
        self._local = threading.local()
        self._writing = threading.Lock()
        self._wrote = 0  # the thread that wrote last
        self._connecting = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        with self.clear_errors():
            self._writer = self._connect()
        self._cursor = SqliteCursor(self._writer)

    def prepare(
        self,
        part: str,  # noqa: ARG002
        version: int,
        schema: str,
        steps: Mapping[int, str] | None = None,
    ) -> None:
        """A file holds one part, so its format is the file's `user_version`."""
        [(known,)] = self._on_writer("PRAGMA user_version")
        if not 0 <= known <= version:
            raise newer_format(self.name, known, version)
        missing = [(steps or {})[one] for one in range(known, version) if known]
        with self.transaction() as cursor:
            for statement in ";".join([*missing, schema]).split(";"):
                cursor.execute(statement)
            cursor.execute(f"PRAGMA user_version = {version}")

    @contextmanager
    def transaction(self) -> Iterator[SqliteCursor]:
        with self._writing, self.clear_errors():
            self._wrote = threading.get_ident()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._cursor
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def read(self, query: str, values: Values = ()) -> list[Row]:
        if self.name == IN_MEMORY:  # another connection would see another database
            return self._on_writer(query, values)
        if self._wrote == threading.get_ident() and self._writing.acquire(blocking=False):
            # Other connections have to read pages again after each commit; this one knows them.
            try:
                with self.clear_errors():
                    return self._writer.execute(query, values).fetchall()
            finally:
                self._writing.release()
        reader: sqlite3.Connection | None = getattr(self._local, "reader", None)
        with self.clear_errors():
            if reader is None:
                reader = self._local.reader = self._connect()
                reader.execute(f"PRAGMA cache_size = -{READER_CACHE_KB}")
            return reader.execute(query, values).fetchall()

    def journal_pages(self, pages: int) -> None:
        """How long the journal may get before it is put into the file."""
        self._on_writer(f"PRAGMA wal_autocheckpoint = {pages}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _on_writer(self, query: str, values: Values = ()) -> list[Row]:
        with self._writing, self.clear_errors():
            return self._writer.execute(query, values).fetchall()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        with self._connecting:
            self._connections.append(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        # A long read, such as a backup's, lets it grow; afterwards its room is given back.
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES_KEPT}")
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
        return connection

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            message = str(error)
            if any(word in message for word in _DAMAGE):
                raise self.damaged(message) from error
            kind = StoreFull if "full" in message else StoreError
            raise kind(self._advice(message)) from error

    def damaged(self, what: str) -> StoreDamaged:
        advice = f". {self._damage_advice}" if self._damage_advice else ""
        return StoreDamaged(f"{self.path} is damaged ({what}){advice}")

    def _advice(self, message: str) -> str:
        if "full" in message:
            return f"the disk that holds {self.path} is full: free some space; nothing was lost"
        if "locked" in message or "busy" in message:
            return f"{self.path} is locked by another program: end it, then try again"
        if "readonly" in message or "unable to open" in message:
            return f"{self.path} cannot be written ({message}): check its owner and the disk"
        return f"{self.path}: {message}"


class SqliteCursor:
    """The connection that writes, inside of a transaction."""

    def __init__(self, writer: sqlite3.Connection) -> None:
        self._writer = writer

    def execute(self, query: str, values: Values = ()) -> list[Row]:
        return self._writer.execute(query, values).fetchall()

    def executemany(self, query: str, rows: Iterable[Values]) -> None:
        self._writer.executemany(query, rows)


def newer_format(name: str, known: int, version: int) -> StoreError:
    return StoreError(
        f"{name} was written by another version of shoal (its format is {known}, "
        f"this one reads {version})"
    )


# Where a store is: in a SQLite file of its own, or in a database that several stores share.


PAGES_CHECKED_MAX = 16_384  # 64 MiB; damage in a larger file shows when it is read

Place = Path | Database


def opened(place: Place, durable: bool = True) -> Database:
    """`StoreDamaged` if it is a file that cannot be used."""
    if not isinstance(place, Path):
        return place
    database = SqliteDatabase(place, durable)
    try:
        _check(database)
    except BaseException:
        database.close()
        raise
    return database


def renewable(place: Place, part: str, version: int, schema: str, log: Logger) -> Database:
    """For what can be lost or made again: a file is not synced, and one that cannot be read is put
    aside for another one. `schema` is filled in with the database's own words."""

    def prepared() -> Database:
        database = opened(place, durable=False)
        try:
            database.prepare(part, version, schema.format(**database.words._asdict()))
        except BaseException:
            closed(place, database)
            raise
        return database

    try:
        return prepared()
    except StoreDamaged as error:
        if not isinstance(place, Path):
            raise
        name = f"{place.name}.damaged"
        log.error("%s cannot be read (%s): put aside as %s", place, error, name)
        set_aside(place, name)
        return prepared()


def closed(place: Place, database: Database) -> None:
    """A database that several stores share is closed by whoever opened it."""
    if isinstance(place, Path):
        database.close()


def set_aside(path: Path, name: str) -> None:
    """Give a damaged file another name, with what belongs to it."""
    for ending in ("-wal", "-shm", ""):
        old = path.with_name(path.name + ending)
        if old.exists():
            old.replace(path.with_name(name + ending))


def _check(database: SqliteDatabase) -> None:
    """A large file is not read as a whole at every start."""
    [(pages,)] = database.read("PRAGMA page_count")
    if pages <= PAGES_CHECKED_MAX:
        [(found,)] = database.read("PRAGMA quick_check(1)")
        if found != "ok":
            raise StoreDamaged(f"{database.name} is damaged ({found})")
