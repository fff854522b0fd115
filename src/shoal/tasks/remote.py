"""The pool's view of a worker on another machine: the far end of a connection."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

from shoal.tasks import frames
from shoal.tasks.frames import Frame, Parcel, parcel
from shoal.tasks.stream import Incoming, Outgoing
from shoal.tasks.worker import NOT_BEGUN

if TYPE_CHECKING:
    from shoal.link.meeting import Way

INNOCENT = 1  # in a DIED frame: it was stopped on request


class Remote:
    """One connection per worker: its host connects again for the next one."""

    pidfd: int | None = None

    def __init__(
        self, connection: socket.socket, about: dict[str, Any], way: Way | None = None
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.pid = int(about.get("pid", 0))
        self.known: set[int] = set()
        self.ready = False
        self.failure: BaseException | None = None
        self._where = f"{about.get('node', '?')} (member {about.get('member', '?')})"
        self._how = "was lost"  # with its node, its host or the connection
        self._position: int | None = None
        self._reported = False  # its host reported its death
        self._innocent = False
        self._way = way  # if it came through the head
        self._outgoing = Outgoing()
        self._incoming = Incoming()

    @property
    def position(self) -> int | None:
        return self._position

    @property
    def innocent(self) -> bool:
        """Neither is a worker to blame that vanished before it was ready, nor one that was cut off
        because the head restarted or this machine was away."""
        if self._innocent or (self._way is not None and self._way.broken and not self._reported):
            return True
        return not self.ready and not self._reported and self.failure is None

    def begin(self) -> None:
        pass  # its host knows the current task

    def died(self, frame: Frame) -> None:
        self._reported = True
        self._position = frame.extra - 1  # -1: not begun
        self._innocent = frame.number == INNOCENT
        self._how = bytes(frame.body).decode(errors="replace")

    def send(self, ready: Parcel) -> None:
        self._outgoing.add(ready)
        self.push()

    def push(self) -> bool:
        return self._outgoing.push(self.socket)

    def receive(self) -> list[Frame] | None:
        try:
            return self._incoming.receive(self.socket)
        except BlockingIOError:
            return []
        except OSError:
            return None

    def kill(self) -> None:
        """Its host ends it when the connection closes, and connects again with another."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Its host ends too."""
        self._outgoing.clear()
        self.send(parcel(frames.BYE))
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reap(self) -> str:
        self.socket.close()
        self._outgoing.clear()
        self._incoming.close()
        return f"on {self._where} {self._how}"


assert NOT_BEGUN == -1, "a DIED frame carries a position plus one"
