"""The audit log of a cluster with a database: one chain over all heads, its lines in a table.

Only the leader adds to the chain. Other heads, and a leader that was deposed before it could write
a line, hand their lines in: these wait in a table that every head may write, or in a file of the
head while the server is away. The leader takes them from there. Each line has an id, so that it
is in the chain once, however often it was handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.audit import FIRST_HASH, AuditQueue, sealed, verify_lines
from shoal.database.base import Cursor, Database, Deposed
from shoal.machine.files import read_own, write_private
from shoal.model.people import AuditEntry, Mark
from shoal.ports import StoreError

log = logging.getLogger("shoal.control")

PART, VERSION = "audit", 1
LINES_MAX = 500_000  # about as much as the files of a cluster without a database hold
BLOCK = 1_000  # the first line of a block has the hash before it; whole blocks are removed
AT_ONCE = 500
COLLECT_S = 2.0  # how often the leader takes the lines that others have handed in

_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    seq {integer} PRIMARY KEY, id TEXT NOT NULL UNIQUE, line {blob} NOT NULL);
CREATE TABLE IF NOT EXISTS audit_end (
    one {integer} PRIMARY KEY CHECK (one = 1), seq {integer} NOT NULL, hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS handed_in (
    number {counter}, id TEXT NOT NULL UNIQUE, line {blob} NOT NULL)
"""

Handed = tuple[str, bytes]  # an id, and the entry as JSON
HandIn = Callable[[Sequence[Handed]], None]


