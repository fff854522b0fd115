"""The embedded store: one SQLite file, on a disk that may be full."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from shoal.control.alarms import Alarms
from shoal.control.store.events import EventStore
from shoal.control.store.marks import Numbers
from shoal.database.base import Row
from shoal.database.sqlite import SqliteDatabase
from shoal.ports import StoreFull

TIGHT_PAGES, USUAL_PAGES = 16, 1_000  # of the journal, before they are put into the file


class SqliteStore(EventStore):
    """An event log that keeps spare room, so that jobs can end on a full disk."""

    def __init__(
        self, path: Path, numbers: Numbers | None = None, spare: Path | None = None
    ) -> None:
        self._file = SqliteDatabase(
            path,
            advice="Jobs on nodes keep running. Restore a backup: shoal restore FILE --replace, "
            f"or recover what is readable: shoal salvage --home {path.parent}",
        )
        super().__init__(self._file, numbers or Numbers(None))
        self.spare = Spare(spare)

    def _append(self, rows: Sequence[Row], jobs: Sequence[Row], changes: Sequence[Row]) -> None:
        try:
            super()._append(rows, jobs, changes)
        except StoreFull as error:
            if not self.spare.give_up():
                raise
            self.alarms.raise_("full", f"{error}; new jobs are refused until then")
            # The journal is overwritten again and again, and does not use up the freed room.
            self._file.journal_pages(TIGHT_PAGES)
            super()._append(rows, jobs, changes)
        self.relax()

    def relax(self) -> None:
        if self.spare.tight and self.spare.take():
            self._file.journal_pages(USUAL_PAGES)
            self.alarms.clear("full")

    @property
    def tight(self) -> bool:
        return self.spare.tight


# Looks at the whole file of a store after a start, beside everything else.
#
# A start reads only what the state needs. Damage elsewhere (old events, records, an index) would
# show when somebody asks for it, perhaps after the last good backup is gone.


log = logging.getLogger("shoal.control")

CHECK_S_MAX = 60.0  # about 10 GB from a fast disk
PAUSE_S = 0.01  # after each look at the clock, so that a slow disk has time for commits
OPCODES = 50_000


def begin_check(path: Path, alarms: Alarms) -> threading.Thread:
    """In a thread of its own, with a bound on its time. Damage is an alarm: jobs go on."""
    thread = threading.Thread(target=_check, args=(path, alarms), name="check", daemon=True)
    thread.start()
    return thread


def _check(path: Path, alarms: Alarms) -> None:
    found = check(path)
    if found:
        log.error("%s: %s", path, found)
        text = f"{path} is damaged where nothing needs it yet ({found}); make it whole with: "
        alarms.raise_("store check", f"{text}shoal down, shoal salvage, shoal up")


def check(path: Path, seconds_max: float = CHECK_S_MAX) -> str:
    """What is wrong with the file, in one line; empty: nothing, or the time was too short."""
    deadline = time.monotonic() + seconds_max

    def look() -> int:
        time.sleep(PAUSE_S)
        return int(time.monotonic() > deadline)

    try:
        address = f"file:{quote(str(path))}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as source:
            source.set_progress_handler(look, OPCODES)
            (found,) = source.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        damaged = "malformed" in str(error) or "not a database" in str(error)
        return str(error) if damaged else ""
    return "" if found == "ok" else " ".join(str(found).split())


# Spare room on the log's disk: freed when the disk is full, so that cancel still works.


SPARE_BYTES = 16 * 1024 * 1024
SHARE_OF_DISK = 8  # at most one part in this many of a small disk
AGAIN_FACTOR = 3  # it is taken back when this many times its size is free


class Spare:
    """A file that only holds room. While that room is freed, the store is `tight`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.tight = False
        if path is not None and not self._taken():
            self.take()

    def give_up(self) -> bool:
        """Free the room; False if there is none left."""
        if self._path is None or not self._taken():
            return False
        os.truncate(self._path, 0)
        self.tight = True
        return True

    def take(self) -> bool:
        """Take the room back, if the disk has enough."""
        if self._path is None:
            return False
        try:
            disk = os.statvfs(self._path.parent)
            wanted = min(SPARE_BYTES, disk.f_blocks * disk.f_frsize // SHARE_OF_DISK)
            if disk.f_bavail * disk.f_frsize < AGAIN_FACTOR * wanted:
                return False
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, wanted)
            finally:
                os.close(handle)
        except OSError as error:
            log.error("no spare room can be kept in %s: %s", self._path, error)
            return False
        self.tight = False
        return True

    def _taken(self) -> bool:
        try:
            return self._path is not None and self._path.stat().st_size > 0
        except OSError:
            return False
