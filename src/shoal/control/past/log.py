"""Reads what the log has of the past: events by kind and time, and old snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.control.store import finding
from shoal.control.store.rows import Unreadable, event_of, snapshot_of
from shoal.control.store.schema import NOTABLE
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.database.base import Database
from shoal.model.events import ArraySubmitted, JobSubmitted, Recorded

EVENTS_AT_ONCE = 5_000


class _When(msgspec.Struct):
    at_ms: int


_when = msgspec.json.Decoder(_When).decode


class Log:
    """For any thread, and for another process. It never writes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        rows = database.read("SELECT value FROM meta WHERE key = 'unbroken'")
        self.unbroken_from: int = rows[0][0] if rows else 0

    def last_seq(self) -> int:
        return self._number("SELECT max(seq) FROM events")

    def first_seq(self) -> int:
        """The first event that is there, with all that follow; 0: there is none."""
        query = f"SELECT min(seq) FROM events WHERE seq >= {int(self.unbroken_from)}"
        return self._number(query)

    @property
    def whole(self) -> bool:
        """It has every event since the cluster began."""
        return self.first_seq() <= 1 and not self.unbroken_from

    def mark(self, seq: int) -> int | None:
        """Tells this event from another one of the same number, in another log; None: it is not
        there."""
        rows = self.database.read("SELECT crc FROM events WHERE seq = ?", (seq,))
        return rows[0][0] or 0 if rows else None

    def time_of(self, seq: int) -> int | None:
        """Of the first event from this one on."""
        query = "SELECT body FROM events WHERE seq >= ? ORDER BY seq LIMIT 1"
        rows = self.database.read(query, (seq,))
        try:
            return _when(rows[0][0]).at_ms if rows else None
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            return self.time_of(seq + 1)

    def seq_at(self, at_ms: int) -> int:
        """The last event up to this time."""
        return finding.seq_at(at_ms + 1, self.last_seq(), self.time_of)

    def events(self, after: int, until: int, kinds: Sequence[str] = ()) -> list[Recorded]:
        """Those after the first and up to the second; `kinds`: only these. `Unreadable` if one of
        them cannot be read, and all were asked for; otherwise it is left out."""
        where = f" AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        rows = self.database.read(
            f"SELECT seq, body, crc FROM events WHERE seq > ? AND seq <= ?{where} ORDER BY seq",
            (after, until, *kinds),
        )
        if not kinds and len(rows) != until - after:
            raise Unreadable(f"the log has a hole between the events {after} and {until}")
        found = []
        for seq, body, crc in rows:
            try:
                found.append(Recorded(seq, event_of(seq, body, crc)))
            except Unreadable as error:
                if not kinds:
                    raise Unreadable(f"event {seq} is damaged ({error})") from None
        return found

    def notable(self, until: int, limit: int) -> list[Recorded]:
        """The last ones up to this one, oldest first."""
        query = f"SELECT seq, body, crc FROM events WHERE seq <= ? AND {NOTABLE}"
        rows = self.database.read(f"{query} ORDER BY seq DESC LIMIT ?", (until, limit))
        found = []
        for seq, body, crc in reversed(rows):
            try:
                found.append(Recorded(seq, event_of(seq, body, crc)))
            except Unreadable:
                continue
        return found

    # -- snapshots -------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """Their places in the log, from which everything can be read on; oldest first."""
        least = max(self.unbroken_from, self.first_seq() - 1)
        rows = self.database.read("SELECT seq FROM snapshots WHERE seq >= ? ORDER BY seq", (least,))
        return [seq for (seq,) in rows]

    def state(self, seq: int) -> State:
        """As this snapshot has it; `Unreadable` if it cannot be read, or is no longer there."""
        rows = self.database.read("SELECT body, crc FROM snapshots WHERE seq = ?", (seq,))
        if not rows:
            raise Unreadable(f"the snapshot at event {seq} is no longer there")
        return restore(snapshot_of(seq, *rows[0]), FUNCTIONS)

    # -- jobs ------------------------------------------------------------------------------

    def submitted(self, job: str) -> JobSubmitted | ArraySubmitted | None:
        """The event that began a job, if the log still has it."""
        query = "SELECT seq, body, crc FROM events WHERE job = ? ORDER BY seq LIMIT 1"
        for seq, body, crc in self.database.read(query, (job,)):
            try:
                event = event_of(seq, body, crc)
            except Unreadable:
                return None
            return event if isinstance(event, JobSubmitted | ArraySubmitted) else None
        return None

    def _number(self, query: str) -> int:
        [(found,)] = self.database.read(query)
        return found or 0
