"""A group of the kernel for each member: memory, CPU, processes and devices, of version 1 or 2.

All groups of a node are in one folder per hierarchy, so that the next life finds what is left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.machine.kernel import read_small, unescaped

CPUSET = "cpuset"
UNIFIED = ""  # version 2 has one hierarchy for all controllers
PROCESSES = "cgroup.procs"
THREADS = "tasks"  # of version 1
NO_GROUPS_LINKS = 2  # of a folder without folders in it
CHARGE_BYTES_MAX = 4 << 20  # the kernel charges in batches, so a limit is not reached exactly
CLOSE_S_MAX = 2.0
CLOSE_POLL_S = 0.005
SPARE_MAX = 64  # of one kind
KILL_ROUNDS_MAX = 100  # without a bound on forks, until nothing is found


def end_groups(directory: Path) -> None:
    """Kill what a dead agent of this directory has left, even if it hides."""
    with contextlib.suppress(OSError):
        Cgroups.open(directory, 0).close()


class Group:
    """One member's groups, by controller. A hierarchy can hold several controllers."""

    def __init__(
        self, name: str, folders: dict[str, str], others: Sequence[str], *, unified: bool
    ) -> None:
        self.name = name  # its path below the top of each hierarchy
        self._folders = folders
        self._others = others  # in hierarchies that only container engines use
        self._unified = unified
        self.kind: tuple[str, ...] = ()  # what was set; one of the same kind can take its place
        self.held: Ceiling | None = None  # by the kernel

    @property
    def entrances(self) -> list[str]:
        """Files: a process of one thread that writes 0 is in the group from then on. The kernel
        waits for every CPU before it moves a process, up to 17 ms. A thread may move itself at
        once, but not in version 2."""
        file = PROCESSES if self._unified else THREADS
        return [f"{folder}/{file}" for folder in self.folders]

    @property
    def folders(self) -> list[str]:
        return list(dict.fromkeys(self._folders.values()))

    def add(self, pid: int) -> None:
        """With all its threads."""
        for folder in self.folders:
            _write(f"{folder}/{PROCESSES}", str(pid))

    def kill(self) -> None:
        """Everything in the group, however it hides. Nothing new can start meanwhile."""
        if self.empty or (self._unified and self._kill_all_at_once()):
            return
        with contextlib.suppress(OSError, KeyError):
            _write(f"{self._folders['pids']}/pids.max", "0")
        for _ in range(KILL_ROUNDS_MAX):
            found = list(self.pids())
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found or "pids" in self._folders:
                return

    def _kill_all_at_once(self) -> bool:
        """Kernels from 5.14 can do this."""
        try:
            for folder in set(self._folders.values()):
                _write(f"{folder}/cgroup.kill", "1")
        except OSError:
            return False
        return True

    @property
    def freezes(self) -> bool:
        """Can the kernel stop all of it where it is? In version 1 a process that it has stopped
        cannot be killed, so that one is not used."""
        return self._unified and os.access(f"{self._first}/cgroup.freeze", os.W_OK)

    def freeze(self, *, on: bool) -> None:
        _write(f"{self._first}/cgroup.freeze", "1" if on else "0")

    @property
    def frozen(self) -> bool:
        return self.empty or _numbers(f"{self._first}/cgroup.events").get("frozen") == 1

    def hold_memory(self, memory_mb: int) -> None:
        """From now on; 0: no limit. One that is exceeded already is not set: in version 2, the
        kernel would kill for it."""
        folder = self._folders.get("memory")
        if folder is None:
            return
        most = str(memory_mb * 1024**2) if memory_mb else "max" if self._unified else "-1"
        used = int(_text(f"{folder}/memory.current") or 0)
        used -= _numbers(f"{folder}/memory.stat").get("file", 0)
        if self._unified and memory_mb and used >= int(most):
            return
        files = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        for file in ("memory.max",) if self._unified else files if memory_mb else files[::-1]:
            with contextlib.suppress(OSError):
                _write(f"{folder}/{file}", most)

    @property
    def _first(self) -> str:
        return next(iter(self._folders.values()))

    def pids(self) -> Iterator[int]:
        """Of groups inside this one as well, because a container makes its own."""
        for inner in _tree(self._first):
            for word in _text(f"{inner}/{PROCESSES}").split():
                if word != "0":  # a process of another namespace
                    yield int(word)

    @property
    def vacant(self) -> bool:
        """As if nothing had ever been in it: no process, no group, nothing that was refused."""
        return (
            not _text(f"{self._first}/{PROCESSES}")
            and _text(f"{self._folders['pids']}/pids.events") == "max 0\n"
            and all(os.stat(folder).st_nlink <= NO_GROUPS_LINKS for folder in self.folders)
        )

    def hold(self, ceiling: Ceiling) -> None:
        for setting in settings(ceiling, unified=self._unified):
            if setting.controller == CPUSET:
                self._bind(setting)
            elif setting.controller in self._folders:
                _set(self._folders[setting.controller], setting)
        self.held = ceiling

    def _bind(self, setting: Setting) -> None:
        """A wish: a member that cannot be bound runs on all CPUs. In version 1 nothing can enter a
        group without any, so that one goes."""
        try:
            if CPUSET in self._folders:
                _write(f"{self._folders[CPUSET]}/{setting.file}", setting.value)
        except OSError:
            if (folder := self._folders.pop(CPUSET)) not in self._folders.values():
                _remove(folder)

    @property
    def empty(self) -> bool:
        return next(self.pids(), None) is None

    def used(self) -> Used:
        memory, pids = self._folders.get("memory"), self._folders.get("pids")
        killed, filled, refused = 0, False, 0
        if memory is not None and self._unified:
            events = _numbers(f"{memory}/memory.events")
            killed, filled = events.get("oom_kill", 0), events.get("oom", 0) > 0
        elif memory is not None:
            killed = _numbers(f"{memory}/memory.oom_control").get("oom_kill", 0)
            # The counter of failures stays at 0 on newer kernels.
            most = int(_text(f"{memory}/memory.max_usage_in_bytes") or 0)
            limit = int(_text(f"{memory}/memory.limit_in_bytes") or sys.maxsize)
            filled = most + CHARGE_BYTES_MAX >= limit
        if pids is not None:
            refused = _numbers(f"{pids}/pids.events").get("max", 0)
        return Used(killed, filled, refused)

    def remove(self) -> bool:
        """False while a process is still in it; then it has to be tried again."""
        gone = True
        for folder in (*self.folders, *self._others):
            gone = _remove(folder) and gone
        return gone


