"""Follows the log and keeps the bars, in its own thread: the loop only says how far the log is.

Its place in the log is written with the bars. After a crash it reads on from there, so that there
is neither a gap nor a bar twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.control.loop import ControlLoop
from shoal.control.past.bars import KINDS, OPENING, Book
from shoal.control.past.log import EVENTS_AT_ONCE, Log
from shoal.control.past.store import BarStore, Owner, PlaceInLog, ShownBar, ShownSpan
from shoal.control.store.events import EventStore
from shoal.control.store.schema import Unreadable
from shoal.core.state.events.log import Event
from shoal.core.state.state import State
from shoal.database.sqlite import Place
from shoal.model.report import Report
from shoal.ports import StoreError

log = logging.getLogger("shoal.past")

WRITE_S = 2.0
AGAIN_S = 15.0  # after trouble
PAUSE_FACTOR = 2  # a long way behind, it works for a third of the time, and pauses for two
OWNERS_MAX = 50_000  # of jobs that were placed and are not written yet
WAIT_S = 2.0  # a reader waits this long for the newest bars

Result = TypeVar("Result")
Shown = tuple[list[ShownBar], list[ShownSpan], PlaceInLog]


class Bars:
    """Trouble with its file never stops a cluster: the events are in the log."""

    def __init__(
        self, place: Place, store: EventStore, loop: ControlLoop, alarm: Callable[[str], None]
    ) -> None:
        self._where = place
        self._events = store
        self._loop = loop
        self._alarm = alarm
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bars")
        self._store: BarStore | None = None
        self._log: Log | None = None
        self._book = Book()
        self._place = PlaceInLog(0, 0, 0, 0)
        self._newest = loop.last_seq
        self._owners: dict[str, Owner] = {}
        self._trouble = ""

    # -- on the loop's thread --------------------------------------------------------------

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        """A step is stored. Names are taken here, where they cost least."""
        self._newest = seq
        if len(self._owners) < OWNERS_MAX:
            jobs = self._loop.tick.state.jobs
            for event in events:
                if isinstance(event, OPENING) and (job := jobs.get(event.job)) is not None:
                    self._owners[job.id] = (job.spec.name or "", job.spec.tenant)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S if not self._trouble else AGAIN_S)
            try:
                while self._store is None or self._place.seq < self._newest:
                    began = time.monotonic()
                    await self._in_thread(self._write)
                    behind = self._newest - self._place.seq > EVENTS_AT_ONCE
                    await asyncio.sleep(PAUSE_FACTOR * (time.monotonic() - began) if behind else 0)
                self._say("")
            except (StoreError, OSError, Unreadable) as error:
                self._say(str(error))

    async def shown(self, from_ms: int, to_ms: int, node: str = "", job: str = "") -> Shown:
        """What was in that range, as far as the log is read; the newest events are waited for."""
        deadline = time.monotonic() + WAIT_S
        while self._store is None or self._place.seq < self._newest:
            await self._in_thread(self._write)
            if time.monotonic() > deadline:
                break
        now_ms, newest = self._loop.now_ms(), self._newest
        bars, spans, place = await self._in_thread(lambda: self._read(from_ms, to_ms, node, job))
        return bars, spans, place._replace(known_ms=now_ms) if place.seq >= newest else place

    async def close(self) -> None:
        """What is not written now is read from the log again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            self._alarm(f"the time line cannot be kept: {trouble}")
        elif self._trouble and not trouble:
            self._alarm("")
        self._trouble = trouble

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- in its own thread -----------------------------------------------------------------

    def _read(self, from_ms: int, to_ms: int, node: str, job: str) -> Shown:
        assert self._store is not None
        bars = self._store.bars(from_ms, to_ms, node, job)
        return bars, self._store.spans(from_ms, to_ms, node), self._place

    def _write(self) -> None:
        """The next events of the log."""
        try:
            self._follow()
        except BaseException:
            if self._store is not None:  # what is stored counts: the book begins again from there
                self._store.close()
                self._store = None
            raise

    def _follow(self) -> None:
        if self._store is None:
            self._store = BarStore(self._where)
            self._begin(self._store)
        elif self._newest - self._place.seq > EVENTS_AT_ONCE and not self._reaches_back():
            self._begin(self._store)
        assert self._log is not None
        place = self._place
        until = min(self._newest, place.seq + EVENTS_AT_ONCE)
        first = self._book.next_bar
        found = self._log.events(place.seq, until, KINDS)
        for recorded in found:
            self._book.take(recorded.event)
        changed = self._book.drain()
        new = {bar.job: None for bar in changed.bars if bar.number >= first}
        owners = {job: self._owner(job) for job in new}
        known_ms = found[-1].event.at_ms if found else place.known_ms
        oldest_ms = place.oldest_ms or (self._log.time_of(1) or 0)
        mark = self._log.mark(until) or 0
        place = PlaceInLog(until, mark, max(known_ms, place.known_ms), oldest_ms)
        self._place = self._store.write(changed, owners, place)

    def _owner(self, job: str) -> Owner:
        """The name and tenant: as the loop said, or as it was submitted, or as it ended."""
        known = self._owners.pop(job, None)
        if known is not None:
            return known
        assert self._log is not None
        event = self._log.submitted(job)
        if event is not None:
            return event.spec.name or "", event.spec.tenant
        ended = self._events.job(job)
        return (ended.spec.name or "", ended.spec.tenant) if ended is not None else ("", "")

    def _begin(self, store: BarStore) -> None:
        """Where the bars end, if the log goes on from there; else where the log begins."""
        self._log = Log(self._events.database)
        place = store.place()
        if place is not None and self._follows(place):
            self._book, self._place = store.load(), place
            return
        start, state = self._oldest()
        at_ms = (self._log.time_of(start) or 0) if start else 0
        store.begin_again(at_ms)
        self._book = Book()
        self._book.next_bar, self._book.next_span = store.next_numbers()
        self._place = PlaceInLog(start, 0, at_ms, at_ms)
        if start:
            self._book.seed(state, at_ms)
            owners = {j.id: (j.spec.name or "", j.spec.tenant) for j in state.jobs.values()}
            mark = self._log.mark(start) or 0
            self._place = store.write(self._book.drain(), owners, self._place._replace(mark=mark))

    def _reaches_back(self) -> bool:
        """The log is cut while old bars are made: it must not overtake them."""
        return self._log is not None and self._log.first_seq() <= self._place.seq + 1

    def _follows(self, place: PlaceInLog) -> bool:
        assert self._log is not None
        mark = self._log.mark(place.seq)
        whole = place.seq >= self._log.unbroken_from
        return whole and mark is not None and mark == place.mark

    def _oldest(self) -> tuple[int, State]:
        """The first state from which the log is whole."""
        assert self._log is not None
        if self._log.whole:
            return 0, State()
        for seq in self._log.snapshots():
            try:
                return seq, self._log.state(seq)
            except Unreadable as error:
                log.warning("a snapshot is left out: %s", error)
        return self._newest, State()
