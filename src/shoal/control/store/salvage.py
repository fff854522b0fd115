"""Saves what can be read of a damaged store, and counts what is lost.

Events behind the damage are replayed as far as they fit: one that cannot be read, and what can only
be understood with it, is left out. A job's record that says how it ended is believed over the log.
The nodes' inventories then put right what the log no longer knows.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shoal.control.store.events import SNAPSHOTS_KEPT
from shoal.control.store.keeping import FINISHED_JOBS_KEPT
from shoal.control.store.marks import Numbers
from shoal.control.store.schema import (
    FORGET_JOB,
    INSERT_EVENT,
    INSERT_JOB,
    SET_META,
    Unreadable,
    checksum,
    event_of,
    event_row,
    job_of,
    job_row,
    snapshot_of,
)
from shoal.control.store.sqlite import SqliteStore
from shoal.core.features.identity import free_uid
from shoal.core.invariants import Violation, verify
from shoal.core.state import image
from shoal.core.state.apply import apply
from shoal.core.state.apply_job import recount
from shoal.core.state.events.arrays import ArrayFinished, ArraySubmitted
from shoal.core.state.events.base import JobEvent
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.identity import KeyRemoved, TenantAdded, TokenRemoved
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, MemberLost
from shoal.core.state.load import raise_attempt, raise_numbers, restore
from shoal.core.state.state import Snapshot, State
from shoal.model.identity import EVERY_TENANT, TenantRecord
from shoal.model.ids import number_of
from shoal.model.job import DEFAULT_TENANT, Job, Outcome, Phase
from shoal.model.resources import plural
from shoal.ports import StoreError

TRIES_MAX = 200  # jobs that are given up one by one; then only events before the damage count
JOBS_NAMED_MAX = 20


class Found(msgspec.Struct):
    """The readable part of a store."""

    snapshots: list[tuple[int, Snapshot]] = []
    events: dict[int, Event] = {}
    jobs: dict[str, Job] = {}
    top: int = 0  # the highest number of an event, readable or not
    jobs_top: int = 0  # the highest number of a job that left a folder behind
    cut: bool = False  # whole tables could not be read, so nobody knows where the log ended


class Saved(msgspec.Struct):
    """The state that was saved, and the jobs that are known only in part or not at all."""

    state: State
    replayed: int
    left_out: int
    jobs_lost: list[str] = []
    jobs_cut: list[str] = []  # they live, but some of their events are lost
    tokens_dropped: int = 0
    keys_dropped: int = 0
    records_lost: list[str] = []  # they have ended; nothing else is known


def read(path: Path) -> Found:
    """All rows that SQLite can read and whose checksums match."""
    found = Found()
    try:
        _read_tables(path, found)
    except sqlite3.DatabaseError:
        found.cut = True
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


def _read_tables(path: Path, found: Found) -> None:
    source = sqlite3.connect(path)
    try:
        rows = list(_rows(source, "snapshots", "seq", found))
        for seq, body, crc in sorted(rows, key=lambda row: -row[0]):
            if _is_new(seq, found):
                with contextlib.suppress(Exception):
                    _take_snapshot(seq, body, crc, found)
        for seq, body, crc in _rows(source, "events", "seq", found):
            found.top = max(found.top, seq)
            with contextlib.suppress(Unreadable):
                found.events[seq] = event_of(seq, body, crc)
        for number, body, crc in _rows(source, "jobs", "number", found):
            with contextlib.suppress(Unreadable):
                job = job_of(number, body, crc)
                found.jobs[job.id] = job
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
            found.cut = found.cut or (table == "events" and order == "DESC" and not seen)


def _has_checksums(source: sqlite3.Connection, table: str) -> bool:
    try:
        return any(row[1] == "crc" for row in source.execute(f"PRAGMA table_info({table})"))
    except sqlite3.DatabaseError:
        return False


def rebuild(found: Found) -> Saved:
    """The newest consistent state that the readable events lead to."""
    given_up: dict[str, int] = {}  # job -> its events are not believed from this one on
    strange: set[int] = set()
    for _ in range(TRIES_MAX):
        state, start = _start(found)
        wrong = _replay(state, start, found, given_up, strange)
        if wrong is None:
            break
        event = found.events[wrong]
        if isinstance(event, JobEvent) and event.job not in given_up:
            given_up[event.job] = wrong
        else:
            strange.add(wrong)
    else:
        state, start = _start(found)
        strange.update(seq for seq in found.events if seq >= _first_hole(found, start))
        _replay(state, start, found, given_up, strange)
    saved = _told(state, start, found, given_up, strange)
    if found.cut or strange or _first_hole(found, start) <= found.top:
        saved.tokens_dropped, saved.keys_dropped = _distrust(state)
    return saved


def _distrust(state: State) -> tuple[int, int]:
    """A removal may be among what is lost, so no token or key is believed; returns how many
    there were. A tenant may be, too: without a record its jobs would run as the agent's user."""
    identity, who = state.identity, "shoal salvage"
    tokens = list(identity.tokens)
    for token in tokens:
        apply(state, TokenRemoved(at_ms=0, token=token, who=who))
    keys = list(identity.keys)
    for key in keys:
        apply(state, KeyRemoved(at_ms=0, key=key, who=who))
    named = {name for user in identity.users.values() for name in user.roles}
    named |= {j.spec.tenant for j in state.jobs.values() if j.spec.user in identity.users}
    for name in sorted(named - {*identity.tenants, EVERY_TENANT, DEFAULT_TENANT}):
        record = TenantRecord(name=name, uid=free_uid(identity))
        apply(state, TenantAdded(at_ms=0, tenant=record, who=who))
    return len(tokens), len(keys)


