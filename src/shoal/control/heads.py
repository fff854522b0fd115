"""This head among those of its cluster: it says in the database that it is there, and reads the
others. What is known here is about a second old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.control.loop import ControlLoop
from shoal.database.lease import Head, Lease
from shoal.ports import StoreError

REPORT_S = 1.0
GONE_MS = 10_000  # a head that has not been seen for this long is away
ALONE = "no standby"

Result = TypeVar("Result")


class Heads:
    """One for both stages of a controller: `loop` is the one of its present stage."""

    def __init__(
        self, lease: Lease, name: str, version: str, url: Callable[[], str], loop: ControlLoop
    ) -> None:
        self.name = name
        self.loop = loop
        self.loads = b""  # what this head's gateway sees, as JSON
        self.known: list[Head] = []
        self._lease = lease
        self._url = url
        self._version = version
        self._thread = ThreadPoolExecutor(1, "heads")

    def leader(self) -> Head | None:
        return next((head for head in self.known if head.leads), None)

    def living(self) -> list[Head]:
        now_ms = self.now_ms()
        return [head for head in self.known if now_ms - head.seen_ms < GONE_MS]

    def now_ms(self) -> int:
        """The database's time, by which the heads are seen."""
        return self._lease.now_ms() if self.known else 0

    def report_loads(self, loads: bytes) -> None:
        """What this head's gateway sees, for the head that leads."""
        self.loads = loads

    def other_loads(self) -> list[bytes]:
        """What the gateways of other heads see."""
        return [head.loads for head in self.living() if head.name != self.name and head.loads]

    async def forget(self, name: str) -> None:
        await self._in_thread(lambda: self._lease.forget(name))
        self.known = [head for head in self.known if head.name != name]

    def urls(self) -> tuple[str, ...]:
        """Of all heads, the leader first: whoever knows them finds one that answers."""
        known = sorted(self.known, key=lambda head: not head.leads)
        return tuple(head.url for head in known if head.url)

    async def run(self) -> None:
        while True:
            try:
                seq = self.loop.last_seq
                self.known = await self._in_thread(lambda: self._exchange(seq))  # noqa: B023
                self.loop.alarms.show(ALONE, self._alone())
            except StoreError:
                pass  # the loop shows that the database is away
            await asyncio.sleep(REPORT_S)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def look(self) -> None:
        """Now, because who leads has changed."""
        self.known = self._lease.heads()

    def _exchange(self, seq: int) -> list[Head]:
        """A head that has no address yet cannot be found by others."""
        url = self._url()
        if url:
            mine = Head(name=self.name, url=url, version=self._version, seq=seq, loads=self.loads)
            self._lease.report(mine)
        self._lease.now_ms()  # asks once
        return self._lease.heads()

    def _alone(self) -> str:
        """A cluster that never had a second head is not short of one."""
        others = [head for head in self.known if head.name != self.name]
        living = {head.name for head in self.living()}
        if not others or any(head.name in living for head in others):
            return ""
        names = ", ".join(head.name for head in others)
        text = f"no standby is alive ({names}): if this head is lost, nothing answers"
        return f"{text}; start one, or forget it with: shoal heads forget NAME"
