"""Reads on an event loop. They hold up everything else in the process, so they never wait for long:
a server that has been silent once is not asked again before it has answered somebody else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from shoal.database.base import Row, StoreAway, Values
from shoal.database.server import Server
from shoal.ports import StoreError

log = logging.getLogger("shoal.database")

WAIT_S = 1.0  # for an answer, or for the first connection
AGAIN_S = 0.5  # between two attempts to connect


def on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Near:
    """One connection. It is made in a thread of its own, and made again there when it breaks."""

    def __init__(self, name: str, connect: Callable[[], Server]) -> None:
        self._name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._connecting: threading.Thread | None = None
        self._ready = threading.Event()
        self._silent = self._closed = False

    def read(self, query: str, values: Values = ()) -> list[Row]:
        with self._lock:
            server = self._usable()
            try:
                return server.execute(query, values)
            except StoreAway:
                if not server.usable:
                    self._silent = True
                    self._begin()
                raise

    def close(self) -> None:
        self._closed = True
        self._ready.set()
        if self._server is not None:
            self._server.close()

    def _usable(self) -> Server:
        if self._server is None or not self._server.usable:
            self._begin()
            if self._silent or not self._ready.wait(WAIT_S):
                self._silent = True
                raise StoreAway(f"{self._name} does not answer: it is tried again")
        assert self._server is not None
        return self._server

    def _begin(self) -> None:
        if self._connecting is not None and self._connecting.is_alive():
            return
        if self._server is not None:
            self._server.close()
        self._ready.clear()
        self._connecting = threading.Thread(target=self._try, name="database", daemon=True)
        self._connecting.start()

    def _try(self) -> None:
        while not self._closed:
            try:
                self._server = self._connect()
            except StoreError:
                time.sleep(AGAIN_S)
                continue
            except Exception:
                log.exception("%s cannot be connected", self._name)
                time.sleep(AGAIN_S)
                continue
            self._silent = False
            self._ready.set()
            return