def _start(found: Found) -> tuple[State, int]:
    for seq, snapshot in found.snapshots:
        # Restoring takes the snapshot's own records, so each try needs a copy.
        return restore(image.decoded(image.encoded(snapshot))), seq
    return State(), 0


def _first_hole(found: Found, start: int) -> int:
    seq = start + 1
    while seq in found.events:
        seq += 1
    return seq


def _replay(
    state: State, start: int, found: Found, given_up: dict[str, int], strange: set[int]
) -> int | None:
    """The number of the first event that does not fit; None if all the others did."""
    hole = _first_hole(found, start)
    ended = {
        e.job
        for s, e in found.events.items()
        if isinstance(e, JobFinished | ArrayFinished) and s > start
    }
    mended = False
    for seq in sorted(seq for seq in found.events if seq > start):
        event = found.events[seq]
        if seq >= hole and not mended:
            _end_those_known_to_have_ended(state, found.jobs, ended, event.at_ms)
            mended = True
        if seq in strange or seq >= given_up.get(getattr(event, "job", ""), seq + 1):
            continue
        if isinstance(
            event, JobSubmitted | ArraySubmitted
        ):  # the one before it may be what is missing
            raise_numbers(state, number_of(event.job))
        try:
            apply(state, event)
        except Exception:
            return seq
    now_ms = max([0, *(event.at_ms for event in found.events.values())])
    _end_those_known_to_have_ended(state, found.jobs, set(), now_ms)
    return None


def _end_those_known_to_have_ended(
    state: State, records: dict[str, Job], except_: Iterable[str], now_ms: int
) -> None:
    for job in [j for j in state.jobs.values() if j.id in records and j.id not in except_]:
        record = records[job.id]
        for number, member in enumerate(job.members):
            if job.phase is not Phase.WAITING and not member.over:
                node = member.slice.node
                lost = MemberLost(
                    at_ms=now_ms, job=job.id, attempt=job.attempt, member=number, node=node, why=""
                )
                apply(state, lost)
        outcome = record.outcome or Outcome.FAILED
        code, why = record.code or 0, record.why
        attempt = job.attempt
        ended = JobFinished(
            at_ms=now_ms, job=job.id, attempt=attempt, outcome=outcome, code=code, why=why
        )
        apply(state, ended)


def _told(
    state: State, start: int, found: Found, given_up: dict[str, int], strange: set[int]
) -> Saved:
    later = {seq: event for seq, event in found.events.items() if seq > start}
    out = [s for s, e in later.items() if s in strange or s >= given_up.get(_job(e), s + 1)]
    known = {*state.jobs, *state.arrays, *found.jobs}
    named = dict.fromkeys(_job(event) for event in found.events.values() if _job(event))
    kept = {number_of(job_id) for job_id in named}
    finished = {
        _job(e) for e in found.events.values() if isinstance(e, JobFinished | ArrayFinished)
    }
    lost = [job_id for job_id in named if job_id not in known and job_id not in finished]
    end = max([state.next_job, found.jobs_top + 1, *(n + 1 for n in kept)])
    span = range(min(kept, default=max(1, end - FINISHED_JOBS_KEPT)), end)
    numbers = {*kept, *(number_of(job_id) for job_id in known)}
    oldest = min([number_of(one) for one in found.jobs], default=span.start)
    lost += [f"j{n}" for n in span if n not in numbers and n >= oldest]
    ended = [j for j in finished if j not in known and number_of(j) >= oldest]
    return Saved(
        state=state,
        replayed=len(later) - len(out),
        left_out=len(out),
        jobs_lost=sorted(set(lost), key=number_of),
        jobs_cut=sorted((j for j in given_up if j in state.jobs), key=number_of),
        records_lost=sorted(ended, key=number_of),
    )


def _job(event: Event) -> str:
    return event.job if isinstance(event, JobEvent) else ""


