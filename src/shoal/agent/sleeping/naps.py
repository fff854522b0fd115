"""Puts members of this node to sleep and wakes them, beside everything else that the agent does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from shoal.agent.beats import Beats, IdleWatch
from shoal.agent.images.containers import inside
from shoal.agent.member import NAPPING, Member, State
from shoal.agent.ownership import Seen, read_process
from shoal.agent.processes import Processes
from shoal.agent.sleeping.port import Full, Lost, Refused, Sleeping
from shoal.agent.sleeping.port import Processes as Port
from shoal.core.nodebook import NodeBook
from shoal.machine.cgroups import Group
from shoal.model.commands import Launch, Sleep, Wake
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import Uses

log = logging.getLogger("shoal.agent")

# One that takes longer is woken again, or given up. 1 TB of GPU memory takes about 9 minutes.
SLEEP_S_MAX = 900.0
WAKE_S_MAX = 1_800.0
LEAVE_S_MAX = 60.0  # then it is killed where it is
HOLD_S = 5.0  # so often, sleepers are looked at


class Naps:
    """`way`: how members of this node sleep. Each nap is a task of the member."""

    def __init__(
        self,
        processes: Processes,
        book: NodeBook,
        members: Mapping[MemberRef, Member],
        beats: Beats,
        idle: IdleWatch,
        changed: Callable[[], None],
    ) -> None:
        self.way: Sleeping = Freeze()
        self._processes = processes
        self._book = book
        self._members = members
        self._beats = beats
        self._idle = idle
        self._changed = changed
        self._trees: dict[MemberRef, Tree] = {}
        self._slept_on: dict[MemberRef, Launch] = {}  # with the GPUs that it had
        self._moved: set[MemberRef] = set()  # a part of them may not be in its processes now
        self._restored: set[MemberRef] = set()  # their driver has brought them back to their GPUs
        self._hold_at = 0.0

    # -- falling asleep and waking ---------------------------------------------------------

    def sleep(self, command: Sleep) -> None:
        member = self._members.get(command.ref)
        runs = member is not None and member.state is State.RUNNING
        launch = self._book.alive.get(command.ref)
        why = why_not(self.way, launch) if runs and launch is not None else "it does not run"
        if member is None or why:
            self._book.refuses(command.ref, why)
            self._changed()
            return
        member.become(State.DOZING)
        self._slept_on[member.ref] = self._book.alive[member.ref]
        self._trees[member.ref] = Tree(self._processes, member.ref)
        member.task = asyncio.create_task(self._doze(member))
        self._idle.rests(member.ref)

    async def _doze(self, member: Member) -> None:
        ref, began, why, between = member.ref, time.monotonic(), "", True
        if self.way.name != Freeze.name:
            self._moved.add(ref)
            self._limit(ref, on=False)
        try:
            async with asyncio.timeout(SLEEP_S_MAX):
                moved_mb = await self.way.sleep(self._trees[ref])
        except Refused as refused:
            why, between = str(refused), False
        except TimeoutError:
            why = f"it was not asleep after {SLEEP_S_MAX:.0f} s"
        except Exception as error:
            log.exception("%s could not be put to sleep", ref)
            why = f"the agent failed: {error}"
        if member.state is not State.DOZING:
            return
        if why:
            log.info("%s is not put to sleep: %s", ref, why)
            if not between or await self._woken_at_last(member):
                member.become(State.RUNNING)
                self._book.refuses(ref, why)
                self._over(member)
            return
        if not moved_mb:
            self._moved.discard(ref)
        member.become(State.ASLEEP)
        took_ms = _since_ms(began)
        log.info("%s sleeps after %d ms, with %d MB moved", ref, took_ms, moved_mb)
        self._book.slept(ref, moved_mb, took_ms)
        self._changed()

    def wake(self, command: Wake) -> None:
        member = self._members.get(command.ref)
        if member is None or member.state is not State.ASLEEP:
            self._book.awoke(command.ref, 0)
            self._changed()
            return
        member.become(State.WAKING)
        before = self._slept_on[member.ref].gpus
        gpus = dict(zip(before, command.gpus, strict=False)) if before != command.gpus else {}
        member.task = asyncio.create_task(self._wake(member, gpus))

    async def _wake(self, member: Member, gpus: Mapping[int, int]) -> None:
        began = time.monotonic()
        try:
            woken = await self._woken(member, gpus)
        except Full as full:
            if member.state is State.WAKING:
                log.info("%s stays asleep: %s", member.ref, full)
                member.become(State.ASLEEP)
                self._book.stays_asleep(member.ref, str(full))
                self._changed()
            return
        if woken:
            member.become(State.RUNNING)
            took_ms = _since_ms(began)
            log.info("%s is awake after %d ms", member.ref, took_ms)
            self._book.awoke(member.ref, took_ms)
            self._over(member)

    async def _woken_at_last(self, member: Member) -> bool:
        """One that could not be put to sleep as a whole has to wake: nobody knows what it needs."""
        try:
            return await self._woken(member, {})
        except Full as full:
            return self._lost(member, str(full))

    async def _woken(self, member: Member, gpus: Mapping[int, int]) -> bool:
        """False if it has ended or has to: then nobody waits for it. Raises Full."""
        ref, why = member.ref, ""
        try:
            async with asyncio.timeout(WAKE_S_MAX):
                await self.way.wake(self._trees[ref], gpus)
        except Full:
            raise
        except Lost as lost:
            why = str(lost)
        except TimeoutError:
            why = f"it was not awake after {WAKE_S_MAX:.0f} s"
        except Exception as error:
            log.exception("%s could not be woken", ref)
            why = f"the agent failed: {error}"
        if member.state not in NAPPING:
            return False
        return not why or self._lost(member, why)

    def _lost(self, member: Member, why: str) -> bool:
        log.error("%s is killed, because it could not be woken: %s", member.ref, why)
        member.why, member.fault = f"it could not be woken: {why}", Fault.WAKE
        self._processes.signal(member.ref, signal.SIGKILL)
        self._release(member.ref)
        return False

    def _over(self, member: Member) -> None:
        """It runs again, and is watched as if it had just begun."""
        ref = member.ref
        self._limit(ref, on=True)
        self._restored |= self._moved & {ref}
        self._forget(ref)
        self._beats.woke(ref)
        self._idle.expect(self._book.alive[ref])
        self._changed()

    def _limit(self, ref: MemberRef, *, on: bool) -> None:
        """What is moved from its GPUs is memory of its processes. The controller has set it aside;
        its own limit does not count it."""
        process = self._processes.get(ref)
        if process is not None and process.group is not None and process.ceiling.memory_mb:
            with contextlib.suppress(OSError):
                process.group.hold_memory(process.ceiling.memory_mb if on else 0)

    # -- the rest of a member's life -------------------------------------------------------

    def stop(self, member: Member) -> bool:
        """It is to end, so its processes go on. False if it cannot obey: a part of it is not in its
        processes, so that it could do nothing but wait for it."""
        if member.task is not None:
            member.task.cancel()
        obeys = member.ref not in self._moved
        self._release(member.ref)
        return obeys

    def restored(self, ref: MemberRef) -> bool:
        """It slept and woke on real GPUs, so it must not be killed there: see `Cuda.leave`."""
        return ref in self._restored

    def deaf(self, ref: MemberRef) -> bool:
        """No process of it catches SIGTERM, so that one would kill it."""
        return not any(_catches(pid, signal.SIGTERM) for pid in Tree(self._processes, ref).pids())

    async def leave(self, ref: MemberRef) -> None:
        self._restored.discard(ref)
        self._limit(ref, on=False)
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await self.way.leave(Tree(self._processes, ref))
        except (Refused, Lost, TimeoutError) as why:
            log.info("%s is killed on its GPUs: %s", ref, why or f"{LEAVE_S_MAX:.0f} s are over")
        except Exception:
            log.exception("%s could not be taken off its GPUs", ref)

    def close(self, ref: MemberRef) -> None:
        """The agent ends, and the member has got SIGTERM."""
        member = self._members.get(ref)
        if member is not None and member.state in NAPPING and not self.stop(member):
            self._processes.signal(ref, signal.SIGKILL)

    def ended(self, ref: MemberRef) -> None:
        member = self._members.get(ref)
        if ref in self._trees and member is not None and member.task is not None:
            member.task.cancel()
        self._forget(ref)
        self._restored.discard(ref)

    @property
    def gpus(self) -> set[int]:
        """Those whose processes are worth reading."""
        if self.way.name == Freeze.name:
            return set()
        return {gpu for launch in self._book.alive.values() for gpu in launch.gpus}

    def tend(self, usage: Mapping[int, Mapping[int, int]]) -> None:
        """Called about once a second. `usage`: MB by GPU and process."""
        self._book.uses = uses(usage, self._processes.owner, self._book.alive)
        now = time.monotonic()
        if now < self._hold_at:
            return
        self._hold_at = now + HOLD_S
        for ref, tree in self._trees.items():
            if self._members[ref].state is State.ASLEEP:
                tree.hold()

    def _release(self, ref: MemberRef) -> None:
        if ref in self._trees:
            self._trees[ref].release()

    def _forget(self, ref: MemberRef) -> None:
        self._trees.pop(ref, None)
        self._slept_on.pop(ref, None)
        self._moved.discard(ref)


def _since_ms(began: float) -> int:
    return int((time.monotonic() - began) * 1000)


# What members have on GPUs: as much memory of the node is set aside before one is put to sleep.


WHOLE_MB = 1_000


def uses(
    usage: Mapping[int, Mapping[int, int]],
    owner: Callable[[int], MemberRef | None],
    alive: Collection[MemberRef],
) -> tuple[Uses, ...]:
    """`usage`: MB by GPU and process, as the driver reports them."""
    found: dict[MemberRef, int] = {}
    for processes in usage.values():
        for pid, memory_mb in processes.items():
            ref = owner(pid)
            if ref is not None and ref in alive:
                found[ref] = found.get(ref, 0) + memory_mb
    return tuple(Uses(ref, -(-mb // WHOLE_MB) * WHOLE_MB) for ref, mb in sorted(found.items()))


# Which way to sleep this node has.


WHY_LETTERS_MAX = 200


def way_of(spec: NodeSpec, *, real: bool) -> Sleeping:
    """`real`: this machine has NVIDIA's devices. Members without GPUs only have to be stopped."""
    if not (spec.gpus and real):
        return Freeze()
    from shoal.agent.sleeping.cuda import Cuda  # other nodes do without ctypes and its memory

    return Cuda()


def why_not(way: Sleeping, launch: Launch) -> str:
    """What is known before its processes are looked at; empty if it may sleep."""
    if way.name == Freeze.name or not launch.gpus or launch.env.get("WORLD_SIZE", "1") == "1":
        return ""
    return "it is one of a gang on GPUs, and NCCL's memory cannot be brought back"


def described(spec: NodeSpec, way: Sleeping) -> NodeSpec:
    """What the controller has to know of it. `why_not` may take a moment."""
    why = way.why_not()[:WHY_LETTERS_MAX]
    frozen = way.name == Freeze.name  # GPUs that exist only in the books can be any
    return msgspec.structs.replace(
        spec, sleep="" if why else way.name, sleep_why=why, remaps=frozen
    )


# Stops all processes of a member where they are, and lets them go on.
#
# In a group of version 2 the kernel does that at once, and no process notices. Everywhere else each
# process gets SIGSTOP, parents first, until no process is found that runs. What is stopped in
# either way still ends by SIGKILL, so nothing has to be woken before it can be killed. That is not
# so in the freezer of version 1, which is therefore not used.


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

    async def leave(self, processes: Port) -> None:
        """It has nothing there."""


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


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "it has ended"
