"""The kept-alive connections of one client, for all its threads; how a call is interrupted."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import weakref

from shoal import transport
from shoal.transport import Endpoint

IDLE_MAX = 8  # kept for the next calls; more are closed when their call has ended


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


class Connections:
    """A call takes a connection and gives it back, so that calls of several threads do not meet on
    one. A child that was forked begins with none: two processes cannot share one."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close, self._idle)  # of a client that nobody has closed
        self._pid = os.getpid()
        self._round = 0  # grows when the client is closed

    def take(self) -> tuple[http.client.HTTPConnection, bool, int]:
        """A connection, whether it was used before, and what `give` has to know."""
        if self._pid != os.getpid():  # the lock may have been held when the process was forked
            self._guard, self._pid = threading.Lock(), os.getpid()
            _close(self._idle)
        with self._guard:
            number = self._round
            if self._idle:
                return self._idle.pop(), True, number
        return transport.connection_to(self._endpoint, self._timeout_s), False, number

    def give(self, connection: http.client.HTTPConnection, number: int) -> None:
        with self._guard:
            if number == self._round and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._guard:
            self._round += 1
            _close(self._idle)


def _close(idle: list[http.client.HTTPConnection]) -> None:
    while idle:
        idle.pop().close()
