"""The kept-alive connections of one client, for all its threads; how a call is interrupted."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import weakref
from typing import NamedTuple

from shoal.client import transport
from shoal.client.keepalive import keep_alive
from shoal.client.reaching import Reaching
from shoal.client.transport import Endpoint

IDLE_MAX = 8  # kept for the next calls; more are closed when their call has ended
CONNECT_S = 2.0  # for one of several heads
GONE_S = 10  # one of several heads whose machine shows no sign of life is given up


class Interrupted(Exception):
    """Another thread has asked this call to end. Whether the request was carried out is unknown."""


class Interrupt:
    """Of one call, or of several that follow each other in one thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._asked = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def ask(self) -> None:
        """Ends the call, even if it waits for an answer."""
        with self._guard:
            self._asked.set()
            held = self._connection.sock if self._connection is not None else None
            if held is not None:
                with contextlib.suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

    def hold(self, connection: http.client.HTTPConnection | None) -> None:
        with self._guard:
            self._connection = connection
        self.check()

    def check(self) -> None:
        if self._asked.is_set():
            raise Interrupted

    def sleep(self, seconds: float) -> None:
        if self._asked.wait(seconds):
            raise Interrupted


class Taken(NamedTuple):
    """A connection for one call, and the head that it leads to, which is the `host` in requests.
    `kept`: it was used before."""

    connection: http.client.HTTPConnection
    to: Endpoint
    host: str
    kept: bool
    round: int


class Connections:
    """A call takes a connection and gives it back, so that calls of several threads do not meet on
    one. A child that was forked begins with none: two processes cannot share one."""

    def __init__(self, reaching: Reaching, timeout_s: float) -> None:
        self._reaching = reaching
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._idle: list[Taken] = []
        weakref.finalize(self, _close, self._idle)  # of a client that nobody has closed
        self._pid = os.getpid()
        self._round = 0  # grows when the client is closed

    def take(self) -> Taken:
        """To the head that is used now."""
        if self._pid != os.getpid():  # the lock may have been held when the process was forked
            self._guard, self._pid = threading.Lock(), os.getpid()
            _close(self._idle)
        to = self._reaching.current
        with self._guard:
            while self._idle:
                found = self._idle.pop()
                if found.to.url == to.url:
                    return found
                found.connection.close()
            number = self._round
        made = transport.connection_to(to, self._timeout_s)
        return Taken(made, to, to.authority, False, number)

    def open(self, taken: Taken) -> None:
        """With other heads to try, one that does not answer costs little time."""
        connection = taken.connection
        if not self._reaching.several:
            connection.connect()
            return
        connection.timeout = min(CONNECT_S, self._timeout_s)
        connection.connect()
        connection.timeout = self._timeout_s
        connection.sock.settimeout(self._timeout_s)
        keep_alive(connection.sock, GONE_S)

    def give(self, taken: Taken) -> None:
        with self._guard:
            if taken.round == self._round and len(self._idle) < IDLE_MAX:
                self._idle.append(taken._replace(kept=True))
                return
        taken.connection.close()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._guard:
            self._round += 1
            _close(self._idle)


def _close(idle: list[Taken]) -> None:
    while idle:
        idle.pop().connection.close()
