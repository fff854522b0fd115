"""Finds a directory's proxy processes: those that hold its lock file open.

The lock is opened before the proxy starts and is inherited by its master and workers. Another
user's process can have any path in its arguments, but cannot open a file in a private directory.
The lock moves with its directory and is the same file through any link.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from shoal.gateway.binary import GatewayError
from shoal.machine.files import held

STOP_TIMEOUT_S = 5.0
POLL_S = 0.01


class Presence:
    def __init__(self, directory: Path) -> None:
        self.lock = directory / "haproxy.lock"
        self.pid_file = directory / "haproxy.pid"

    def pid(self) -> int | None:
        """The master's process id, if it is alive."""
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if holds(pid, self.lock) else None

    def stop(self, grace_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the proxy; True if there was one. Requests in flight get `grace_s` to finish.
        Workers whose master was killed end by themselves, but may hold the ports for a while, so
        they are stopped too."""
        was = held(self.lock)
        master = self.pid()
        if master is not None and grace_s:
            self._end([master], signal.SIGUSR1, grace_s)
        if master is not None:
            self._end([master], signal.SIGTERM, STOP_TIMEOUT_S)
        if not self._end(holders(self.lock), signal.SIGKILL, STOP_TIMEOUT_S):
            raise GatewayError(f"HAProxy (processes {holders(self.lock)}) cannot be stopped")
        self.pid_file.unlink(missing_ok=True)
        return was

    def _end(self, pids: list[int], number: int, wait_s: float) -> bool:
        """Send a signal and wait until no process is left."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while held(self.lock):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def holders(lock: Path) -> list[int]:
    """Every other process that has the file open."""
    if not held(lock):
        return []
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and holds(int(n), lock)]


def holds(pid: int, lock: Path) -> bool:
    """We cannot read other users' descriptors, and need not: they cannot open our files."""
    try:
        wanted = lock.stat()
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return pid != os.getpid()
    return False
