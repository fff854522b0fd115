"""What systems do differently: a client may have macOS."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile


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
