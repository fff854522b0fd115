"""Which process listens on a port of this machine, and how to keep others from a port."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
LISTENS = 10  # the state of a socket, as the kernel counts them
HEADER = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBBxI48x")
FOUND = struct.Struct("=BBxx2s2s16s16s4x8x4x4x4xII")
READ_BYTES = 1 << 16
ANSWER_S = 1.0
WORDS_MAX = 80


class Listener(NamedTuple):
    """One that listens `anywhere` is shown at loopback, where it can be reached."""

    address: str
    port: int
    inode: int
    uid: int
    anywhere: bool = False


def listeners() -> list[Listener]:
    """Every listening TCP socket. The kernel is asked for these alone, because the list in /proc
    has each connection as well, and a busy gateway has thousands."""
    try:
        return [*_asked(socket.AF_INET), *_asked(socket.AF_INET6)]
    except (OSError, struct.error):
        return [*_read("tcp", socket.AF_INET), *_read("tcp6", socket.AF_INET6)]


def reaching(found: Iterable[Listener], address: str, port: int) -> list[Listener]:
    """Those that may get a connection to this address. One that listens at another address, or in
    the other family alone, does not."""
    there = [one for one in found if one.port == port]
    v6 = ":" in address
    near = [one for one in there if one.anywhere and (":" in one.address) == v6]
    near += [one for one in there if not one.anywhere and one.address == address]
    return near or [one for one in there if one.anywhere]


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that these processes have open."""
    return {inode for pid in pids for inode in _sockets(pid)}


def may_look(pid: int) -> bool:
    """Whether this process may see what another has open."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def holders(inodes: set[int]) -> list[int]:
    """The processes that have one of these sockets open, as far as we may see."""
    names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in names if not inodes.isdisjoint(_sockets(pid))]


def holder_text(port: int, found: Iterable[Listener] | None = None) -> str:
    """Who listens on a port, for people; empty if nobody does."""
    there = [one for one in (listeners() if found is None else found) if one.port == port]
    if not there:
        return ""
    pids = holders({one.inode for one in there})
    if not pids:
        return f"a process of the user with number {there[0].uid}"
    try:
        words = Path(f"/proc/{pids[0]}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    text = b" ".join(words).decode(errors="replace").strip()
    said = "".join(letter if letter.isprintable() else "?" for letter in text[:WORDS_MAX])
    return f"process {pids[0]} ({said})" if said else f"process {pids[0]}"


def hold(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Keep all other users' processes from a port, without listening on it. Our own user's may
    still listen there if they set SO_REUSEPORT, as HAProxy does. OSError if somebody has it;
    `shared`: our own user may."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if shared:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:  # what is left of connections that are over does not count
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("" if host == "*" else host, port))
        # With the one, any user could listen there; the other is for ours alone.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        held.close()
        raise
    return held


def _asked(family: int) -> Iterator[Listener]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_S)
        asked = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << LISTENS)
        size = HEADER.size + len(asked)
        kernel.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + asked)
        while True:
            data = kernel.recv(READ_BYTES)
            at = 0
            while at < len(data):
                length, kind, *_ = HEADER.unpack_from(data, at)
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    raise OSError("the kernel does not list sockets")
                _, _, port, _, place, _, uid, inode = FOUND.unpack_from(data, at + HEADER.size)
                place = place[: 4 if family == socket.AF_INET else 16]
                yield _listener(place, family, int.from_bytes(port), inode, uid)
                at += (length + 3) & ~3


def _read(name: str, family: int) -> Iterator[Listener]:
    """The kernel writes words of four bytes, each in the machine's own order."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if int(words[3], 16) != LISTENS:
                continue
            text, _, port = words[1].partition(":")
            place = b"".join(
                int(text[start : start + 8], 16).to_bytes(4, "little")
                for start in range(0, len(text), 8)
            )
            uid, inode = int(words[7]), int(words[9])
            yield _listener(place, family, int(port, 16), inode, uid)


def _listener(place: bytes, family: int, port: int, inode: int, uid: int) -> Listener:
    address = socket.inet_ntop(family, place)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address)
    return Listener(near or address, port, inode, uid, near is not None)


def _sockets(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])
