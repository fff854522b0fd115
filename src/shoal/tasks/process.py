"""Starts one worker process, sends to it, reads from it and ends it."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

from shoal.tasks import frames
from shoal.tasks.frames import Frame, Parcel, Reader, parcel
from shoal.tasks.portable import memory_file, watched
from shoal.tasks.worker import CURSOR_BYTES, NOT_BEGUN, WORKER_MARK

# Shoal may be importable only because the client changed its path.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from shoal.tasks.worker import main; main(sys.argv[1:])"
)
SOURCE = str(Path(__file__).parent.parent.parent)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
END_S_MAX = 5.0


class Process:
    """Create it in a thread that outlives it: the kernel ends it together with that thread."""

    def __init__(
        self, threads: int, script: str, init: bytes | None, path: list[str] | None = None
    ) -> None:
        self.known: set[int] = set()  # functions it has been sent
        self.ready = False
        self.failure: BaseException | None = None  # of `init`
        self._outgoing: deque[Parcel] = deque()
        self._reader = Reader()
        memory = memory_file("shoal-cursor")
        ours, theirs = socket.socketpair()
        try:
            os.ftruncate(memory, CURSOR_BYTES)
            self._shared = mmap.mmap(memory, CURSOR_BYTES)
            self.cursor = memoryview(self._shared).cast("q")
            self.cursor[0] = NOT_BEGUN
            descriptors = theirs.fileno(), memory
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _START, SOURCE, *map(str, descriptors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=_environment(threads),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        ours.setblocking(False)
        self.socket = ours
        self.pid = self.popen.pid
        self.pidfd = watched(self.popen.pid)
        self.send(parcel(frames.HELLO, body=pickle.dumps((path or sys.path, script, init))))

    @property
    def position(self) -> int | None:
        """Position of the current task in its chunk."""
        return self.cursor[0]

    @property
    def innocent(self) -> bool:
        return False

    def begin(self) -> None:
        """An idle worker gets its next chunk."""
        self.cursor[0] = NOT_BEGUN

    def died(self, frame: Frame) -> None:  # noqa: ARG002
        raise AssertionError("a worker process does not report its own death")

    def send(self, ready: Parcel) -> None:
        self._outgoing.append(ready)
        self.push()

    def push(self) -> bool:
        """Send what the socket accepts now; True when everything is sent."""
        try:
            while self._outgoing:
                data, file = self._outgoing.popleft()
                try:
                    if file is None:
                        sent = self.socket.send(data)
                    else:
                        sent = socket.send_fds(self.socket, [data], [file.fileno()])
                        file.close()
                except BlockingIOError:
                    self._outgoing.appendleft(Parcel(data, file))
                    return False
                if sent < len(data):
                    self._outgoing.appendleft(Parcel(data[sent:], None))
        except ConnectionError:
            self._outgoing.clear()  # it is dying, which the pool will notice
        return True

    def receive(self) -> list[Frame] | None:
        """Complete frames that have arrived; None at the end."""
        try:
            return self._reader.receive(self.socket)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGKILL)

    def release(self) -> None:
        """It ends by itself when its socket closes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> str:
        """Wait for its end and close everything; returns how it ended, in words."""
        try:
            code = self.popen.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.popen.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.socket.close()
        self._reader.close()
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"


def _environment(threads: int) -> dict[str, str]:
    """Limits libraries that would use all cores to their share, unless the user set a limit."""
    env = {**os.environ, WORKER_MARK: "1"}
    for name in THREADS:
        env.setdefault(name, str(threads))
    return env
