"""`shoal up --foreground`: stays for as long as the cluster's supervisor lives, as containers and
systemd expect it. It may be the first process of a container, which has to wait for orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

from shoal.control.home import Home
from shoal.files import held

LOOK_S = 0.2
PIECE_BYTES = 64 * 1024


class Staying:
    """From here on, SIGTERM ends the supervisor and its controller; nodes and jobs go on."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._told = False
        self._notify = os.environ.pop("NOTIFY_SOCKET", "")  # not for the jobs
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def run(self) -> int:
        """Show the controller's log until it ends. 0: it was told to, by us or by `shoal down`."""
        self._log = self._home.controller_log.open("rb")
        self._log.seek(0, os.SEEK_END)
        if self._told:
            self._end()
        self._tell_systemd(b"READY=1")
        while held(self._home.supervisor_lock):
            self._show()
            _reap()
            time.sleep(LOOK_S)
        self._show()
        self._log.close()
        return 0 if self._told or not self._supervisor() else 1

    def _end(self, *_: object) -> None:
        self._told = True
        self._tell_systemd(b"STOPPING=1")
        with contextlib.suppress(OSError):
            if pid := self._supervisor():
                os.kill(pid, signal.SIGTERM)

    def _supervisor(self) -> int:
        """Its process id; 0 when it has ended on purpose."""
        try:
            return int(self._home.supervisor_lock.read_bytes().split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def _tell_systemd(self, state: bytes) -> None:
        """If it asked for that with Type=notify."""
        if self._notify:
            name = "\0" + self._notify[1:] if self._notify.startswith("@") else self._notify
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way,
            ):
                way.sendto(state, name)

    def _show(self) -> None:
        if self._home.controller_log.stat().st_ino != os.fstat(self._log.fileno()).st_ino:
            self._log.close()
            self._log = self._home.controller_log.open("rb")
        if os.fstat(self._log.fileno()).st_size < self._log.tell():
            self._log.seek(0)  # it was full, and begins again
        while piece := self._log.read(PIECE_BYTES):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