def write(path: Path, found: Found, saved: Saved, numbers: Numbers) -> None:
    """A store with all that was saved; its log goes on after the highest number ever used."""
    path.unlink(missing_ok=True)
    state = saved.state
    epochs = [e.epoch for e in found.events.values() if isinstance(e, ControllerStarted)]
    named = [number_of(one) + 1 for one in (*map(_job, found.events.values()), *found.jobs)]
    floor = numbers.floor(max([state.next_job, *named]), max([state.epoch, *epochs]))
    known = numbers.written
    first_job = max(floor.first_job, known.job)
    raise_numbers(state, first_job, floor.epoch, known.attempt, known.order)
    for event in found.events.values():
        if isinstance(event, JobPlaced | JobHanded):
            raise_attempt(state, event.job, event.attempt)
    recount(state)
    body, seq = image.encoded(state.snapshot()), found.top + 1
    ends = {
        _job(e): one
        for one, e in found.events.items()
        if isinstance(e, JobFinished | ArrayFinished)
    }
    store = SqliteStore(path)
    try:
        with store.database.transaction() as writer:
            rows = (event_row(one, event) for one, event in sorted(found.events.items()))
            writer.executemany(INSERT_EVENT, rows)
            for job in found.jobs.values():
                writer.execute(FORGET_JOB, (job.id, job.number))
                writer.execute(INSERT_JOB, (*job_row(job), ends.get(job.id, found.top)))
            writer.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?)", (seq, body, checksum(seq, body))
            )
            writer.execute(SET_META, ("unbroken", seq))
    finally:
        store.close()


def salvage(
    database: Path, new: Path, numbers: Numbers, at_least: int = 0, backup: Path | None = None
) -> list[str]:
    """Put what can be saved in the place of a damaged store, which is kept under another name.
    Returns the report, line by line. `at_least`: the number of an event that there was, as others
    know; `backup`: an earlier copy of the store, for what this one lacks."""
    if not database.exists():
        raise StoreError(f"there is no {database}: nothing to save; start with: shoal up")
    found = read(database)
    if backup is not None:
        fill(found, read(backup))
    found.top, found.jobs_top = max(found.top, at_least), numbers.left - 1
    saved = rebuild(found)
    write(new, found, saved, numbers)
    store = SqliteStore(new)
    try:
        state, _ = store.load()
        verify(state)
    except Violation as error:
        raise StoreError(f"what can be read of {database} contradicts itself: {error}") from None
    finally:
        store.close()
    aside = _aside(database)
    for ending in ("-wal", "-shm"):
        beside = database.with_name(database.name + ending)
        if beside.exists():
            beside.replace(aside.with_name(aside.name + ending))
    database.replace(aside)
    new.replace(database)
    return _lines(found, saved, aside)


def booked(ledger: Path) -> int:
    """The last event that the ledger has read; 0 if it cannot say."""
    if not ledger.exists():
        return 0
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(ledger)) as source:
        return int(source.execute("SELECT max(seq) FROM book").fetchone()[0] or 0)
    return 0


def _aside(database: Path) -> Path:
    number = 1
    while (aside := database.with_name(f"{database.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _lines(found: Found, saved: Saved, aside: Path) -> list[str]:
    missing = found.top - len(found.events) if not found.snapshots else 0
    start = found.snapshots[0][0] if found.snapshots else 0
    if found.snapshots:
        missing = found.top - start - sum(seq > start for seq in found.events)
    lines = [
        f"kept: {len(saved.state.jobs)} live jobs, {len(found.jobs)} records of finished jobs, "
        f"{len(found.events)} events",
        f"lost: {max(0, missing)} events that cannot be read, {saved.left_out} that make no sense "
        f"without them, {len(saved.jobs_lost)} jobs, "
        f"{len(saved.records_lost)} records of finished jobs",
    ]
    if found.cut:
        newest = max(found.events, default=0)
        lines.append(f"the last event that was found is number {newest}; more may have followed")
    if saved.jobs_lost:
        lines.append(f"jobs of which nothing is left but a name: {_names(saved.jobs_lost)}")
    if saved.records_lost:
        names = _names(saved.records_lost)
        lines.append(f"finished jobs that are no longer listed: {names}")
    if saved.jobs_cut:
        lines.append(f"jobs that continue from an earlier moment: {_names(saved.jobs_cut)}")
    if saved.tokens_dropped:
        tokens = plural(saved.tokens_dropped, "token")
        text = f"void: {tokens}, because it is not known which were removed"
        lines.append(f"{text}; make new ones with: shoal token add USER")
    if saved.keys_dropped:
        keys = plural(saved.keys_dropped, "key")
        text = f"void: {keys} of nodes, because it is not known which were removed"
        lines.append(f"{text}; join those machines again with: shoal join")
    lines.append(f"the damaged file is {aside}")
    return lines


def _names(jobs: list[str]) -> str:
    more = f" and {len(jobs) - JOBS_NAMED_MAX} more" if len(jobs) > JOBS_NAMED_MAX else ""
    return ", ".join(jobs[:JOBS_NAMED_MAX]) + more
