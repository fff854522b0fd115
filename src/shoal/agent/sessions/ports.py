"""On which ports a member listens. Others of its node are not reached through a session."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

from shoal.listening import Listener, listeners, sockets_of

SHOWN_MAX = 8


class Unheard(Exception):
    """No process of the member listens on the port; the message says so, and what it does."""


class Ports:
    """`pids`: the processes of the member, as they are now."""

    def __init__(self, name: str, pids: Callable[[], Iterable[int]]) -> None:
        self._name = name
        self._pids = pids
        self._known: set[int] = set()  # inodes of its listeners: looked for only once

    def find(self, port: int) -> Listener:
        every = listeners()
        asked = [one for one in every if one.port == port]
        own = self._own(asked)
        if own:
            return min(own, key=lambda one: not ipaddress.ip_address(one.address).is_loopback)
        others = sorted({one.port for one in self._own(every)})
        shown = ", ".join(map(str, others[:SHOWN_MAX])) + (
            ", ..." if len(others) > SHOWN_MAX else ""
        )
        hint = f"it listens on {shown}" if others else "it listens on no port"
        raise Unheard(f"no process of {self._name} listens on port {port}; {hint}")

    def _own(self, listeners: list[Listener]) -> list[Listener]:
        if listeners and not any(one.inode in self._known for one in listeners):
            self._known = sockets_of(self._pids())
        return [one for one in listeners if one.inode in self._known]
