"""Time for the live controller: it passes at the real pace, whatever the wall clock is set to.

The wall clock is read once after the machine has started. From then on time is that moment plus
the time that has passed on the monotonic clock, for later controllers too: `clock.json` in the home
keeps the distance between the two clocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.control.alarms import Alarms
from shoal.machine.files import write_private

log = logging.getLogger("shoal.control")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOK_S = 5.0
ALARM_MS = 60_000  # a clock that is wrong by this much is an alarm


class Clocks:
    """The clocks of this machine."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def boot(self) -> str:
        """Names one run of the machine, for which the monotonic clock counts."""
        try:
            return BOOT_ID.read_text().strip()
        except OSError:
            return ""


class Anchor(msgspec.Struct, frozen=True):
    """The cluster's time minus the monotonic clock, for as long as the machine runs."""

    boot: str
    offset_ms: int


class SystemClock:
    """Never before `not_before_ms`, the newest time that is stored. If the clock was a day ahead
    and was corrected, time goes on from there at its usual pace instead of standing still."""

    def __init__(
        self,
        not_before_ms: int = 0,
        anchor: Path | None = None,
        machine: Clocks | None = None,
    ) -> None:
        self._machine = machine or Clocks()
        now_ms, boot = self._machine.monotonic_ms(), self._machine.boot()
        kept = _read(anchor)
        if kept is not None and boot and kept.boot == boot:
            offset_ms = kept.offset_ms
        else:
            offset_ms = self._machine.wall_ms() - now_ms
        self._offset_ms = max(offset_ms, not_before_ms - now_ms)
        found = Anchor(boot, self._offset_ms)
        if anchor is not None and found != kept:
            try:
                write_private(anchor, msgspec.json.encode(found) + b"\n")
            except OSError as error:  # the next controller reads the wall clock again
                log.error("%s cannot be written: %s", anchor, error)

    def now_ms(self) -> int:
        return self._offset_ms + self._machine.monotonic_ms()

    def drift_ms(self) -> int:
        """How far the machine's clock is ahead of the cluster's time."""
        return self._machine.wall_ms() - self.now_ms()


async def watch(clock: SystemClock, alarms: Alarms, report: Callable[[int], None]) -> None:
    """Report how far the machine's clock is off, so that a jump becomes an event."""
    while True:
        drift_ms = clock.drift_ms()
        report(drift_ms)
        if abs(drift_ms) >= ALARM_MS:
            way = "ahead of" if drift_ms > 0 else "behind"
            alarms.raise_(
                "clock",
                f"the machine's clock is {abs(drift_ms) // 60_000} min {way} the cluster's time; "
                "durations are right; dates follow the machine's clock again after its next start",
            )
        else:
            alarms.clear("clock")
        await asyncio.sleep(LOOK_S)


def _read(path: Path | None) -> Anchor | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Anchor) if path is not None else None
    except (OSError, msgspec.DecodeError):
        return None


# The time of a cluster with several heads: the database's, at the pace of this machine.
#
# A head's own clock does not count, so one that is off by an hour changes nothing. The database's
# clock is read with every look at the lease. Once this head knows the time, differences are made up
# slowly: a database whose clock is set makes no time limit end.


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


async def watch_database(clock: DatabaseClock, alarms: Alarms) -> None:
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
