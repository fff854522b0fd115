"""Did a member end because it, or this machine, ran out of memory or processes?"""

from __future__ import annotations

import time
from pathlib import Path

from shoal.cgroups.values import Ceiling, Used

RECENT_S = 5.0
OUT_OF_MEMORY = "killed, and the kernel ran out of memory at that moment"


def refusal(used: Used, ceiling: Ceiling) -> str:
    """What the kernel refused the member, in words; empty if nothing."""
    if used.killed and used.filled and ceiling.memory_mb:
        return f"it used more than its {ceiling.memory_mb} MB of memory and was ended (memory)"
    if used.killed:
        return OUT_OF_MEMORY
    if used.refused:
        return f"it wanted more than its {ceiling.processes} processes and threads (processes)"
    return ""


class MemoryWatch:
    """The kernel counts its kills without naming the victims. A member that was killed at the same
    time was probably one of them."""

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._count = self._kills()
        self._seen = float("-inf")

    def look(self) -> None:
        """Called about once a second, so that an old kill does not explain a new death."""
        before, self._count = self._count, self._kills()
        if self._count > before:
            self._seen = time.monotonic()

    def killed(self) -> bool:
        """Has the kernel killed a process a moment ago?"""
        self.look()
        return time.monotonic() - self._seen < RECENT_S

    def _kills(self) -> int:
        try:
            for line in self._vmstat.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            pass
        return 0
