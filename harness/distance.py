"""A line between two places, in user space: what is sent arrives so much later, and it can be cut.

A cut loses nothing by itself: connections stay open and carry nothing, as when a cable is pulled.
What was under way arrives when the cut is over, if somebody still waits for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

PIECE = 1 << 16


class Line:
    """Connections to `address` go to `target`, `delay_s` later in each direction."""

    def __init__(self, target: tuple[str, int], delay_s: float = 0.0) -> None:
        self.target, self.delay_s = target, delay_s
        self._whole = threading.Event()
        self._whole.set()
        self._over = threading.Event()
        self._ear = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._ear.getsockname()
        self._open: list[socket.socket] = []
        self.connections = 0
        self.carried = 0  # bytes, in both directions
        threading.Thread(target=self._listen, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._over.set()
        self._whole.set()
        # A thread that waits in accept() does not notice that another one closes the socket.
        with contextlib.suppress(OSError):
            self._ear.shutdown(socket.SHUT_RDWR)
        for one in (self._ear, *self._open):
            with contextlib.suppress(OSError):
                one.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._ear.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        self.connections += 1
        self._wait()
        time.sleep(2 * self.delay_s)  # the handshake goes there and back
        try:
            far = socket.create_connection(self.target, 10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._open += [near, far]
        if self._over.is_set():  # closed while they were joined
            near.close()
            far.close()
            return
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _wait(self) -> None:
        self._whole.wait()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Reads at once and writes later, so that a delay does not make the line thin."""
        under_way: deque[tuple[float, bytes]] = deque()
        arrived = threading.Condition()

        def write() -> None:
            while True:
                with arrived:
                    while not under_way:
                        arrived.wait()
                    due, piece = under_way.popleft()
                time.sleep(max(0.0, due - time.monotonic()))
                self._wait()
                try:
                    if not piece:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(piece)
                except OSError:
                    return

        threading.Thread(target=write, daemon=True).start()
        piece = b"-"
        while piece:
            try:
                piece = source.recv(PIECE)
            except OSError:
                piece = b""
            self.carried += len(piece)
            with arrived:
                under_way.append((time.monotonic() + self.delay_s, piece))
                arrived.notify()


@contextlib.contextmanager
def line(target: tuple[str, int], delay_s: float = 0.0) -> Iterator[Line]:
    made = Line(target, delay_s)
    try:
        yield made
    finally:
        made.close()
