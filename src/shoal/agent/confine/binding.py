"""Keeps tenants' programs from ports that are not theirs, by a small program in the kernel.

The policy has a range of ports for gangs and replicas. Inside it, a tenant's user may bind only the
ports that its own members were given; everywhere else, it may bind what it likes. The kernel asks
the program at each bind of a process in the node's groups of version 2. It goes with the agent, and
the agent's own user, root, is not held to it. Landlock could do the same only by naming all other
ports, one by one, at each start: 55,000 rules, 18 ms and some megabytes of the kernel's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

BPF = {"x86_64": 321, "aarch64": 280}.get(platform.machine(), 0)
MAP_CREATE, MAP_UPDATE, MAP_DELETE, PROGRAM_LOAD, LINK_CREATE = 0, 2, 3, 5, 28
HASH, ADDRESS_PROGRAM = 1, 18
BINDS = (8, 9)  # to addresses of version 4 and of version 6
PORTS_MAX = 65_536
RANGE_KEY = 0  # nobody is given port 0
ATTRIBUTES_BYTES = 128
LOOK_UP, WHICH_USER = 1, 15  # functions of the kernel

libc = ctypes.CDLL(None, use_errno=True)


class Binding:
    """`problem` says why this kernel does not keep ports apart; empty if it does."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the node's group of version 2, if there is one."""
        self.folder = folder
        self.problem = "no cgroup of version 2" if folder is None else ""
        self._map = -1
        self._links: list[int] = []
        self._range: tuple[int, ...] = ()
        if folder is not None:
            try:
                self._attach(folder)
            except OSError as error:
                self.close()
                self.problem = f"no BPF: {error.strerror}"

    def _attach(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._map = _bpf(MAP_CREATE, struct.pack("=5I", HASH, 4, 8, PORTS_MAX, 0))
        group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for bind in BINDS:
                program = _load(self._map, bind)
                try:
                    link = struct.pack("=4I", program, group, bind, 0)
                    self._links.append(_bpf(LINK_CREATE, link))
                finally:
                    os.close(program)
        finally:
            os.close(group)

    def give(self, uid: int, ports: Iterable[int], reserved: tuple[int, ...]) -> None:
        """A member of this user starts, and may bind these ports; nobody but the users whom they
        were given may bind the others of `reserved`: the first, and the first behind them."""
        if not self._links or len(reserved) != 2:
            return
        if reserved != self._range:
            self._set(RANGE_KEY, reserved[0] | reserved[1] << 32)
            self._range = reserved
        for port in ports:
            self._set(port, uid)

    def take_back(self, ports: Iterable[int]) -> None:
        if self._links:
            for port in ports:
                key = ctypes.c_uint32(port)
                where = ctypes.addressof(key)
                with contextlib.suppress(FileNotFoundError):
                    _bpf(MAP_DELETE, struct.pack("=IxxxxQ", self._map, where))

    def enter(self, pid: int) -> None:
        """With all that it starts."""
        if self._links and self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        for handle in (*self._links, self._map):
            if handle >= 0:
                os.close(handle)
        self._links, self._map = [], -1

    def _set(self, key: int, value: int) -> None:
        named, content = ctypes.c_uint32(key), ctypes.c_uint64(value)
        where = ctypes.addressof(named), ctypes.addressof(content)
        _bpf(MAP_UPDATE, struct.pack("=IxxxxQQ", self._map, *where))


def _load(ports: int, bind: int) -> int:
    code = _program(ports)
    text, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"MIT")
    where = ctypes.addressof(text), ctypes.addressof(licence)
    form = struct.pack("=IIQQ44xI", ADDRESS_PROGRAM, len(code) // 8, *where, bind)
    return _bpf(PROGRAM_LOAD, form)


def _program(ports: int) -> bytes:
    """In the words of the kernel's machine: r7 is the port, r8 the user."""
    look = (_op(0x18, 1, 1, 0, ports), _op(0), _op(0xBF, 2, 10))  # r1 = the map; r2 = the stack
    steps = (
        _op(0x61, 7, 1, 24),  # r7 = the port, as it was given to bind
        _op(0xDC, 7, 0, 0, 16),  # in our order
        _op(0x63, 10, 7, -4),
        _op(0x85, 0, 0, 0, WHICH_USER),
        _op(0xBC, 8, 0),
        _op(0x15, 8, 0, 21),  # root: allow
        _op(0x62, 10, 0, -8, RANGE_KEY),
        *look,
        _op(0x07, 2, 0, 0, -8),
        _op(0x85, 0, 0, 0, LOOK_UP),
        _op(0x15, 0, 0, 14),  # no range is known: allow
        _op(0x61, 1, 0, 0),
        _op(0x61, 2, 0, 4),
        _op(0xAD, 7, 1, 11),  # below it: allow
        _op(0x3D, 7, 2, 10),  # behind it: allow
        *look,
        _op(0x07, 2, 0, 0, -4),
        _op(0x85, 0, 0, 0, LOOK_UP),
        _op(0x15, 0, 0, 2),  # it is nobody's: refuse
        _op(0x61, 1, 0, 0),
        _op(0x1D, 1, 8, 2),  # it is this user's: allow
        _op(0xB7, 0, 0, 0, 0),
        _op(0x95),
        _op(0xB7, 0, 0, 0, 1),
        _op(0x95),
    )
    return b"".join(steps)


def _op(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, to | source << 4, offset, value)


def _bpf(command: int, attributes: bytes) -> int:
    if not BPF:
        raise OSError(0, "not for this processor")
    form = ctypes.create_string_buffer(attributes, ATTRIBUTES_BYTES)
    found = int(libc.syscall(BPF, command, form, ATTRIBUTES_BYTES))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
