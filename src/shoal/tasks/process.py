"""Worker processes: how one is started, and what systems do differently."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

from shoal.tasks import frames
from shoal.tasks.frames import Frame, Parcel, Reader, parcel
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


# What systems do differently: a client may have macOS.


class Bell:
    """Wakes a thread that waits in a selector."""

    def __init__(self) -> None:
        self._ring, self.end = socket.socketpair()
        for one in (self._ring, self.end):
            one.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._ring.send(b"\0")

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.end.recv(4096)

    def close(self) -> None:
        self._ring.close()
        self.end.close()


def cores() -> int:
    """Those that this process may use, where the system can say so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_file(name: str) -> int:
    """The descriptor of a file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix="shoal-") as file:
        return os.dup(file.fileno())


def watched(pid: int) -> int | None:
    """A descriptor that shows the end of a process, even if its children keep its socket open.
    None: the system has none, or does not allow it; the end of the socket must do."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def send_file(connection: socket.socket, file: int, offset: int, count: int) -> int:
    """Send a part of a file without copying it, where the system can do that with this socket."""
    try:
        return os.sendfile(connection.fileno(), file, offset, count)
    except BlockingIOError:
        raise
    except OSError:
        return connection.send(os.pread(file, min(count, 1 << 18), offset))
