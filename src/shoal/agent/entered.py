"""Processes that users have started beside members: children of the agent, each with its member."""

from __future__ import annotations

import asyncio
from typing import Protocol

from shoal.model.job import MemberRef


class Helper(Protocol):
    """Part of the agent with processes of its own."""

    def pids(self) -> set[int]: ...

    def ended(self, pid: int, code: int) -> bool: ...


class Entered:
    """A helper, but what its processes leave belongs to members."""

    def __init__(self) -> None:
        self.refs: dict[int, MemberRef] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}

    def add(self, pid: int, ref: MemberRef) -> asyncio.Future[int]:
        """Gets its exit code as a shell reports it."""
        self.refs[pid] = ref
        end = self._ends[pid] = asyncio.get_running_loop().create_future()
        return end

    def pids(self) -> set[int]:
        return set(self.refs)

    def ended(self, pid: int, code: int) -> bool:
        if self.refs.pop(pid, None) is None:
            return False
        end = self._ends.pop(pid)
        if not end.done():
            end.set_result(code if code >= 0 else 128 - code)
        return True
