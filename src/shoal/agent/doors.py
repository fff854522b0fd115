"""The ports of members: free for them until they start, and answered by nobody else afterwards.

A port cannot be held for a program that binds it by itself, so from its start on it is watched: who
listens there is a process of the member, or the member ends and gets another port. Where the kernel
can, it keeps tenants' programs from the ports of others as well (confine/binding.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable

from shoal.agent.faults import CannotStart
from shoal.agent.processes import MARK, Processes
from shoal.core.nodebook import NodeBook
from shoal.machine.kernel import NODE_MARK, variable
from shoal.machine.listening import (
    Listener,
    hold,
    holder_text,
    holders,
    listeners,
    may_look,
    reaching,
    sockets_of,
)
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef

PORT_MAX = 65_535
AWAITED_S = 0.2  # while a replica does not listen yet
LOOK_S = 1.0
ROOT = 0


class Door:
    """The port at which a replica answers, and the sockets there that are known to be its own."""

    def __init__(self, port: int, uid: int) -> None:
        self.port = port
        self.uid = uid
        self.own: set[int] = set()


class Doors:
    """`taken` is called with a member whose port somebody else has, and who that is."""

    def __init__(
        self, processes: Processes, book: NodeBook, taken: Callable[[MemberRef, str], None]
    ) -> None:
        self._processes = processes
        self._book = book
        self._taken = taken
        self._held: dict[MemberRef, list[socket.socket]] = {}
        self._given: dict[MemberRef, tuple[int, ...]] = {}  # to tenants, by the kernel
        self._doors: dict[MemberRef, Door] = {}
        self._look_at = 0.0

    # -- before it starts ------------------------------------------------------------------

    def hold(self, launch: Launch) -> None:
        """For a member that cannot start yet. CannotStart if somebody has one of its ports."""
        _must_be_a_port(launch)
        for port in launch.ports:
            try:
                self._held.setdefault(launch.ref, []).append(_hold_anywhere(port))
            except OSError as error:
                self.forget(launch.ref)
                if error.errno == errno.EADDRINUSE:
                    raise CannotStart(_not_free(port), _known(launch, Fault.PORT)) from None
                raise

    def release(self, launch: Launch) -> None:
        """It starts now, and binds its ports by itself."""
        if self._processes.own_user(launch):
            apart, ports = self._processes.apart, (*launch.ports, *_for_torchrun(launch))
            apart.binding.give(launch.uid, ports, launch.limits.ports)
            self._given[launch.ref] = ports
        if not launch.ports and not launch.answers:
            return
        if launch.ref not in self._held:
            self.hold(launch)
        self._let_go(launch.ref)

    def _let_go(self, ref: MemberRef) -> None:
        for held in self._held.pop(ref, ()):
            held.close()

    # -- afterwards ------------------------------------------------------------------------

    def expect(self, launch: Launch) -> None:
        if launch.answers:
            self._doors[launch.ref] = Door(int(launch.env["PORT"]), self._processes.user(launch))
            self._look_at = 0.0

    def forget(self, ref: MemberRef) -> None:
        self._let_go(ref)
        self._doors.pop(ref, None)
        self._processes.apart.binding.take_back(self._given.pop(ref, ()))

    def look(self) -> bool:
        """Called often. Notes in the book which replicas answer at their ports by themselves;
        returns whether that is news."""
        now = time.monotonic()
        if not self._doors or now < self._look_at:
            return False
        found, news = listeners(), False
        for ref, door in list(self._doors.items()):
            was = ref in (self._book.listens or ())
            listens = self._answers(ref, door, found)
            if listens != was:
                self._book.heeds(ref, listens=listens)
                news = True
        waits = any(not door.own for door in self._doors.values())
        self._look_at = now + (AWAITED_S if waits else LOOK_S)
        return news

    def robbed(self, launch: Launch, why: str) -> str:
        """Of a member that failed: who has a port that was its own; empty if nobody does. A job
        that is alone has a port only for torchrun, so its last words must say that it matters."""
        ports = launch.ports if launch.limits.ports else ()
        if launch.limits.ports and not ports and "in use" in why.lower():
            ports = _for_torchrun(launch)
        found = listeners() if ports else []
        for port in ports:
            if any(one.port == port for one in found):
                return f"port {port}, which was its own, is held by {holder_text(port, found)}"
        return ""

    def _answers(self, ref: MemberRef, door: Door, found: Iterable[Listener]) -> bool:
        """Does the member itself listen where the gateway looks for it, and nobody else?"""
        spec = self._book.spec
        there = reaching(found, spec.address if spec.origin else "127.0.0.1", door.port)
        inodes = {one.inode for one in there}
        if inodes and inodes == door.own:
            return True
        door.own = set()
        if not inodes:
            return False
        pids = self._processes.all_of(ref)
        own = sockets_of(pids)
        others = [one for one in there if one.inode not in own]
        for one in others:
            if self._is_strangers(ref, door, one, pids):
                text = holder_text(door.port, [one])
                self._taken(ref, f"port {door.port}, which is its own, is held by {text}")
                return False
        if others and not holders({one.inode for one in others}) and all(map(may_look, pids)):
            return False  # it is gone by now
        door.own = inodes
        return True

    def _is_strangers(self, ref: MemberRef, door: Door, one: Listener, pids: set[int]) -> bool:
        """Some members do not listen themselves: a server in Docker is reached through a process of
        Docker, which is root's. So root's is accepted, unless it is a member of Shoal's."""
        for pid in holders({one.inode}):
            mark, node = variable(pid, MARK), variable(pid, NODE_MARK)
            if self._processes.owner(pid) not in (None, ref):
                return True
            if mark is not None and (mark, node) != (str(ref), self._processes.node_mark):
                return True
        if one.uid in (ROOT, door.uid):
            return False
        return os.geteuid() == ROOT or all(map(may_look, pids))


def _for_torchrun(launch: Launch) -> tuple[int, ...]:
    """Where torchrun of a job that is alone meets its own processes; others have it elsewhere."""
    text = launch.env.get("PET_MASTER_PORT", "")
    alone = text.isdecimal() and "MASTER_PORT" not in launch.env
    return (int(text),) if alone else ()


def _must_be_a_port(launch: Launch) -> None:
    text = launch.env.get("PORT", "") if launch.answers else "1"
    if not text.isdecimal() or not 0 < int(text) <= PORT_MAX:
        raise CannotStart(f"PORT={text!r} is not a port that a replica can listen on")


def _known(launch: Launch, fault: Fault) -> Fault:
    """An older head could not read it."""
    return fault if launch.limits.ports else Fault.NONE


def _hold_anywhere(port: int) -> socket.socket:
    """At every address, of both families where there are two."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            return hold("::", port)
    return hold("", port)


def _not_free(port: int) -> str:
    who = holder_text(port)
    return f"port {port} is not free on this node{f': {who} listens there' if who else ''}"
