"""What a member is held to by its cgroup, how it joins it, and what this node cannot enforce."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.agent.confine.devices import Device
from shoal.cgroups.groups import Cgroups, Group
from shoal.cgroups.values import Ceiling
from shoal.model.commands import Launch
from shoal.model.node import OF_TENANTS

# Join the groups, then become the program.
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done; shift; exec "$@"'
OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL")  # it sets these, and the program must not see that
NAMES = {"memory": "memory", "cpu": "CPUs", "pids": "processes"}


def ceiling_of(launch: Launch, gone: Iterable[Device] = ()) -> Ceiling:
    limits = launch.limits
    denied = tuple((one.major, one.minor) for one in gone)
    return Ceiling(launch.memory_mb, launch.cpu_milli, limits.cpu_hard, limits.processes, denied)


def joining(group: Group | None, env: dict[str, str]) -> list[str]:
    """A process joins before it becomes the program, so that nothing of it is outside."""
    if group is None:
        return []
    unset = " ".join(name for name in OF_THE_SHELL if name not in env)
    return ["/bin/sh", "-c", f"unset {unset}; {JOIN}", "sh", *group.entrances, "--"]


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
