"""A member of the job that runs a map's workers: connects one worker after another to the client.

The worker is the same process as on the client's own machine. Its host forwards frames, reports in
which task a worker died, and ends when the client is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from shoal.client.keepalive import keep_alive
from shoal.tasks import frames
from shoal.tasks.frames import Frame, parcel
from shoal.tasks.functions import CLIENT_ROOT, NODE_ROOT, moved, paths_here
from shoal.tasks.process import Process
from shoal.tasks.stream import (
    HANDSHAKE_S_MAX,
    INNOCENT,
    HandshakeFailed,
    Incoming,
    Outgoing,
    introduce,
)

SECRET = "SHOAL_TASKS_SECRET"
INVITATION = "SHOAL_TASKS_INVITATION"  # to a meeting at the head
MEETING = "meeting"  # in place of an address: the client is met there
REFUSED_MAX = 3  # in a row: the client no longer listens
HANDSHAKES_FAILED_MAX = 3
REACH_S_MAX = 30.0
MEETING_S_MAX = 90.0  # longer than the head keeps a meeting whose host is away
PAUSE_S = 0.3
LAST_SEND_S_MAX = 5.0

Reach = Callable[[bool], "socket.socket | None"]  # None if the client is gone


class Leaving(BaseException):
    """Shoal asked this member to stop."""


class Leave:
    """The handler of SIGTERM. While a worker is served it only rings a bell: an exception in the
    middle of sending would send the same bytes again."""

    def __init__(self) -> None:
        self.asked = False
        self.serving = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.asked = True
        os.eventfd_write(self.bell, 1)
        if not self.serving:
            raise Leaving


def main(arguments: list[str]) -> int:
    reach = _through_head() if arguments[0] == MEETING else _direct(arguments[0], int(arguments[1]))
    secret = bytes.fromhex(os.environ.pop(SECRET))  # tasks must not see it
    leave = Leave()
    signal.signal(signal.SIGTERM, leave)
    try:
        return _work(reach, secret, leave)
    except Leaving:
        return 128 + signal.SIGTERM
    except (OSError, HandshakeFailed) as error:
        print(f"cannot reach the map's client at {' '.join(arguments)}: {error}", flush=True)
        return 1


def _work(reach: Reach, secret: bytes, leave: Leave) -> int:
    """Runs one worker after another until the client is gone."""
    reached, failed = False, 0
    while (connection := reach(reached)) is not None:
        with connection:
            try:
                introduce(connection, secret, _about())
            except (OSError, HandshakeFailed):  # another program may have its port now
                failed += 1
                if failed >= HANDSHAKES_FAILED_MAX:
                    if reached:
                        return 0
                    raise
                time.sleep(PAUSE_S)
                continue
            reached, failed = True, 0
            with contextlib.suppress(OSError):
                if _Host(connection, leave).serve():
                    return 0
    return 0


def _about() -> dict[str, object]:
    return {
        "node": os.environ.get("SHOAL_NODE", ""),
        "member": os.environ.get("SHOAL_MEMBER", ""),
        "python": sys.version_info[:2],
        "pid": os.getpid(),
    }


def _direct(address: str, port: int) -> Reach:
    return lambda reached: _connect(address, port, reached)


def _through_head() -> Reach:
    """After a restart of the head, its next controller does not know the meeting until the client
    has opened it again."""
    import msgspec

    from shoal.link.meeting import Guest, Invitation, NotAdmitted

    guest = Guest(msgspec.json.decode(os.environ.pop(INVITATION), type=Invitation))

    def reach(reached: bool) -> socket.socket | None:
        deadline = time.monotonic() + MEETING_S_MAX
        while True:
            try:
                return guest.enter()
            except NotAdmitted:
                if time.monotonic() > deadline:
                    return None
            except (OSError, TimeoutError):
                if time.monotonic() > deadline:
                    if reached:
                        return None
                    raise
            time.sleep(PAUSE_S)

    return reach


def _connect(address: str, port: int, reached: bool) -> socket.socket | None:
    """None if the client is gone."""
    deadline, refused = time.monotonic() + REACH_S_MAX, 0
    while True:
        try:
            connection = socket.create_connection((address, port), HANDSHAKE_S_MAX)
        except ConnectionRefusedError:
            refused += 1
            if refused >= REFUSED_MAX:
                return None
        except OSError:
            if time.monotonic() > deadline:
                if reached:
                    return None
                raise
        else:
            keep_alive(connection)
            return connection
        time.sleep(PAUSE_S)


class _Host:
    """One connection, one worker."""

    def __init__(self, connection: socket.socket, leave: Leave) -> None:
        connection.setblocking(False)
        self._leave = leave
        self._connection = connection
        self._incoming = Incoming()
        self._outgoing = Outgoing()
        self._worker: Process | None = None
        self._dismissed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(leave.bell, selectors.EVENT_READ)

    def serve(self) -> bool:
        """Runs until either end is gone; True if the map has ended."""
        self._leave.serving = True
        try:
            while self._attend():
                self._watch()
            return self._dismissed
        except Leaving:
            self._report_death(INNOCENT)
            raise
        finally:
            if self._worker is not None:
                self._worker.kill()
                self._worker.reap()
            self._incoming.close()
            self._outgoing.clear()
            self._selector.close()
            self._leave.serving = False
            if self._leave.asked:
                raise Leaving

    def _attend(self) -> bool:
        """False when either end is gone."""
        for key, _ in self._selector.select():
            worker = self._worker
            if key.fd == self._leave.bell:
                raise Leaving
            if key.fileobj is self._connection:
                heard = self._heard()
                if heard is None:
                    return False
                for frame in heard:
                    self._dismissed = self._dismissed or frame.kind == frames.BYE
                    if self._dismissed:
                        return False
                    self._obey(frame)
            elif worker is not None:
                arrived = worker.receive()
                for frame in arrived or ():
                    self._pass_on(frame)
                if arrived is None or key.fd == worker.pidfd:
                    self._report_death(0)
                    return False
        return True

    def _heard(self) -> list[Frame] | None:
        try:
            return self._incoming.receive(self._connection)
        except BlockingIOError:
            return []

    def _obey(self, frame: Frame) -> None:
        if self._worker is not None:
            self._worker.send(parcel(frame.kind, frame.number, frame.extra, frame.body))
        elif frame.kind == frames.HELLO:
            path, script, init, root = pickle.loads(frame.body)
            package = os.environ.get("SHOAL_PACKAGE", "")
            if root and package:
                os.environ[CLIENT_ROOT], os.environ[NODE_ROOT] = root, package
            self._worker = Process(1, moved(script, root, package), init, paths_here(path, root))
            self._selector.register(self._worker.socket, selectors.EVENT_READ)
            if self._worker.pidfd is not None:
                self._selector.register(self._worker.pidfd, selectors.EVENT_READ)

    def _pass_on(self, frame: Frame) -> None:
        self._outgoing.add(parcel(frame.kind, frame.number, frame.extra, frame.body))

    def _watch(self) -> None:
        """Wait for room to send too, while anything is left to send."""
        ends = [(self._connection, self._outgoing.push(self._connection))]
        if self._worker is not None:
            ends.append((self._worker.socket, self._worker.push()))
        for end, done in ends:
            events = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
            if self._selector.get_key(end).events != events:
                self._selector.modify(end, events)

    def _report_death(self, number: int) -> None:
        worker = self._worker
        if worker is None:
            return
        self._worker = None
        if number == INNOCENT:
            worker.kill()
            worker.popen.wait()
        while more := worker.receive():  # what it sent before it died
            for frame in more:
                self._pass_on(frame)
        position = worker.position
        how = worker.reap()
        if number == INNOCENT:
            how = "was stopped by Shoal"
        extra = (-1 if position is None else position) + 1
        self._outgoing.add(parcel(frames.DIED, number, extra, how.encode()))
        self._connection.settimeout(LAST_SEND_S_MAX)
        self._outgoing.push(self._connection)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
