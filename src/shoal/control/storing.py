"""The thread in which the control loop stores: one piece of work at a time, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class StoreThread:
    """What `asyncio.to_thread` does, for a third of its processor time: every job crosses here. It
    begins with the first work, and ends when it is closed, after the work that it was given."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def done() -> None:
            try:
                result = work()
            except Exception as error:
                _back(loop, _fail, future, error)
            else:
                _back(loop, _settle, future, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store")
            self._thread.start()
        self._work.put(done)
        return future

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds what was stored


def _back(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
