"""A link that can be cut: bytes go from a listening socket to a target, in both directions, until
it is cut. Then nothing goes through, and nobody is told, as with a cable that is pulled."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

CHUNK = 1 << 16
CONNECT_S = 5.0


class Relay:
    """`listening` may be a socket of another network namespace. `target` opens a connection."""

    def __init__(self, listening: socket.socket, target: Callable[[], socket.socket]) -> None:
        self.port: int = listening.getsockname()[1]
        self.delay_s = 0.0  # of each piece, in each direction
        self._listening = listening
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._links: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self.delay_s = 0.0
        self._open.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._open.set()
        for link in list(self._links):
            _end(link)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._open.wait()
        try:
            far = self._target()
        except OSError:
            near.close()
            return
        self._links |= {near, far}
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        self._links -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if self.delay_s:
                    time.sleep(self.delay_s)
                self._open.wait()
                sink.sendall(data)
        self._open.wait()  # that an end has closed is not heard through a cut either
        _end(source)
        _end(sink)


def to_file(path: str) -> Callable[[], socket.socket]:
    """A Unix socket, which can be reached from every network namespace."""

    def opened() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(CONNECT_S)
            made.connect(path)
            made.settimeout(None)
        except OSError:
            made.close()
            raise
        return made

    return opened


def _end(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
