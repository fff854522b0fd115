"""Rebuilds the state as it was: from the newest snapshot before, and the events since, by the same
`apply` as ever. It keeps what it has, so that the next moment is near."""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from shoal.control.past.log import Log
from shoal.control.store.rows import Unreadable
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply import apply
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot, State

EVENTS_AT_ONCE = 2_500  # then a look at the clock, and a place to come back to
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
            until = min(seq, (self._seq // EVENTS_AT_ONCE + 1) * EVENTS_AT_ONCE)
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
            snapshot = msgspec.msgpack.decode(body, type=Snapshot)
            self._state, self._seq = restore(snapshot, FUNCTIONS), near
        elif here < 0:
            if not self.log.whole:
                raise TooEarly(self.oldest_ms())
            self._state, self._seq = State(FUNCTIONS), 0

    def _keep_place(self) -> None:
        if self._seq % EVENTS_AT_ONCE or self._seq in self._places or self._state is None:
            return
        body = msgspec.msgpack.encode(self._state.snapshot())
        self._places[self._seq] = body
        self._bytes += len(body)
        while self._bytes > PLACES_BYTES_MAX:
            self._bytes -= len(self._places.popitem(last=False)[1])
