"""What a member is held to by its cgroup, how it joins it, and what this node cannot enforce."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.machine.cgroups import Ceiling, Cgroups, Group
from shoal.model.commands import Launch
from shoal.model.node import JOB_GPUS, OF_TENANTS
from shoal.model.resources import WHOLE_GPU_MILLI

OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL")  # it sets these, and the program must not see that
NAMES = {"memory": "memory", "cpu": "CPUs", "pids": "processes"}


def ceiling_of(launch: Launch, gone: Iterable[Device] = ()) -> Ceiling:
    limits = launch.limits
    denied = tuple((one.major, one.minor) for one in gone)
    return Ceiling(launch.memory_mb, launch.cpu_milli, limits.cpu_hard, limits.processes, denied)


def joining(group: Group | None, env: dict[str, str], words: Sequence[str] = ()) -> list[str]:
    """What comes before the path of a program, so that nothing of it is outside of its group, and
    it dies with the agent even if its keeper is killed too. `words` come in between; the kernel may
    forget the second for what they do, so they come before that."""
    entrances = group.entrances if group is not None else []
    if JOIN:
        return [JOIN, *entrances, "--", *words, *((JOIN, "--") if words else ())]
    return [*_joining_by_shell(entrances, env), *words, *DYING]


def _joining_by_shell(entrances: Sequence[str], env: dict[str, str]) -> list[str]:
    if not entrances:
        return []
    unset = " ".join(name for name in OF_THE_SHELL if name not in env)
    script = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done; shift; exec "$@"'
    return ["/bin/sh", "-c", f"unset {unset}; {script}", "sh", *entrances, "--"]


def _join_program() -> str:
    """Empty where the machine is of another kind, or its disk runs no programs."""
    path = f"{os.path.dirname(os.path.abspath(__file__))}/join-{platform.machine()}"
    return path if os.access(path, os.X_OK) else ""


def _dying() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


JOIN = _join_program()
DYING = [] if JOIN else _dying()


def unenforced(groups: Cgroups, gpus: bool, tenants: str, ports: str) -> tuple[str, ...]:
    """What this agent cannot enforce, and why, for people. `gpus`: the machine has real ones.
    `tenants`: why they are not apart; if they are, mounts keep GPUs of others from them. `ports`:
    why they may bind ports of others."""
    reasons: dict[str, list[str]] = {}
    for name, noun in NAMES.items():
        if name in groups.missing:
            reasons.setdefault(groups.missing[name], []).append(noun)
    found = [f"{', '.join(what)} ({why})" for why, what in reasons.items()]
    if gpus and not groups.holds_devices:
        whose = "GPUs of others" if tenants else "GPUs of others, by the operator's jobs"
        found.append(f"{whose} (no device cgroup)")
    if tenants:
        found.append(tenants)
    elif ports:
        found.append(f"{OF_TENANTS}' ports, which others may bind first ({ports})")
    return tuple(found)


# The files of this machine's GPUs: those that a member was not given cannot be opened by it.


GPU_DEVICES = "SHOAL_GPU_DEVICES"
DEFAULT = "/dev/nvidia*"  # `*` stands for the number
VISIBLE = "CUDA_VISIBLE_DEVICES"


SETTLED_NS = 1_000_000_000
# By pattern: its folder, when that changed, and what was in it.
_listed: dict[str, tuple[str, int, dict[int, Device]]] = {}


class Device(NamedTuple):
    path: str
    major: int
    minor: int


def devices(pattern: str = "") -> dict[int, Device]:
    """The GPUs' files by number, as they are now: a driver may make them late."""
    pattern = pattern or os.environ.get(GPU_DEVICES) or DEFAULT
    folder, changed_ns, found = _listed.get(pattern) or (_folder(pattern), 0, {})
    try:
        now_ns = os.stat(folder).st_mtime_ns
        if now_ns != changed_ns:
            found = _devices(pattern, folder)
            # What changes again in the same tick of the clock would not be seen.
            if time.time_ns() - now_ns > SETTLED_NS:
                _listed[pattern] = folder, now_ns, found
    except OSError:
        return {}
    return found


def _folder(pattern: str) -> str:
    return os.path.dirname(pattern.partition("*")[0])


def _devices(pattern: str, folder: str) -> dict[int, Device]:
    before, _, after = pattern.partition("*")
    start = os.path.basename(before)
    found = {}
    for name in os.listdir(folder):
        number = name.removeprefix(start).removesuffix(after)
        if not name.startswith(start) or f"{start}{number}{after}" != name:
            continue
        if not (number.isascii() and number.isdecimal()):
            continue
        path = f"{folder}/{name}"
        if stat.S_ISCHR((info := os.stat(path)).st_mode):
            found[int(number)] = Device(path, os.major(info.st_rdev), os.minor(info.st_rdev))
    return found


def given(launch: Launch) -> set[int]:
    """Members of a gang may open all GPUs that it has on the node: peer access between them needs
    both ends. The controller sets the variables, not the job; a share's daemon changes their
    meaning."""
    found = set(launch.gpus)
    if launch.gpu_milli == WHOLE_GPU_MILLI:
        words = f"{launch.env.get(VISIBLE, '')},{launch.env.get(JOB_GPUS, '')}".split(",")
        found |= {int(word) for word in words if word.isdecimal()}
    return found


def withheld(launch: Launch, found: Mapping[int, Device]) -> dict[int, Device]:
    if not found:
        return {}
    mine = given(launch)
    return {number: device for number, device in found.items() if number not in mine}


def renumbered(visible: str, found: Iterable[int], gone: Iterable[int]) -> str:
    """CUDA counts only the GPUs that it can open, from 0."""
    left = sorted(set(found) - set(gone))
    place = {str(number): str(index) for index, number in enumerate(left)}
    return ",".join(place.get(word, word) for word in visible.split(","))
