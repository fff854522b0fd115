"""Whose turn it is to use what a node has little of: one at a time of each tenant, and few in all.

Who waits for longer than a while goes on anyway: nobody's slow work keeps others from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary


class Turns:
    def __init__(self, places: int, wait_s_max: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._wait_s_max = wait_s_max
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        lock = self._of.setdefault(tenant, asyncio.Lock())
        async with lock:
            placed = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s_max):
                    placed = await self._places.acquire()
            try:
                yield
            finally:
                if placed:
                    self._places.release()
