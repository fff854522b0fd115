"""Which member a process belongs to, even if it hides: by its ancestors, while they live.

A process that forks twice, makes a session of its own and clears its environment becomes the
agent's child and carries no mark. So ancestry is read while it is still visible, and remembered
for as long as the process lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.machine.kernel import read_small, variable
from shoal.model.job import MemberRef

Owners = frozenset[MemberRef]
NOBODY: Owners = frozenset()
FILES_MAX = 64


class Seen(NamedTuple):
    parent: int
    session: int
    started: int  # pid and start time together are unique
    state: str  # a letter, as `ps` shows it


class Ownership:
    def __init__(self, mark: str, folders: str) -> None:
        self._mark = mark
        self._folders = folders  # of the members: a process with a file open there belongs to one
        self._owners: dict[tuple[int, int], Owners] = {}

    def strangers(self, children: Iterable[int]) -> bool:
        """Is one of them new to us?"""
        return any(self._key(pid) not in self._owners for pid in children)

    def look(
        self,
        members: Mapping[int, MemberRef],
        helpers: Iterable[int],
        ended: Mapping[int, MemberRef],
    ) -> None:
        """`members` are alive, `ended` have just ended. A new orphan without any mark belongs to
        those that ended; if none did, any member may own it."""
        seen = processes()
        roots = {pid: frozenset([ref]) for pid, ref in (*members.items(), *ended.items())}
        roots |= dict.fromkeys(helpers, NOBODY)
        refs = {str(ref): owners for owners in roots.values() for ref in owners}
        strays = frozenset(ended.values()) or frozenset(members.values())
        me = os.getpid()
        found: dict[tuple[int, int], Owners] = {}

        def orphan(pid: int, one: Seen) -> Owners:
            marked = variable(pid, self._mark)
            if marked is not None:
                return refs.get(marked, NOBODY)
            holds = _uses(pid, self._folders)
            return roots.get(one.session) or (refs.get(holds, NOBODY) if holds else strays)

        for pid in seen:
            line, owners = [], None
            at = pid
            while owners is None and (one := seen.get(at)) is not None:
                line.append((at, one.started))
                owners = roots.get(at)
                if owners is None:
                    owners = found.get(line[-1], self._owners.get(line[-1]))
                if owners is None and one.parent == me:
                    owners = orphan(at, one)
                at = one.parent if one.parent != at else 0
            if owners is not None:
                found |= dict.fromkeys(line, owners)
        self._owners = found

    def owners(self, pid: int) -> Owners:
        return self._owners.get(self._key(pid), NOBODY)

    def of(self, ref: MemberRef) -> list[int]:
        """Processes that belong, or may belong, to the member, as of the last look."""
        return [pid for (pid, _), owners in self._owners.items() if ref in owners]

    def _key(self, pid: int) -> tuple[int, int]:
        one = read_process(pid)
        return pid, one.started if one is not None else 0


def processes() -> dict[int, Seen]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (one := read_process(int(name))) is not None:
            found[int(name)] = one
    return found


def _uses(pid: int, folders: str) -> str:
    """The member folder in which it runs or has a file open, usually its output."""
    try:
        names = [f"fd/{name}" for name in sorted(os.listdir(f"/proc/{pid}/fd"))[:FILES_MAX]]
        for name in (*names, "cwd"):
            path = os.readlink(f"/proc/{pid}/{name}")
            if path.startswith(f"{folders}/"):
                return path[len(folders) + 1 :].partition("/")[0]
    except OSError:  # it has ended in the meantime, or closed the file
        pass
    return ""


def read_process(pid: int) -> Seen | None:
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return Seen(int(fields[1]), int(fields[3]), int(fields[19]), fields[0])
    except (OSError, ValueError, IndexError):
        return None  # it has ended in the meantime
