"""Decides when the next step begins: at once, or a moment later for others to share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# While others wait already, clients that were just answered get this long to ask again: one step
# and one commit then do for all of them. A client that is alone never waits for this. Where commits
# take longer, they get as long as the last one took: no more than what is saved if they come.
GATHER_S = 0.001
GATHER_S_MAX = 0.005
# What nobody waits for gets a step of its own after this long. Until then, a step takes it in that
# somebody does wait for, or more of its kind joins it: most often the end of a short job.
PAUSE_S = 0.005


class Pace:
    """`rest` is for the loop, between two steps; the others may be called at any time."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """`waiting`: how many requests no step has seen yet."""
        self._waiting = waiting
        self._wake = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None
        self._goal = 0  # requests that are worth waiting for; 0: nobody else waits
        self._gather_s = GATHER_S
        self._gathered: asyncio.Future[None] | None = None  # done when as many wait

    def now(self) -> None:
        self._wake.set()

    def soon(self) -> None:
        """There is something that nobody waits for."""
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._wake.set)

    def hurry(self) -> None:
        """From now on, somebody does wait for it."""
        if self._pause is not None:
            self._wake.set()

    def asked(self) -> None:
        """A request waits."""
        self._wake.set()
        if self._gathered is not None and self._waiting() >= self._goal:
            _settle(self._gathered)

    def answered(self, count: int, stored_s: float) -> None:
        """So many requests were just answered, after a commit that took this long."""
        waiting = self._waiting()
        self._goal = waiting + count if waiting else 0
        self._gather_s = max(GATHER_S, min(GATHER_S_MAX, stored_s))

    async def rest(self, wake_s: float | None) -> None:
        """Until the next step should begin, after `wake_s` at the latest."""
        # Even if there is work: readers and answered requests run before the next step is decided.
        await asyncio.sleep(0)
        if self._waiting() < self._goal:
            await self._gather()
        elif not self._wake.is_set():
            await self._sleep(wake_s)
        # The step takes in all that has come by now.
        self._wake.clear()
        self._goal = 0
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    async def _gather(self) -> None:
        loop = asyncio.get_running_loop()
        self._gathered = loop.create_future()
        timer = loop.call_later(self._gather_s, _settle, self._gathered)
        try:
            await self._gathered
        finally:
            timer.cancel()
            self._gathered = None

    async def _sleep(self, wake_s: float | None) -> None:
        timer = None
        if wake_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, wake_s), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
