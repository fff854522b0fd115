"""Lines on their way into the audit log. They wait in memory while the log takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from shoal.control.alarms import Alarms
from shoal.control.audit_lines import FIRST_HASH
from shoal.model.audit import AuditEntry

WAITING_MAX = 10_000  # lines in memory
RETRY_S = 1.0
CAUSE = "audit"

Waiting = tuple[AuditEntry, asyncio.Future[None]]


class AuditQueue:
    """Lines are written once per turn of the event loop, all that came in it together."""

    def __init__(self, alarms: Alarms) -> None:
        self.stuck = False  # lines wait, because they cannot be written
        self.head = FIRST_HASH  # the hash of the newest line
        self._alarms = alarms
        self._waiting: list[Waiting] = []
        self._dropped = 0
        self._flushing: asyncio.TimerHandle | asyncio.Handle | None = None

    async def write(self, entry: AuditEntry) -> None:
        """Returns when the line is written, or cannot be for now: then it is kept in memory, an
        alarm says so, and `stuck` is true until it is written."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if len(self._waiting) >= WAITING_MAX:
            _, dropped = self._waiting.pop(0)
            self._dropped += 1
            if not dropped.done():
                dropped.set_result(None)
        self._waiting.append((entry, done))
        if self.stuck:
            return  # a timer tries again
        if self._flushing is None:
            self._flushing = loop.call_soon(self._flush)
        await done

    def newest_first(self) -> Iterator[AuditEntry]:
        """As far back as the log goes; a line that cannot be read is left out."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        """Write what waits."""
        raise NotImplementedError

    def _settle(self, batch: list[Waiting], problem: str) -> None:
        """The lines are written, or there is a problem, and they wait: their senders do not."""
        if problem:
            self.stuck = True
            rule = "until it can, only the operator may change something"
            self._alarms.raise_(CAUSE, f"{problem}; {rule}")
            self._flushing = asyncio.get_running_loop().call_later(RETRY_S, self._flush)
        else:
            self.stuck, self._dropped = False, 0
            self._alarms.clear(CAUSE)
        for _, done in batch:
            if not done.done():
                done.set_result(None)
