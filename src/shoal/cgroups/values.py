"""What is written into a group for a ceiling, and where groups are mounted: pure."""

from __future__ import annotations

from typing import NamedTuple

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
        root, top = words[3], _plain(words[4])
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


def _plain(word: str) -> str:
    """A path as mountinfo writes it."""
    return word.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
