"""A leader's hold on its lease: renewed by a thread of its own, and looked at before every act.

A process may be stopped at any point, for any time. When it goes on, another head may lead. So
whatever others can see (an answer, a command, a byte in the shared folder) comes after `check`,
which ends the process if the lease may be over. It compares clocks of this machine alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from shoal.control.supervise import STAND_BY_CODE
from shoal.database.lease import RENEW_S
from shoal.ports import StoreError

log = logging.getLogger("shoal.control")

WATCH_S = 0.1  # an idle leader ends this long after its lease, at most

End = Callable[[str], None]


class Held(Protocol):
    """The part of a `Lease` that its holder needs."""

    @property
    def sure(self) -> bool: ...

    def renew(self) -> bool: ...

    def give_up(self) -> None: ...


def alone() -> None:
    """The only head of a cluster may always act."""


def end_process(why: str) -> NoReturn:
    """At once, and without cleaning up: nothing that this process would still do may count."""
    log.error("%s; this controller ends, and begins again as a standby", why)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STAND_BY_CODE)


class Leadership:
    """`renewed` is called after each renewal, in the thread that renews."""

    def __init__(
        self, lease: Held, end: End = end_process, renewed: Callable[[], None] = lambda: None
    ) -> None:
        self._lease = lease
        self._end = end
        self._renewed = renewed
        self._problem = "the process was stopped, or the machine slept"
        self._over = threading.Event()
        # Two threads: a server that does not answer holds up the one that asks it.
        self._threads = [
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True)
            for work in (self._renew, self._watch)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Does not return if another head may lead by now."""
        if not self._lease.sure and not self._over.is_set():
            self._end(f"the lease was not renewed in time ({self._problem})")

    def give_up(self) -> None:
        """The next leader need not wait for the end of the lease."""
        self._over.set()
        try:
            self._lease.give_up()
        except StoreError as error:
            log.error("the lease could not be given up: %s", error)

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                if self._lease.renew():
                    self._renewed()
                elif not self._over.is_set():
                    self._end("another head leads by now")
                    return
            except StoreError as error:
                self._problem = str(error)
            except Exception as error:
                log.exception("the lease could not be renewed")
                self._problem = repr(error)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self.check()
