"""How much memory this host can give to processes that are put to sleep.

What the driver moves from a GPU becomes memory of the process, so the limits of its cgroups count
as well as the host's free memory. Too little would end in a kill by the kernel, and lose the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.cgroups.values import mounts

MB = 1024**2
UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 if there is no limit


def free_mb(pids: Iterable[int], proc: Path = Path("/proc")) -> tuple[int, str]:
    """The least that the host or a group of these processes has left, and which of them it is."""
    least = _available_mb(proc / "meminfo"), "the host"
    for folder in dict.fromkeys(one for pid in pids for one in _folders(proc, pid)):
        left = _left_mb(folder)
        if left is not None and left < least[0]:
            least = left, "its memory limit"
    return least


def _available_mb(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _folders(proc: Path, pid: int) -> Iterator[Path]:
    """The groups that the process is in, up to the top of each hierarchy that counts memory."""
    try:
        found = mounts(
            (proc / "self/mountinfo").read_text(), (proc / str(pid) / "cgroup").read_text()
        )
    except (OSError, ValueError):  # it has just ended
        return
    for mount in found:
        if mount.controllers and "memory" not in mount.controllers:
            continue
        top, folder = Path(mount.top), Path(f"{mount.top}{mount.own}")
        while folder != top and top in folder.parents:
            yield folder
            folder = folder.parent
        yield top


def _left_mb(folder: Path) -> int | None:
    """None where there is no limit. Files that are only cached do not count: they make room."""
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    if limit is None or limit >= UNLIMITED or used is None:
        return None
    return max(0, limit - used + _cached(folder / "memory.stat")) // MB


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # not this version of cgroups, or "max"
            continue
    return None


def _cached(stat: Path) -> int:
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    found = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return found.get("total_inactive_file", found.get("inactive_file", 0))
