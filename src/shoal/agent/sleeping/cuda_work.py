"""The driver's calls of one sleep or one wake-up, in their order. They block: a thread makes them.

A thread whose calls are refused undoes them itself, and so does one that nobody waits for any
longer. So no process stays locked, whatever happens to the waiting side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shoal.agent.sleeping.cuda_driver import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    OUT_OF_MEMORY,
    TIMED_OUT,
    Driver,
    DriverError,
)
from shoal.agent.sleeping.port import Lost, Refused

# For what the process has given to the GPU. Processes that wait for each other on GPUs can be
# caught when one of them is locked and another waits for it: they are let go and caught again.
LOCK_MS = (3_000, 5_000, 10_000)
ROOM_S = 30.0  # whoever had the GPU has ended, but its memory may not be free yet
AGAIN_S = 0.2


class Work:
    """`alike`: each of these processes is known to have a context of its own. A process that was
    forked from one answers in its name, so others are dealt with one after the other."""

    def __init__(self, driver: Driver, pids: Sequence[int], *, alike: bool = True) -> None:
        self.pids = tuple(pids)
        self.given_up = threading.Event()
        self._driver = driver
        self._alike = alike

    def sleep(self) -> None:
        """Raises Refused, and then the processes run as before; or Lost, if they cannot."""
        try:
            self._lock_all()
            self._each(self._driver.checkpoint, "could not be moved off its GPU")
            self._go_on()
        except BaseException:
            self.undo()
            raise

    def wake(self) -> None:
        """Raises Lost. Does nothing to processes that are awake."""
        try:
            self._each(self._restore, "could not be moved back to its GPU")
            for pid in self.pids:
                self._unlock(pid)
        except (Refused, DriverError) as error:
            raise Lost(str(error)) from None

    def undo(self) -> None:
        """In reverse order, by what state each is in: a refused call may have done its work."""
        backwards = Work(self._driver, self.pids[::-1], alike=self._alike)
        backwards.wake()

    def _lock_all(self) -> None:
        problem = ""
        for timeout_ms in LOCK_MS:
            for pid in self.pids:
                self._go_on()
                try:
                    self._driver.lock(pid, timeout_ms)
                except DriverError as error:
                    problem = f"process {pid} could not be stopped on its GPU: {error}"
                    if error.code not in TIMED_OUT:
                        raise Refused(problem) from None
                    self.undo()
                    break
            else:
                return
        raise Refused(problem)

    def _each(self, call: Callable[[int], None], problem: str) -> None:
        """All of them together, because each can have a GPU of its own."""
        problems: list[str] = []

        def one(pid: int) -> None:
            try:
                call(pid)
            except DriverError as error:
                problems.append(f"process {pid} {problem}: {error}")

        if self._alike and len(self.pids) > 1:
            threads = [threading.Thread(target=one, args=(pid,), daemon=True) for pid in self.pids]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for pid in self.pids:
                one(pid)
        if problems:
            raise Refused(problems[0])

    def _restore(self, pid: int) -> None:
        deadline = time.monotonic() + ROOM_S
        while (state := self._state(pid)) == CHECKPOINTED:
            try:
                self._driver.restore(pid)
                return
            except DriverError as error:
                if error.code != OUT_OF_MEMORY or time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S)
        if state == FAILED:
            raise DriverError(-1, "the driver lost its state")

    def _unlock(self, pid: int) -> None:
        if self._state(pid) == LOCKED:
            self._driver.unlock(pid)

    def _state(self, pid: int) -> int | None:
        """None: it has no CUDA at all, or has ended."""
        try:
            return self._driver.state(pid)
        except DriverError:
            return None

    def _go_on(self) -> None:
        if self.given_up.is_set():
            raise Refused("nobody waits for it any longer")
