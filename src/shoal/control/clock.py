"""Time for the live controller: it passes as it really does, whatever the clock is set to.

The wall clock is looked at once after the machine has started. From then on time is that moment
and what the monotonic clock says has passed since, also for controllers that come later:
`clock.json` in the home keeps the distance between the two.
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
TOLD_MS = 60_000  # a clock that is as wrong as that is an alarm


class Machine:
    """The clocks of this machine."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def boot(self) -> str:
        """Names this life of the machine; the monotonic clock goes on for as long."""
        try:
            return BOOT_ID.read_text().strip()
        except OSError:
            return ""


class Anchor(msgspec.Struct, frozen=True):
    """Our time minus the monotonic clock's, for as long as the machine runs."""

    boot: str
    offset_ms: int


class SystemClock:
    """Never before `not_before_ms`, the newest time that is stored: if the clock was a day ahead
    and was put right, time goes on from there at its usual pace and does not stand still."""

    def __init__(
        self, not_before_ms: int = 0, anchor: Path | None = None, machine: Machine | None = None
    ) -> None:
        self._machine = machine or Machine()
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
            except OSError as error:  # the next controller asks the wall clock again
                log.error("%s cannot be written: %s", anchor, error)

    def now_ms(self) -> int:
        return self._offset_ms + self._machine.monotonic_ms()

    def drift_ms(self) -> int:
        """How far the machine's clock is ahead of ours."""
        return self._machine.wall_ms() - self.now_ms()


async def watch(clock: SystemClock, alarms: Alarms, tell: Callable[[int], None]) -> None:
    """Have the loop told how far the machine's clock is off, so that a jump is an event."""
    while True:
        drift_ms = clock.drift_ms()
        tell(drift_ms)
        if abs(drift_ms) >= TOLD_MS:
            way = "ahead of" if drift_ms > 0 else "behind"
            alarms.raise_(
                "clock",
                f"the machine's clock is {abs(drift_ms) // 60_000} min {way} the cluster's time; "
                "durations are right, dates are the machine's again after its next start",
            )
        else:
            alarms.clear("clock")
        await asyncio.sleep(LOOK_S)


def _read(path: Path | None) -> Anchor | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Anchor) if path is not None else None
    except (OSError, msgspec.DecodeError):
        return None
