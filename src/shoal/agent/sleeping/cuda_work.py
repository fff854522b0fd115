"""The driver's calls of one sleep or one wake-up, in their order. They block: a thread makes them.

A thread whose calls are refused undoes them itself, and so does one that nobody waits for any
longer. So no process stays locked, whatever happens to the waiting side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from shoal.agent.sleeping.cuda_driver import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    Driver,
    DriverError,
    Memory,
)
from shoal.agent.sleeping.port import Full, Lost, Refused

LOCK_MS = 15_000  # for what the process has given to the GPU
# A process waits this long for memory of its GPUs. Whoever had them has ended, but the driver may
# not have freed all. If a stranger uses them, it sleeps on: that loses nothing.
ROOM_S = 20.0
# One of which a part is awake already waits longer, and is then lost.
REST_S = 120.0
AGAIN_S = 0.2


class Work:
    """`needs`: what these processes had on GPUs, if this agent knows it."""

    def __init__(
        self, driver: Driver, pids: Sequence[int], needs: Mapping[int, Memory] | None = None
    ) -> None:
        self.pids = tuple(pids)
        self.given_up = threading.Event()
        self._driver = driver
        self._needs = needs or {}

    def sleep(self) -> None:
        """Raises Refused, and then the processes run as before; or Lost, if they cannot."""
        try:
            self._call("lock", "could not be stopped on its GPU")
            self._call("checkpoint", "could not be moved off its GPU")
        except BaseException:
            self.undo()
            raise

    def wake(self) -> None:
        """Raises Lost or Full. Does nothing to processes that are awake, or that never used CUDA. A
        process that was forked from one that did answers in its name, so each is asked in its
        turn."""
        begun_s = time.monotonic()
        self._await_room(begun_s + ROOM_S)
        for pid in self.pids:
            self._restore(pid, begun_s + REST_S)
        for pid in self.pids:
            if self._state(pid) == LOCKED:
                try:
                    self._driver.unlock(pid)
                except DriverError as error:
                    raise Lost(f"process {pid} stays locked: {error}") from None

    def undo(self) -> None:
        """In reverse order, by the state of each: a refused call may have done its work."""
        Work(self._driver, self.pids[::-1]).wake()

    def _call(self, name: str, problem: str) -> None:
        for pid in self.pids:
            if self.given_up.is_set():
                raise Refused("nobody waits for it any longer")
            try:
                if name == "lock":
                    self._driver.lock(pid, LOCK_MS)
                else:
                    self._driver.checkpoint(pid)
            except DriverError as error:
                raise Refused(f"process {pid} {problem}: {error}") from None
        if self.given_up.is_set():
            raise Refused("nobody waits for it any longer")

    def _await_room(self, deadline: float) -> None:
        """Nothing is restored before there is room for all of it."""
        while short := self._short_of_all():
            if time.monotonic() > deadline:
                raise Full(short)
            time.sleep(AGAIN_S)

    def _short_of_all(self) -> str:
        asleep = [pid for pid in self.pids if self._state(pid) == CHECKPOINTED]
        return next((short for pid in asleep if (short := self._short(pid))), "")

    def _restore(self, pid: int, deadline: float) -> None:
        """The driver does not promise that a process survives a restore that fails, so none is made
        before there is room. One that fails all the same is tried again while that is possible."""
        while (state := self._state(pid)) == CHECKPOINTED:
            short = self._short(pid)
            late = time.monotonic() > deadline
            try:
                if not short or late:
                    self._driver.restore(pid)
                    return
            except DriverError as error:
                if late:
                    why = short or str(error)
                    raise Lost(f"process {pid} could not be moved back to its GPU: {why}") from None
            time.sleep(AGAIN_S)
        if state == FAILED:
            raise Lost(f"the driver has lost what process {pid} had on its GPU")

    def _short(self, pid: int) -> str:
        """Which GPU has too little free memory for it, as far as that is known."""
        try:
            free = self._driver.free_mb()
        except DriverError:
            return ""
        for gpu, need in self._needs.get(pid, {}).items():
            if free.get(gpu, need) < need:
                return f"GPU {gpu} has {free[gpu]} MB free, and it needs {need} MB"
        return ""

    def _state(self, pid: int) -> int | None:
        """None: it has no CUDA at all, or has ended."""
        try:
            return self._driver.state(pid)
        except DriverError:
            return None
