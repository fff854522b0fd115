"""Reads what the log has of the past: events by kind and time, and old snapshots."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from shoal.control.store import finding
from shoal.control.store.schema import BETWEEN, NOTABLE, Unreadable, event_of, snapshot_of
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state import image
from shoal.core.state.apply import apply
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.log import Recorded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.database.base import Database

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
        query = (
            f"SELECT seq, body, crc FROM events WHERE job = ? AND {BETWEEN} ORDER BY seq LIMIT 1"
        )
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


# Rebuilds the state as it was: from the newest snapshot before, and the events since, by the same
# `apply` as ever. It keeps what it has, so that the next moment is near.


MOMENT_EVENTS_AT_ONCE = 2_500  # then a look at the clock, and a place to come back to
PLACES_BYTES_MAX = 128 << 20  # of states that are kept for going back


class TooEarly(Exception):
    """The log has nothing from which the state then could be rebuilt."""

    def __init__(self, oldest_ms: int) -> None:
        super().__init__(oldest_ms)
        self.oldest_ms = oldest_ms


class NotYet(Exception):
    """There was no time to get there; another try goes on from here."""

    def __init__(self, left: int) -> None:
        super().__init__(left)
        self.left = left


class Moments:
    """One state, which moves through time. Whoever gets it may read it until the next call."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._state: State | None = None
        self._seq = 0
        self._places: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def oldest_ms(self) -> int:
        """The first moment that can be rebuilt."""
        return self.log.time_of(self._oldest_seq()) or 0

    def _oldest_seq(self) -> int:
        if self.log.whole:
            return 1
        return next(iter(self.log.snapshots()), self.log.last_seq())

    def at(self, at_ms: int, seconds_max: float) -> tuple[State, int]:
        """The state after all events up to this time, and the number of the last of them."""
        deadline = time.monotonic() + seconds_max
        seq = self.log.seq_at(at_ms)
        if seq < self._oldest_seq():
            raise TooEarly(self.oldest_ms())
        self._go_near(seq)
        assert self._state is not None
        while self._seq < seq:
            until = min(seq, (self._seq // MOMENT_EVENTS_AT_ONCE + 1) * MOMENT_EVENTS_AT_ONCE)
            state, self._state = self._state, None  # half a step forward is no state
            for recorded in self.log.events(self._seq, until):
                apply(state, recorded.event)
            self._state, self._seq = state, until
            self._keep_place()
            if self._seq < seq and time.monotonic() > deadline:
                raise NotYet(seq - self._seq)
        return self._state, seq

    def _go_near(self, seq: int) -> None:
        """To the nearest state before, unless the present one is as near."""
        here = self._seq if self._state is not None and self._seq <= seq else -1
        stored = [one for one in self.log.snapshots() if here < one <= seq]
        near = max((one for one in self._places if here < one <= seq), default=-1)
        for one in reversed(stored):
            if one <= near:
                break
            try:
                self._state, self._seq = self.log.state(one), one
                return
            except Unreadable:
                continue  # an older one leads there as well
        if near > here:
            self._places.move_to_end(near)
            body = self._places[near]
            self._state, self._seq = restore(image.decoded(body), FUNCTIONS), near
        elif here < 0:
            if not self.log.whole:
                raise TooEarly(self.oldest_ms())
            self._state, self._seq = State(FUNCTIONS), 0

    def _keep_place(self) -> None:
        if self._seq % MOMENT_EVENTS_AT_ONCE or self._seq in self._places or self._state is None:
            return
        body = image.encoded(self._state.snapshot())
        self._places[self._seq] = body
        self._bytes += len(body)
        while self._bytes > PLACES_BYTES_MAX:
            self._bytes -= len(self._places.popitem(last=False)[1])
