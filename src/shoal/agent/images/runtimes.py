"""What runs images on this node, and the facts about the node that a container's command needs."""

from __future__ import annotations

import enum
import os
import resource
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

CONTAINERS = "SHOAL_CONTAINERS"  # the command to use, with its general flags; "none" for none
KNOWN = ("podman", "docker", "apptainer")
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
CDI_KIND = b"nvidia.com/gpu"
CDI_BYTES_MAX = 4 << 20
FILES_MAX = 1 << 20
PIDS_MAX = 32_768


class Runtime(msgspec.Struct, frozen=True):
    """`name` is one of KNOWN; `command` is how it is called on this node."""

    name: str
    command: tuple[str, ...]


class Gpus(enum.Enum):
    NONE = "none"  # no driver: GPUs that exist only as numbers, or none at all
    NAMED = "named"  # containers get them by name (CDI)
    UNNAMED = "unnamed"


class Facts(msgspec.Struct, frozen=True):
    """Of this node and its agent."""

    user: int
    group: int
    gpus: Gpus
    files: tuple[int, int]  # how many a process may open: usually, and at most
    processes: tuple[int, int]
    memory_mb: int
    limits: bool  # may podman limit the containers of this user?
    queues: bool = True  # has the machine /dev/mqueue? An ordinary user's podman insists on it


def find(environ: Mapping[str, str] = os.environ) -> Runtime | None:
    """Looks only into the PATH, so it costs nothing on a node that never runs an image."""
    wanted = shlex.split(environ.get(CONTAINERS, ""))
    for words in [wanted] if wanted else [[name] for name in KNOWN]:
        program = shutil.which(words[0], path=environ.get("PATH", os.defpath))
        name = os.path.basename(words[0])
        if program is not None and name in KNOWN:
            return Runtime(name, (program, *words[1:]))
    return None


def facts() -> Facts:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Facts(
        user=os.geteuid(),
        group=os.getegid(),
        gpus=_gpus(),
        files=_within(resource.getrlimit(resource.RLIMIT_NOFILE), FILES_MAX),
        processes=_within(resource.getrlimit(resource.RLIMIT_NPROC), _pids_max()),
        memory_mb=pages * size >> 20,
        limits=os.geteuid() == 0 or _delegated(),
        queues=os.path.exists("/dev/mqueue"),
    )


def _within(limits: tuple[int, int], most: int) -> tuple[int, int]:
    """Podman lowers its own limits to this, and no container can have more."""
    soft, hard = (most if one == resource.RLIM_INFINITY else min(one, most) for one in limits)
    return soft, hard


def _pids_max() -> int:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return PIDS_MAX


def _gpus() -> Gpus:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Gpus.NONE
    for folder in CDI_FOLDERS:
        for file in sorted(folder.glob("*.*")):
            try:
                with file.open("rb") as content:
                    if CDI_KIND in content.read(CDI_BYTES_MAX):
                        return Gpus.NAMED
            except OSError:
                continue
    return Gpus.UNNAMED


def _delegated() -> bool:
    """May an ordinary user set limits? Only below a group of version 2 that is the user's own."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        controllers = Path(f"/sys/fs/cgroup{own}/cgroup.controllers").read_text().split()
        return {"memory", "pids", "cpu"} <= set(controllers)
    except (OSError, StopIteration):
        return False
