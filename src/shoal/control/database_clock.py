"""The time of a cluster with several heads: the database's, at the pace of this machine.

A head's own clock does not count, so one that is off by an hour changes nothing. The database's
clock is read with every look at the lease. Once this head knows the time, differences are made up
slowly: a database whose clock is set makes no time limit end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from shoal.control.alarms import Alarms
from shoal.control.clock import ALARM_MS, LOOK_S, Clocks

SLEW_MS = 5.0  # with each renewal: up to 7 ms in a second


class DatabaseClock:
    """Before the database was reached, the time is this machine's: nothing is decided then."""

    def __init__(self, database_ms: Callable[[], int], machine: Clocks | None = None) -> None:
        """`database_ms` is the database's time, estimated without asking it."""
        self._database_ms = database_ms
        self._machine = machine or Clocks()
        self._offset_ms = float(self._machine.wall_ms() - self._boot_ms())
        self._lock = threading.Lock()
        self._newest_ms = 0
        self._known = False

    def now_ms(self) -> int:
        with self._lock:
            self._newest_ms = max(self._newest_ms, int(self._boot_ms() + self._offset_ms))
            return self._newest_ms

    def set(self, not_before_ms: int = 0) -> None:
        """Take the database's time as it is, unless it was followed already: a clock that is set
        just before a take-over makes no time limit end either. Never go back behind an event that
        is stored."""
        with self._lock:
            followed_ms = int(self._boot_ms() + self._offset_ms)
            now_ms = max(followed_ms if self._known else self._database_ms(), not_before_ms)
            self._offset_ms = now_ms - self._boot_ms()
            self._newest_ms = not_before_ms
            self._known = True

    def follow(self) -> None:
        """Come closer to the database's time: by little, except the first time."""
        if not self._known:
            self.set()
        with self._lock:
            off_ms = self._database_ms() - (self._boot_ms() + self._offset_ms)
            self._offset_ms += max(-SLEW_MS, min(SLEW_MS, off_ms))

    def off_ms(self) -> int:
        """How far the database's clock is ahead of the cluster's time."""
        return self._database_ms() - self.now_ms()

    def drift_ms(self) -> int:
        """How far this machine's clock is ahead of the cluster's time."""
        return self._machine.wall_ms() - self.now_ms()

    def _boot_ms(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) * 1000


async def watch(clock: DatabaseClock, alarms: Alarms) -> None:
    """Show clocks that are wrong. Nothing depends on this machine's."""
    while True:
        for name, off_ms in (("machine", clock.drift_ms()), ("database", clock.off_ms())):
            text = ""
            if abs(off_ms) >= ALARM_MS:
                way = "ahead of" if off_ms > 0 else "behind"
                text = (
                    f"the {name}'s clock is {abs(off_ms) // 60_000} min {way} the cluster's time; "
                    "no time limit or schedule is affected; set the clock right"
                )
            alarms.show(f"clock of the {name}", text)
        await asyncio.sleep(LOOK_S)
