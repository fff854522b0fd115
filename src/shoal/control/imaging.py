"""Snapshots are verified and encoded beside the loop: by a child that was forked with the state.

The child has the memory as it was at that moment, so the loop goes on at once and nothing has to be
copied or locked. It touches nothing but the state: only the thread that forked lives on in it, and
any lock of another one might be held forever. It closes all files but its pipe, and dies with the
controller.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import threading
import time
import warnings

from shoal.core.invariants import Violation, verify
from shoal.core.state import image
from shoal.core.state.state import State
from shoal.machine.kernel import die_with_parent

IMAGE_S_MAX = 300.0  # 250,000 jobs take 10 s; a child that hangs is ended
READ_BYTES = 1 << 20
NICENESS = 5  # it has time: jobs and requests come first
_GOOD, _BAD = b"+", b"-"  # the first byte: then the snapshot, or what is wrong


class NoImage(Exception):
    """The child has died, or took too long."""


class Imaging:
    """One snapshot on its way. The state must be settled when this is made, and may change then."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._reaped = False
        self._reaping = threading.Lock()
        self._source, target = os.pipe()
        # A signal for the controller must not run its handlers in the child, too.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = _forked(state, target)
        except OSError:
            os.close(self._source)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(target)

    async def body(self) -> bytes:
        """The snapshot. `Violation` if the state is broken, `NoImage` if there is none."""
        try:
            answer = await asyncio.to_thread(self._collect)
        except asyncio.CancelledError:
            self._kill()  # so that the thread ends
            raise
        if answer[:1] == _BAD:
            raise Violation(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _collect(self) -> bytes:
        """In a thread: even the end of so large a process takes a while."""
        deadline = time.monotonic() + IMAGE_S_MAX
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        parts: list[bytes] = []
        try:
            while poll.poll(max(0, deadline - time.monotonic()) * 1000):
                part = os.read(self._source, READ_BYTES)
                if not part:
                    break
                parts.append(part)
            else:
                self._kill()
        finally:
            os.close(self._source)
            code = self._reap()
        answer = b"".join(parts)
        if code or answer[:1] not in (_GOOD, _BAD):
            raise NoImage(f"the process that makes it ended with {code}")
        return answer

    def _reap(self) -> int:
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._reaped = True
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _kill(self) -> None:
        with self._reaping:
            if not self._reaped:  # its number belongs to nobody else yet
                os.kill(self._pid, signal.SIGKILL)


def _forked(state: State, target: int) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forks beside threads, because of the locks that the child must avoid.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            _work(state, target, parent)
        finally:
            os._exit(1)
    return child


def _work(state: State, target: int, parent: int) -> None:
    gc.disable()
    die_with_parent()
    if os.getppid() != parent:
        return
    os.nice(NICENESS)
    os.closerange(3, target)
    os.closerange(target + 1, os.sysconf("SC_OPEN_MAX"))
    rest = memoryview(_answer(state))
    while rest:
        rest = rest[os.write(target, rest) :]
    os._exit(0)


def _answer(state: State) -> bytes:
    try:
        verify(state)
        return _GOOD + image.encoded(state.snapshot())
    except Exception as error:  # whatever it is, the state cannot be trusted
        return _BAD + f"{type(error).__name__}: {error}".encode()
