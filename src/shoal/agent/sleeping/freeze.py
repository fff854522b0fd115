"""Stops all processes of a member where they are, and lets them go on.

In a group of version 2 the kernel does that at once, and no process notices. Everywhere else each
process gets SIGSTOP, parents first, until no process is found that runs. What is stopped in either
way still ends by SIGKILL, so nothing has to be woken before it can be killed. That is not so in the
freezer of version 1, which is therefore not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.agent.images.containers import inside
from shoal.agent.ownership import Seen, read_process
from shoal.agent.processes import Processes
from shoal.agent.sleeping.port import Processes as Port
from shoal.agent.sleeping.port import Refused
from shoal.machine.cgroups import Group
from shoal.model.job import MemberRef

FREEZE_S_MAX = 20.0
LOOK_S = 0.01
# With SIGSTOP pending, a process that waits in the kernel (D) runs no instruction of its own.
STILL = frozenset("TtDZXx")
STOPPED = frozenset("TtZXx")


class Freeze:
    """A member that has nothing on a GPU sleeps when its processes are stopped."""

    name = "freeze"

    def why_not(self) -> str:
        return ""

    async def sleep(self, processes: Port) -> int:
        await processes.freeze()
        return 0

    async def wake(self, processes: Port, gpus: Mapping[int, int]) -> None:  # noqa: ARG002
        """GPUs that exist only in the books can be any."""
        await processes.thaw()


class Tree:
    """The processes of one member."""

    def __init__(self, processes: Processes, ref: MemberRef) -> None:
        self._processes = processes
        self._ref = ref
        self._group: Group | None = None  # that is frozen
        # Processes that got SIGSTOP from here. Others that are stopped were so before, by the job.
        self._stopped: dict[tuple[int, int], None] = {}
        self._held = False

    def pids(self) -> list[int]:
        """The client and the monitor of a container are no part of it: they see it end."""
        if self._ref in self._processes.containers:
            first = self._processes.containers.first(self._ref)
            return inside(first) if first is not None else []
        process = self._processes.get(self._ref)
        if process is None:
            return []
        # A process that may be another member's as well is left alone.
        found = self._processes.all_of(self._ref)
        grouped = set(process.group.pids()) if process.group is not None else set()
        return sorted(pid for pid in found if pid in grouped or self._owns(pid))

    def _owns(self, pid: int) -> bool:
        return self._processes.owner(pid) == self._ref

    async def freeze(self) -> None:
        deadline = time.monotonic() + FREEZE_S_MAX
        self._held = True
        try:
            self._freeze_group()
            while not self._is_still():
                if time.monotonic() > deadline:
                    raise Refused(f"its processes have not stopped after {FREEZE_S_MAX:.0f} s")
                await asyncio.sleep(LOOK_S)
        except OSError as error:
            self.release()
            raise Refused(f"its processes cannot be stopped: {error.strerror}") from None
        except BaseException:
            self.release()
            raise

    async def thaw(self) -> None:
        self.release()

    def hold(self) -> None:
        """Called from time to time: one that somebody else let go on is stopped again, and so is
        what it has started."""
        seen = {pid: read_process(pid) for pid, _ in self._stopped}
        runs = any(one is not None and one.state not in STILL for one in seen.values())
        if self._held and (runs or (self._group is not None and not self._group.frozen)):
            with contextlib.suppress(OSError, Refused):
                self._freeze_group()
                self._is_still()

    def release(self) -> None:
        """Children first, so that no parent sees that they were stopped."""
        self._held = False
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.freeze(on=False)
            self._group = None
        for pid, started in reversed(self._stopped):
            seen = read_process(pid)
            if seen is not None and seen.started == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _freeze_group(self) -> None:
        process = self._processes.get(self._ref)
        if process is None or process.group is None or self._ref in self._processes.containers:
            return
        if process.group.freezes:
            self._group = process.group
            process.group.freeze(on=True)

    def _is_still(self) -> bool:
        """Stop what runs; True if nothing did, and nothing new has appeared."""
        if self._group is not None and not self._group.frozen:
            return False
        frozen = set(self._group.pids()) if self._group is not None else set()
        found = {pid: read_process(pid) for pid in self.pids() if pid not in frozen}
        seen = {pid: one for pid, one in found.items() if one is not None}
        still = True
        for pid in sorted(seen, key=lambda pid: _depth(pid, seen)):
            one = seen[pid]
            if one.state in STOPPED:
                continue
            ours = (pid, one.started) in self._stopped
            if ours and one.state in STILL:
                continue
            still = False
            self._stop(pid, one)
        return still

    def _stop(self, pid: int, one: Seen) -> None:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        except PermissionError:
            raise Refused(f"process {pid} ({_name(pid)}) belongs to another user") from None
        self._stopped[pid, one.started] = None


def _depth(pid: int, seen: Mapping[int, Seen]) -> int:
    depth = 0
    while pid in seen and depth < len(seen):
        pid, depth = seen[pid].parent, depth + 1
    return depth


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "it has ended"