class Cgroups:
    """The groups of one node. `missing` says which controllers cannot be used here, and why."""

    def __init__(
        self,
        name: str,
        folders: dict[str, Path],
        missing: dict[str, str],
        others: Sequence[Path],
        *,
        unified: bool,
    ) -> None:
        self.name = name
        self._others = others
        self.missing = missing
        self.unified = unified
        self._folders = folders
        self._leaving: list[Group] = []
        self._spare: dict[tuple[str, ...], list[Group]] = {}  # by kind
        self._made = itertools.count()
        self.second: Path | None = None  # the node's folder in version 2, if that is mounted

    @classmethod
    def open(cls, directory: Path, cpu_milli: int, *, binds: bool = False) -> Cgroups:
        """Find out what this agent may use. Members together weigh as much as the node's CPUs.
        `binds`: to CPUs as well."""
        name = f"shoal-{hashlib.sha256(str(directory).encode()).hexdigest()[:12]}"
        found = mounts(_text("/proc/self/mountinfo"), _text("/proc/self/cgroup"))
        second = next((mount for mount in found if not mount.controllers), None)
        folders: dict[str, Path] = {}
        missing = {}
        for controller in (*CONTROLLERS, *[CPUSET] * binds):
            mount = next((one for one in found if controller in one.controllers), None)
            if mount is None:
                continue
            try:
                folder = _folder(Path(f"{mount.top}{place(found)}/{name}"))
                # A new group of version 1 has no CPU and no memory, and nothing can enter it.
                for file in ("cpuset.mems", "cpuset.cpus") if controller == CPUSET else ():
                    _write(f"{folder}/{file}", _text(f"{folder.parent}/{file}"))
                folders[controller] = folder
            except OSError as error:
                missing[controller] = _reason(error)
        unified = not folders and second is not None
        if not folders and second is not None:
            folders, missing = _in_unified(second, name, {CPUSET} if binds else set())
            inside = str(folders.get(UNIFIED, "")).removeprefix(second.top)
        else:
            inside = f"{place(found)}/{name}"
        for controller in CONTROLLERS:
            if controller not in folders:
                missing.setdefault(controller, "this machine has no such cgroup")
        tops = [] if unified else [Path(f"{mount.top}{inside}") for mount in found]
        others = [folder for folder in tops if folder not in folders.values()]
        groups = cls(inside, folders, missing, others, unified=unified)
        if second is not None and folders:
            below = Path(f"{second.top}{inside}")
            own = Path(f"{second.top}{second.own.rstrip('/')}") / name
            groups.second = below if below.parent.is_dir() else own
        if "cpu" in folders and cpu_milli:
            _set(str(folders["cpu"]), weight(cpu_milli, unified=unified))
        return groups

    @property
    def holds_devices(self) -> bool:
        return "devices" in self._folders

    def __bool__(self) -> bool:
        return bool(self._folders)

    def make(self, ref: str, ceiling: Ceiling, *, engine: bool = False) -> Group | None:
        """None if this agent cannot make groups. OSError if it usually can. `engine`: a container
        engine makes groups of the same name in all other hierarchies."""
        if not self._folders:
            return None
        if engine or self.unified:
            group = self._group(ref, self._bound(ceiling), self._others if engine else ())
        else:
            group = self._plain(ceiling) or self._group(ref, self._needed(ceiling))
        if group.held is None:
            for place_ in group.folders:
                _make(place_)
        if group.held != ceiling:
            group.hold(ceiling)
        return group

    def _needed(self, ceiling: Ceiling) -> dict[str, Path]:
        """Hierarchies in which the member needs a group. Each costs a part of its start."""
        idle = {"memory"} if not ceiling.memory_mb else set()
        idle |= {"devices"} if not ceiling.denied else set()
        own = self._bound(ceiling)
        return {one: path for one, path in own.items() if one not in idle} or own

    def _bound(self, ceiling: Ceiling) -> dict[str, Path]:
        own = self._folders
        return own if ceiling.cpus else {one: own[one] for one in own if one != CPUSET}

    def _plain(self, ceiling: Ceiling) -> Group | None:
        """A group that bounds processes and CPUs only remembers nothing of those who were in it, so
        the next member gets one that is there: to make and remove one takes as long as a fork."""
        if ceiling.memory_mb or ceiling.denied or ceiling.cpus or "pids" not in self._folders:
            return None
        kind = tuple(setting.file for setting in settings(ceiling, unified=False))
        if spare := self._spare.get(kind):
            return spare.pop()
        name = f"plain-{os.getpid()}-{next(self._made)}"  # no other life has used it
        group = self._group(name, self._needed(ceiling))
        group.kind = kind
        return group

    def discard(self, group: Group, *, used: bool = True) -> bool:
        """Kill what is in it, and remove it as soon as that is gone. Most are empty, and only a
        group that is empty can be removed. `used`: it may have counted something. Returns whether
        it was empty."""
        if (group.kind and not used and self._keeps(group)) or group.remove():
            return True
        group.kill()
        if not group.remove():
            self._leaving.append(group)
        return False

    def _keeps(self, group: Group) -> bool:
        """For the next member."""
        spare = self._spare.setdefault(group.kind, [])
        with contextlib.suppress(OSError):
            if len(spare) < SPARE_MAX and group.vacant:
                spare.append(group)
                return True
        return False

    def tend(self) -> None:
        for group in self._leaving:
            group.kill()
        self._leaving = [group for group in self._leaving if not group.remove()]

    def clear(self) -> int:
        """Kill and remove what an earlier life has left; returns how many groups had processes."""
        names = {
            entry.name
            for folder in self._folders.values()
            for entry in os.scandir(folder)
            if entry.is_dir()
        }
        alive = 0
        self._spare.clear()
        for name in sorted(names):
            group = self._group(name, self._folders, self._others)
            alive += not group.empty
            self.discard(group)
        return alive

    def close(self) -> None:
        """The node's own folders go, too, if everything in them ends soon."""
        deadline = time.monotonic() + CLOSE_S_MAX
        self.clear()
        while self._leaving and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_S)
            self.tend()
        for folder in {*self._folders.values(), *self._others}:
            _remove(str(folder))

    def _group(self, ref: str, own: dict[str, Path], more: Sequence[Path] = ()) -> Group:
        folders = {controller: f"{folder}/{ref}" for controller, folder in own.items()}
        others = [f"{folder}/{ref}" for folder in more]
        return Group(f"{self.name}/{ref}", folders, others, unified=self.unified)