class AuditTable(AuditQueue):
    """`hand_in` stores lines that this head may not add to the chain itself. Without `leads`, all
    lines are such lines."""

    def __init__(
        self,
        database: Database,
        alarms: Alarms,
        spool: Path,
        hand_in: HandIn,
        *,
        leads: bool,
        head: str = "",
    ) -> None:
        super().__init__(alarms)
        self._database = database
        self._spool = spool
        self._hand_in = hand_in
        self._leads = leads
        self._name = head
        self._task: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        if leads:
            prepare(database)
        with contextlib.suppress(RuntimeError):  # no event loop runs yet
            self._begin()

    def _begin(self) -> None:
        if self._collecting is None:
            running = asyncio.get_running_loop()
            self._collecting = running.create_task(self._collect())

    async def write(self, entry: AuditEntry) -> None:
        self._begin()
        named = msgspec.structs.replace(entry, via=self._name, id=secrets.token_hex(8))
        await super().write(named)

    def newest_first(self) -> Iterator[AuditEntry]:
        before = 2**62
        while rows := self._database.read(
            "SELECT seq, line FROM audit WHERE seq < ? ORDER BY seq DESC LIMIT ?", (before, AT_ONCE)
        ):
            before = rows[-1][0]
            for _, line in rows:
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=AuditEntry)

    async def close(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
        if self._task is not None:
            await self._task
        await self._write_all()

    def _flush(self) -> None:
        self._flushing = None
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            first, dropped = batch[0][0], self._dropped
            skipped = msgspec.structs.replace(first, skipped=first.skipped + dropped)
            entries = [skipped, *(entry for entry, _ in batch[1:])]
            lines, problem = [(one.id, msgspec.json.encode(one)) for one in entries], ""
            try:
                await asyncio.to_thread(self._store, lines)
            except StoreError as error:
                self._waiting, problem = batch + self._waiting, f"the audit log: {error}"
            self._settle(batch, problem)
            if problem:
                return

    def _store(self, lines: list[Handed]) -> None:
        """In a thread. What cannot be stored now is on this head's disk when it raises."""
        try:
            if self._leads:
                with contextlib.suppress(Deposed):
                    self.head = add(self._database, lines)
                    self._spool.unlink(missing_ok=True)
                    return
            self._hand_in(lines)
            self._spool.unlink(missing_ok=True)
        except StoreError:
            write_private(self._spool, b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
            raise

    async def _collect(self) -> None:
        """Bring in what an earlier life of this head could not, and what other heads handed in."""
        left = False
        while True:
            try:
                if not left:
                    await asyncio.to_thread(self._hand_in_spool)
                    left = True
                if self._leads:
                    self.head = await asyncio.to_thread(collect, self._database) or self.head
            except StoreError as error:
                log.debug("lines that were handed in stay where they are: %s", error)
            await asyncio.sleep(COLLECT_S)

    def _hand_in_spool(self) -> None:
        if self.stuck:
            return  # they are this life's own
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            lines = read_own(self._spool).splitlines()
            self._hand_in([msgspec.json.decode(line, type=Handed) for line in lines])
            self._spool.unlink()


def prepare(database: Database) -> None:
    database.prepare(PART, VERSION, _SCHEMA.format(**database.words._asdict()))


def add(database: Database, lines: Sequence[Handed]) -> str:
    """Add these to the chain, except those that are in it; returns the hash of the newest."""
    with database.transaction() as cursor:
        return _add(cursor, lines)


def collect(database: Database) -> str:
    """Take lines that were handed in; returns the hash of the newest, or nothing."""
    rows = database.read("SELECT id, line FROM handed_in ORDER BY number LIMIT ?", (AT_ONCE,))
    if not rows:
        return ""
    with database.transaction() as cursor:
        head = _add(cursor, [(id_, bytes(line)) for id_, line in rows])
        cursor.executemany("DELETE FROM handed_in WHERE id = ?", [(id_,) for id_, _ in rows])
    return head


def _add(cursor: Cursor, lines: Sequence[Handed]) -> str:
    ends = cursor.execute("SELECT seq, hash FROM audit_end")
    seq, head = ends[0] if ends else (0, FIRST_HASH)
    known = set(_known(cursor, [id_ for id_, _ in lines]))
    rows = []
    for id_, body in lines:
        if id_ in known:
            continue
        known.add(id_)
        seq += 1
        entry = msgspec.json.decode(body, type=AuditEntry)
        first = head if seq % BLOCK == 1 and seq > 1 else ""
        line, head = sealed(msgspec.structs.replace(entry, seq=seq, prev=first), head)
        rows.append((seq, id_, line))
    if rows:
        cursor.executemany("INSERT INTO audit (seq, id, line) VALUES (?, ?, ?)", rows)
        cursor.execute(
            "INSERT INTO audit_end (one, seq, hash) VALUES (1, ?, ?) ON CONFLICT (one) "
            "DO UPDATE SET seq = excluded.seq, hash = excluded.hash",
            (seq, head),
        )
        cursor.execute("DELETE FROM audit WHERE seq <= ?", (_oldest(seq),))
    return str(head)


def _known(cursor: Cursor, ids: Sequence[str]) -> Iterable[str]:
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        marks = ", ".join("?" * len(some))
        for (id_,) in cursor.execute(f"SELECT id FROM audit WHERE id IN ({marks})", some):
            yield id_


def verify_table(database: Database) -> tuple[AuditEntry | None, AuditEntry | None]:
    """As `audit.verify` does it with files."""
    rows = database.read("SELECT seq, hash FROM audit_end")
    mark = Mark(*rows[0]) if rows else None
    # The oldest lines go in whole blocks, and no others.
    [(oldest,)] = database.read("SELECT min(seq) FROM audit")
    cut = mark is not None and oldest is not None and _oldest(mark.seq) >= oldest - 1
    return verify_lines(_lines(database), mark, "the table audit_end is empty", cut=cut)


def _oldest(newest: int) -> int:
    """Lines up to this one are removed."""
    return max(0, (newest - LINES_MAX) // BLOCK * BLOCK)


def _lines(database: Database) -> Iterator[tuple[str, bytes]]:
    after = 0
    while rows := database.read(
        "SELECT seq, line FROM audit WHERE seq > ? ORDER BY seq LIMIT ?", (after, AT_ONCE)
    ):
        for after, line in rows:
            yield f"row {after} of the audit log", bytes(line)
