"""Where a store is: in a SQLite file of its own, or in a database that several stores share."""

from __future__ import annotations

from logging import Logger
from pathlib import Path

from shoal.database.base import Database
from shoal.database.sqlite import SqliteDatabase
from shoal.ports import StoreDamaged

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
