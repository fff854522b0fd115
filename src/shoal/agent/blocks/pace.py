"""How fast a node takes and gives bytes, at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 1.0  # what was not used for so long may be used at once


def after(ready_s: float, now_s: float, size: int, bytes_s: float) -> float:
    """When the next bytes may move after these, if these could move at `ready_s`."""
    return max(ready_s, now_s - BURST_S) + size / bytes_s


class Pace:
    """Holds up threads, so that not more than `bytes_s` are taken; 0: it holds up nobody."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_s = 0.0
        self._ready_s = 0.0
        self._now_s, self._sleep = now_s, sleep
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Returns when these bytes may have moved."""
        if not self.bytes_s:
            return
        with self._lock:
            now_s = self._now_s()
            self._ready_s = after(self._ready_s, now_s, size, self.bytes_s)
            wait_s = self._ready_s - now_s
        if wait_s > 0:
            self._sleep(wait_s)
