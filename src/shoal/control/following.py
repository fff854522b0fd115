"""The loop of a standby: it follows the log that the leader writes, and decides nothing.

    load -> follow -> follow -> ... -> (the lease is won) hand over -> a `ControlLoop` begins

Readers find the stored state here as in a `ControlLoop`, at most a moment late. Requests are
refused, because only the leader answers them: `api/forwarding.py` sends them there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from shoal.control.alarms import Alarms
from shoal.control.logs import LogStore
from shoal.control.loop import Busy, ControlLoop, Unreadable
from shoal.control.packages import PackageStore
from shoal.control.store.events import Warm
from shoal.core.state.apply import apply
from shoal.core.state.apply_queue import adopt_functions
from shoal.core.state.events.log import Recorded
from shoal.core.state.state import State
from shoal.database.base import StoreAway
from shoal.database.lease import Head
from shoal.model.report import Answer, Request
from shoal.ports import Clock, Engine, Store, StoreError
from shoal.tick import Stage, Tick

log = logging.getLogger("shoal.control")

FOLLOW_S = 0.1  # between two looks at the log
HURRY_S = 0.02  # the same, while somebody waits for an event
AWAY_S = 0.5  # between two attempts to reach the store
ENDED_S = 0.5  # for a look at one job
EVENTS_AT_ONCE = 5_000  # a standby that is further behind loads a snapshot instead
# What paces a step is trimmed by steps. A standby makes none, so it loads again now and then.
EVENTS_UNTIL_FRESH = 100_000

Result = TypeVar("Result")


class HandedOver(Busy, Unreadable):
    """The state belongs to the loop that leads by now: another try finds it."""


class Following(ControlLoop):
    """`open_store` may fail for as long as the database is away. `leader` is the head that leads,
    as far as this one knows; None: none does."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        clock: Clock,
        logs: LogStore,
        packages: PackageStore | None = None,
        engine_kind: str = "local",
        alarms: Alarms | None = None,
    ) -> None:
        self._open_store = open_store
        self._opened = False
        absent = cast(Store, _Absent())
        super().__init__(
            absent, cast(Engine, _Nobody()), clock, None, logs, packages, engine_kind, alarms
        )
        self._handed_over = False
        self._wake = asyncio.Event()
        self._trouble = "this head has not read the cluster's log yet; try again in a moment"
        self.known_leader: Head | None = None
        self.as_of_ms = 0  # when it last saw the end of the log
        self.refused = ""  # why this head cannot read the log, and so must not lead
        self._loaded_seq = 0
        self._wanted_seq = 0
        self._newest: Recorded | None = None  # the last event that was followed
        self._odd_seq = -1
        self._lost = False  # the log has lost events that this head had seen
        # Its own: those that serve the API may all wait for a server that does not answer.
        self._thread = ThreadPoolExecutor(1, "following")

    def leader(self) -> Head | None:
        """One without an address cannot be asked yet."""
        known = self.known_leader
        return known if known is not None and known.url else None

    async def ended(self, job: str) -> bool:
        """Whether the store has it, and it does not live. A store that does not say so at once
        is left alone: the leader knows."""
        if not self.readable or job in self.state.jobs:
            return False
        try:
            async with asyncio.timeout(ENDED_S):
                return await asyncio.to_thread(self.store.job, job) is not None
        except (StoreError, TimeoutError):
            return False

    async def request(self, request: Request) -> Answer:  # noqa: ARG002
        raise Busy("no head leads at this moment; try again in a moment")

    async def wait_for(self, seq: int, timeout_s: float) -> bool:
        """Whether this head knows the event of this number, within the time."""
        deadline = time.monotonic() + timeout_s
        while not (self.readable and self.last_seq >= seq):
            self._wanted_seq = max(self._wanted_seq, seq)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._wake.set()
            with contextlib.suppress(StoreError):
                await self.changed("", left_s)
        return True

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self._look()
                pause_s = HURRY_S if self._wanted_seq > self.last_seq else FOLLOW_S
                self.refused = ""
                self.alarms.clear("store")
            except StoreError as error:
                self.refused = "" if isinstance(error, StoreAway) else str(error)
                self._note(str(error))
                pause_s = AWAY_S
            except Exception as error:
                log.exception("the log cannot be followed; it is loaded again")
                self.functions.distrust(error)
                self.tick.stage = Stage.UNLOADED
                self._note(repr(error))
                pause_s = AWAY_S
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            if pause_s == FOLLOW_S and self._wanted_seq > self.last_seq:
                await asyncio.sleep(HURRY_S)

    def hand_over(self) -> Warm | None:
        """The state as far as it was followed. From now on it belongs to the loop that leads, so
        whoever still reads here is asked to come again."""
        warm = None
        if self.tick.settled:
            warm = Warm(self.tick.state, self.last_seq, self._newest, self._lost)
        self.tick.stage = Stage.UNLOADED
        self.tick.state = State()
        self._handed_over, self.known_leader = True, None
        self._notify(list(self._watchers))
        return warm

    async def settled(self) -> None:
        if self._handed_over:
            raise HandedOver("this head begins to lead; try again in a moment")
        await super().settled()

    def _load(self) -> None:
        """Not by the constructor: the database may be away."""

    async def _look(self) -> None:
        if not self._opened:
            self.store = await self._in_thread(self._open_store)
            self._opened = True
        if not self.tick.settled or self.last_seq - self._loaded_seq >= EVENTS_UNTIL_FRESH:
            await self._load_again()
        start = max(0, self.last_seq - 1)
        rows = await self._in_thread(lambda: self.store.events(start, EVENTS_AT_ONCE))
        self.as_of_ms = self.clock.now_ms()
        if self._is_other_log(rows):
            await self._load_again()
            return
        rows = rows[1:] if self.last_seq else rows
        if not rows:
            return
        self._follow(rows)
        events = [row.event for row in rows]
        self.counters.happened(self.tick.state, events, {})
        self._happened(events)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _is_other_log(self, rows: Sequence[Recorded]) -> bool:
        """It does not go on from the newest event that is known here: this head is too far behind,
        or a server took over that had not got the last events. The newest one is read with those
        after it, and compared."""
        if not self.last_seq:
            return bool(rows) and (len(rows) == EVENTS_AT_ONCE or rows[0].seq != 1)
        if not rows or rows[0].seq != self.last_seq:
            again, self._odd_seq = self._odd_seq != self.last_seq, self.last_seq
            self._lost |= not rows  # otherwise this head is far behind, or the log was restored
            return again
        known, self._newest = self._newest, rows[-1]
        if known is not None and known != rows[0]:
            self._newest, self._lost = None, True
            return True
        return len(rows) == EVENTS_AT_ONCE or rows[-1].seq - self.last_seq + 1 != len(rows)

    def _follow(self, rows: Sequence[Recorded]) -> None:
        """All of them without a pause: readers see the state as some step left it."""
        tick = self.tick
        tick.stage = Stage.UNLOADED
        for row in rows:
            apply(tick.state, row.event)
        tick.last_seq = rows[-1].seq
        if self.policy is not tick.policy:
            self._obey(tick)
        tick.stage = Stage.LOADED

    async def _load_again(self) -> None:
        """Readers see the state as it was, until the new one is there."""
        fresh = Tick(self.store, None, self._send)
        await self._in_thread(fresh.load)
        self._obey(fresh)
        self.tick = fresh
        self._loaded_seq = fresh.last_seq
        self._newest = None
        self._trouble = ""
        self._gate.set()
        self.people_changed()
        self._notify(list(self._watchers))

    def _obey(self, tick: Tick) -> None:
        """Readers see the queue in the policy's order; in the usual one if this head lacks it."""
        self.policy = tick.policy
        lost = {name for _, name in self.functions.lost}
        if not lost & {self.policy.order, self.policy.placement}:
            self.functions.load(self.policy)
        adopt_functions(tick.state, self.functions.table)
        self.look_at_policy()

    def _note(self, reason: str) -> None:
        self._trouble = self._trouble if self.readable else f"the database is away: {reason}"
        self.alarms.raise_("store", f"the log cannot be followed: {reason}")


class _Nobody:
    """The engine of a standby: no node is linked to it."""

    fences = False


class _Absent:
    """The store before the database was reached. Whoever reads waits for the state first."""

    snapshot_seq = unbroken_from = 0
    tight = remote = False

    def __getattr__(self, name: str) -> Any:
        raise StoreError(f"this head has not reached its database yet ({name})")
