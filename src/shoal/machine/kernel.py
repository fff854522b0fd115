"""What we need from Linux directly, mostly to leave no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NODE_MARK = "SHOAL_NODE_DIR"  # in the environment of everything that runs on a node

AGENT_MARK = "SHOAL_AGENT_DIR"  # the same, of agents and keepers as well


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FALLOC_FL_KEEP_SIZE = 1
CORES = [resource.getrlimit(resource.RLIMIT_CORE)]  # before we lowered our own
NO_CORE = 1  # 0 would still feed a dump to a program that core_pattern names; 1 does not
FALLOC_FL_PUNCH_HOLE = 2
SMALL_BYTES = 64 * 1024


def own_address(toward: str = "") -> str:
    """The address of this machine that others reach: the one it would use itself to reach them. No
    packet is sent."""
    toward = toward or "192.0.2.1"  # reserved for documentation: stands for any other machine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


class Usual(NamedTuple):
    """Settings of the controller alone; agents and jobs keep the user's own."""

    umask: int
    files: tuple[int, int]
    cores: tuple[int, int]


def prepare_for_service(files_most: int) -> Usual:
    """Files we make are private, we may open as many as the system allows, and secrets that are in
    our memory do not get into a core dump."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = files
    wanted = files_most if hard == resource.RLIM_INFINITY else min(files_most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return Usual(os.umask(0o077), files, without_cores())


def without_cores() -> tuple[int, int]:
    """This process has secrets in its memory, so it leaves no core dump. Its children inherit that:
    `CORES` has the limits to give back to them."""
    before = CORES[0] = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] != 0:
        limit_cores(os.getpid(), (NO_CORE, before[1]))
    return before


def limit_cores(pid: int, limits: tuple[int, int]) -> None:
    """Of a process that we have just started."""
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_CORE, limits)


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reap_orphans() -> None:
    """Descendants whose parents die become our children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def read_small(path: str) -> str:
    """A file of the kernel's own, in a third of the system calls of `open`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while more := os.read(handle, SMALL_BYTES):
            data += more
    finally:
        os.close(handle)
    return data.decode(errors="replace")


def children() -> list[int]:
    """Process ids of our children."""
    pid = os.getpid()
    try:
        return [int(word) for word in read_small(f"/proc/{pid}/task/{pid}/children").split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: ask every process
        return [child for child in _all_processes() if _parent(child) == pid]


def kill_marked(name: str, wanted: Callable[[str], bool]) -> int:
    """Kill every process whose environment has the variable with a wanted value, and return how
    many there were."""
    killed = 0
    for pid in _all_processes():
        value = variable(pid, name)
        if value is not None and wanted(value) and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def variable(pid: int, name: str) -> str | None:
    """A variable of another process's environment, as it was started."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = name.encode() + b"="
    for entry in data.split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def punch_hole(handle: int, begin: int, end: int) -> None:
    """Give a part of a file back to the disk. The rest stays where it is, and other processes can
    go on appending. Where the file system cannot do that, bytes that another process appends at
    this very moment may be lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_int(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)
    where, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
    if libc.fallocate(ctypes.c_int(handle), mode, where, length) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, f"fallocate: {os.strerror(number)}")
    rest = os.pread(handle, os.fstat(handle).st_size - end, end)
    os.ftruncate(handle, begin)
    os.pwrite(handle, rest, end)


def memory_folder(directory: Path) -> Path | None:
    """The folder for what this node keeps in memory and on no disk; None if there is no file
    system in memory that this user may write to. Nothing is made."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    kinds = {}  # of several mounts in one place, the last is seen
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[place] = kind
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    for place in ("/dev/shm", "/run/shm", *([own] if own else [])):
        if kinds.get(place) in ("tmpfs", "ramfs") and os.access(place, os.W_OK | os.X_OK):
            return Path(place) / f"shoal-{name}"
    return None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[1])


def unescaped(word: str) -> str:
    """A path as the table of mounts writes it."""
    return word.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


TUN = "/dev/net/tun"
CAP_NET_ADMIN = 12


def wireguard() -> str:
    """How this machine can encrypt a network, if it can: by its `kernel`, or by a `program`. It is
    looked at and not tried, because every agent asks when it starts."""
    if os.geteuid() or not shutil.which("wg") or not _may_change_networks():
        return ""
    module = f"/lib/modules/{os.uname().release}/kernel/drivers/net/wireguard"  # not loaded yet
    if os.path.isdir("/sys/module/wireguard") or os.path.isdir(module):
        return "kernel"
    with contextlib.suppress(OSError):
        if shutil.which("wireguard-go"):
            os.close(os.open(TUN, os.O_RDWR | os.O_CLOEXEC))
            return "program"
    return ""


def _may_change_networks() -> bool:
    """Root in a container often may not."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> CAP_NET_ADMIN & 1)