def _set(folder: str, setting: Setting) -> None:
    try:
        _write(f"{folder}/{setting.file}", setting.value)
    except OSError as error:
        if setting.needed:
            raise OSError(error.errno, f"{setting.file}: {error.strerror}") from error


def _make(folder: str) -> None:
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:  # somebody removed the node's own
        os.makedirs(folder, exist_ok=True)


def _in_unified(mount: Mount, name: str, more: set[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Controllers reach the groups of a folder only if no process is in the folder itself, so the
    agent's own group will rarely do. The nearest one above it does."""
    wanted = {"memory", "cpu", "pids"} | more
    own, why = Path(f"{mount.top}{mount.own}"), ""
    while True:
        base = own / name
        try:
            with contextlib.suppress(OSError):
                enable(own, wanted)
            _folder(base)
            with contextlib.suppress(OSError):
                enable(base, wanted)
            here = wanted & set(_text(f"{base}/cgroup.subtree_control").split())
            if {"memory", "pids"} <= here:
                missing = dict.fromkeys(wanted - here, "the group above this agent's lacks it")
                return {UNIFIED: base, **dict.fromkeys(here, base)}, missing
            why = why or "no group above this agent's passes it on"
            base.rmdir()
        except OSError as error:
            why = why or _reason(error)
        if str(own) == mount.top or own == own.parent:
            return {}, dict.fromkeys(wanted, why)
        own = own.parent


def enable(folder: Path, controllers: set[str]) -> None:
    """Pass controllers on to the groups in a folder, one by one: some may not be there."""
    for controller in sorted(controllers):
        with contextlib.suppress(OSError):
            _write(str(folder / "cgroup.subtree_control"), f"+{controller}")


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    if not os.access(path / PROCESSES, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def _reason(error: OSError) -> str:
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "no writable cgroup" if denied else f"its cgroup: {error.strerror}"


def _remove(folder: str) -> bool:
    """With the groups inside it, which have to be empty, too."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return _remove_tree(folder)
    return True


def _remove_tree(folder: str) -> bool:
    for inner in reversed(_tree(folder)):
        try:
            os.rmdir(inner)
        except FileNotFoundError:
            pass
        except OSError:
            return False
    return True


def _tree(folder: str) -> list[str]:
    """A group and those in it, itself first. A group has many files, so few are listed."""
    found = [folder]
    for one in found:
        with contextlib.suppress(OSError):
            if os.stat(one).st_nlink > NO_GROUPS_LINKS:
                found.extend(entry.path for entry in os.scandir(one) if entry.is_dir())
    return found


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _text(path: str) -> str:
    try:
        return read_small(path)
    except OSError:
        return ""


def _numbers(path: str) -> dict[str, int]:
    found = {}
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if number.isdecimal():
            found[name] = int(number)
    return found


# What is written into a group for a ceiling, and where groups are mounted: pure.


CONTROLLERS = ("memory", "cpu", "pids", "devices")
SHARES_PER_CPU = 1024  # version 1: what a process without a group gets
WEIGHT_PER_CPU = 100  # version 2, the same
SHARES = range(2, 262_145)
WEIGHTS = range(1, 10_001)
PERIOD_US = 100_000
QUOTA_US_MIN = 1_000


class Ceiling(NamedTuple):
    """What one member may use; 0: as much as there is. `denied`: devices, as (major, minor)."""

    memory_mb: int = 0
    cpu_milli: int = 0
    cpu_hard: bool = False
    processes: int = 0
    denied: tuple[tuple[int, int], ...] = ()
    cpus: str = ""  # those that it runs on, as the kernel lists them; empty: all
    mems: str = ""  # whose memory it gets


class Setting(NamedTuple):
    controller: str
    file: str
    value: str
    needed: bool = True  # else it is a refinement that not every kernel has


class Used(NamedTuple):
    """What the kernel refused a member."""

    killed: int = 0  # processes, because memory ran out
    filled: bool = False  # its own limit was reached, not only the machine's
    refused: int = 0  # new processes


def settings(ceiling: Ceiling, *, unified: bool) -> list[Setting]:
    """What to write for a ceiling; swap counts as memory."""
    found: list[Setting] = []
    if ceiling.memory_mb:
        most = str(ceiling.memory_mb * 1024**2)
        found += _memory_2(most) if unified else _memory_1(most)
    if ceiling.processes:
        found.append(Setting("pids", "pids.max", str(ceiling.processes)))
    if ceiling.cpu_milli:
        found.append(weight(ceiling.cpu_milli, unified=unified))
        if ceiling.cpu_hard:
            quota = max(QUOTA_US_MIN, ceiling.cpu_milli * PERIOD_US // 1000)
            text = f"{quota} {PERIOD_US}" if unified else str(quota)
            found.append(Setting("cpu", "cpu.max" if unified else "cpu.cfs_quota_us", text))
    if ceiling.cpus:
        found.append(Setting(CPUSET, "cpuset.mems", ceiling.mems))
        found.append(Setting(CPUSET, "cpuset.cpus", ceiling.cpus))
    if not unified:
        found += [
            Setting("devices", "devices.deny", f"c {major}:{minor} rwm")
            for major, minor in ceiling.denied
        ]
    return found


def _memory_1(most: str) -> list[Setting]:
    swap = Setting("memory", "memory.memsw.limit_in_bytes", most, needed=False)
    return [Setting("memory", "memory.limit_in_bytes", most), swap]


def _memory_2(most: str) -> list[Setting]:
    """If a part of a member is killed, the rest of it rarely notices: all of it ends."""
    return [
        Setting("memory", "memory.max", most),
        Setting("memory", "memory.swap.max", "0", needed=False),
        Setting("memory", "memory.oom.group", "1", needed=False),
    ]


def weight(cpu_milli: int, *, unified: bool) -> Setting:
    """A member gets CPU in proportion to what it asked for, and all that others leave idle."""
    if unified:
        return Setting("cpu", "cpu.weight", _within(WEIGHTS, cpu_milli * WEIGHT_PER_CPU))
    return Setting("cpu", "cpu.shares", _within(SHARES, cpu_milli * SHARES_PER_CPU))


def _within(bounds: range, milli: int) -> str:
    return str(min(bounds[-1], max(bounds[0], milli // 1000)))


class Mount(NamedTuple):
    """Where a hierarchy is mounted, and the path of our own group below that, as in `/a/b`."""

    controllers: frozenset[str]  # of version 1; empty for version 2
    top: str
    own: str


def mounts(mountinfo: str, own: str) -> list[Mount]:
    """From /proc/self/mountinfo and /proc/self/cgroup."""
    groups = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        groups[frozenset(names.split(",")) - {""}] = path
    found = []
    for line in mountinfo.splitlines():
        words = line.split()
        kind, _, options = words[words.index("-") + 1 :][:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, top = words[3], unescaped(words[4])
        held = frozenset(options.split(",")) if kind == "cgroup" else frozenset[str]()
        for controllers, path in groups.items():
            if controllers <= held and bool(controllers) == (kind == "cgroup"):
                inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
                found.append(Mount(controllers, top, "/" + inside.strip("/")))
    return found


def place(found: list[Mount]) -> str:
    """Where in all hierarchies of version 1 the node's groups go: below the agent's own, if that
    has the same path in all of them, because container engines take one path. Else at the top."""
    own = {one.own for one in found if one.controllers & set(CONTROLLERS)}
    return own.pop().rstrip("/") if len(own) == 1 else ""
