"""The readable part of a store, however damaged its file is."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.control.store.carving import carve
from shoal.control.store.events import SNAPSHOTS_KEPT
from shoal.control.store.rows import Unreadable, event_of, job_of, snapshot_of
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.events import Event
from shoal.model.job import Job
from shoal.ports import StoreError


class Found(msgspec.Struct):
    """The readable part of a store. `lost_rows` are there, but cannot be read."""

    snapshots: list[tuple[int, Snapshot]] = []
    events: dict[int, Event] = {}
    jobs: dict[str, Job] = {}
    lost_rows: int = 0
    top: int = 0  # the highest number of an event, readable or not
    jobs_top: int = 0  # the highest number of a job that left a folder behind
    cut: bool = False  # whole tables could not be read, so nobody knows where the log ended


def read(path: Path) -> Found:
    """What SQLite can read; if that is not all, also what is found in the file's pages."""
    journal = path.with_name(f"{path.name}-wal")
    written = journal.read_bytes() if journal.exists() else b""  # closing the file removes it
    found = Found()
    try:
        _read_tables(path, found)
    except sqlite3.DatabaseError:
        found.cut = True
    if found.cut or found.lost_rows or not found.events:
        _carve(path, written, found)
    found.snapshots.sort(key=lambda one: -one[0])
    found.top = max([found.top, *found.events, *(seq for seq, _ in found.snapshots)])
    return found


def fill(found: Found, other: Found) -> None:
    """Add what only the other has: a copy of the same log, made earlier."""
    common = found.events.keys() & other.events.keys()
    if any(found.events[seq] != other.events[seq] for seq in common):
        raise StoreError("the backup is of another log: it was made before an earlier restore")
    found.events = {**other.events, **found.events}
    found.jobs = {**other.jobs, **found.jobs}
    known = {seq for seq, _ in found.snapshots}
    found.snapshots += [one for one in other.snapshots if one[0] not in known]
    found.snapshots.sort(key=lambda one: -one[0])
    found.top = max(found.top, other.top)


def _carve(path: Path, journal: bytes, found: Found) -> None:
    """A row says by what it can be read as which table it is from. Of a job with several records
    the newest counts: an older one has fewer attempts."""
    listed = set(found.jobs)
    for number, body, crc in carve(path, journal):
        if number not in found.events:
            with contextlib.suppress(Unreadable):
                found.events[number] = event_of(number, body, crc)
                continue
        with contextlib.suppress(Unreadable):
            job = job_of(number, body, crc)
            other = found.jobs.get(job.id)
            if job.id not in listed and (other is None or other.attempt <= job.attempt):
                found.jobs[job.id] = job
            continue
        if _is_new(number, found):
            with contextlib.suppress(Exception):
                _take_snapshot(number, body, crc, found)


def _read_tables(path: Path, found: Found) -> None:
    source = sqlite3.connect(path)
    try:
        rows = list(_rows(source, "snapshots", "seq", found))
        for seq, body, crc in sorted(rows, key=lambda row: -row[0]):
            if _is_new(seq, found):
                try:
                    _take_snapshot(seq, body, crc, found)
                except Exception:
                    found.lost_rows += 1
        for seq, body, crc in _rows(source, "events", "seq", found):
            found.top = max(found.top, seq)
            try:
                found.events[seq] = event_of(seq, body, crc)
            except Unreadable:
                found.lost_rows += 1
        for number, body, crc in _rows(source, "jobs", "number", found):
            try:
                job = job_of(number, body, crc)
                found.jobs[job.id] = job
            except Unreadable:
                found.lost_rows += 1
    finally:
        source.close()


def _is_new(seq: int, found: Found) -> bool:
    """Old snapshots are for looking at the past: only the newest lead to the present."""
    known = sorted(one for one, _ in found.snapshots)
    return seq not in known and (len(known) < SNAPSHOTS_KEPT or seq > known[-SNAPSHOTS_KEPT])


def _take_snapshot(seq: int, body: bytes, crc: int | None, found: Found) -> None:
    """Restoring takes the snapshot's own records, so it is read twice."""
    restore(snapshot_of(seq, body, crc))
    found.snapshots.append((seq, snapshot_of(seq, body, crc)))
    found.snapshots.sort(key=lambda one: -one[0])
    del found.snapshots[SNAPSHOTS_KEPT:]


def _rows(
    source: sqlite3.Connection, table: str, key: str, found: Found
) -> Iterator[tuple[int, bytes, int | None]]:
    """Read from both ends, because a page that cannot be read ends a walk."""
    crc = "crc" if _has_checksums(source, table) else "NULL"
    seen: set[int] = set()
    for order in ("", "DESC"):
        try:
            for row in source.execute(
                f"SELECT {key}, body, {crc} FROM {table} ORDER BY {key} {order}"
            ):
                if row[0] in seen:
                    break
                seen.add(row[0])
                yield row
            else:
                return
        except sqlite3.DatabaseError:
            found.lost_rows += order == ""
            found.cut = found.cut or (table == "events" and order == "DESC" and not seen)


def _has_checksums(source: sqlite3.Connection, table: str) -> bool:
    try:
        return any(row[1] == "crc" for row in source.execute(f"PRAGMA table_info({table})"))
    except sqlite3.DatabaseError:
        return False
