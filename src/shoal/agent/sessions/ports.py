"""On which ports a member listens. Others of its node are not reached through a session."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

LISTENS = "0A"  # the state, as the kernel writes it
SHOWN_MAX = 8


class Listener(NamedTuple):
    address: str
    port: int
    inode: int


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


def listeners(folder: str = "/proc/self/net") -> list[Listener]:
    """Every listening TCP socket of a network; one that listens everywhere is at loopback, too."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"{folder}/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] != LISTENS:
                    continue
                place, _, port = words[1].partition(":")
                found.append(Listener(_address(place, family), int(port, 16), int(words[9])))
    return found


def _address(text: str, family: int) -> str:
    """The kernel writes words of four bytes, each in the machine's own order."""
    data = b"".join(
        int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)
    )
    address = socket.inet_ntop(family, data)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that these processes have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, ValueError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
    return found
