"""Time for the live controller: never runs backwards, whatever the machine's clock does."""

from __future__ import annotations

import time


class SystemClock:
    """The wall clock at the start, and from there on the monotonic one."""

    def __init__(self, not_before_ms: int = 0) -> None:
        wall_ms = time.time_ns() // 1_000_000
        self._offset_ms = max(wall_ms, not_before_ms) - _monotonic_ms()

    def now_ms(self) -> int:
        return self._offset_ms + _monotonic_ms()


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
