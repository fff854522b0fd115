"""Time for the live controller: it passes at the real pace, whatever the wall clock is set to.

The wall clock is read once after the machine has started. From then on time is that moment plus
the time that has passed on the monotonic clock, for later controllers too: `clock.json` in the home
keeps the distance between the two clocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.control.alarms import Alarms
from shoal.files import write_private

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
