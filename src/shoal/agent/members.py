"""The members of a node, each from its launch to its acknowledged end (agent/member.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.agent.beats import Beats, IdleWatch
from shoal.agent.confine.tenant import SCRATCH_FOLDER, TMP_FOLDER
from shoal.agent.doors import Doors
from shoal.agent.faults import CannotStart, disk_problem, fault_of, fills_disk, must_have_room
from shoal.agent.images.pull import not_started
from shoal.agent.keeping.keeping import Keeping
from shoal.agent.keeping.volumes import paths_of
from shoal.agent.member import LIVING, NAPPING, Member, State, grace_s
from shoal.agent.nearby import binds
from shoal.agent.notes import note
from shoal.agent.numbers import own_gpus
from shoal.agent.process import Ended
from shoal.agent.processes import CANNOT_START_CODE, KILLED_CODE, MARK, Processes
from shoal.agent.shipping import Shipping, append, last_words, parting_words
from shoal.agent.sleeping.naps import Naps
from shoal.agent.stacks import stacks
from shoal.agent.supplies import Supplies
from shoal.agent.surroundings import Surroundings
from shoal.core.nodebook import STOPPED_BEFORE_START_CODE, NodeBook
from shoal.machine.cgroups import Ceiling, Cgroups, Used
from shoal.machine.exits import FROM_OUTSIDE, MEMBERS, Exits, member_ref
from shoal.machine.paths import MOUNTS
from shoal.machine.spares import Spares
from shoal.model.commands import Launch, Prepare, Stop
from shoal.model.job import Fault, MemberRef
from shoal.model.progress import BEATS_ENV, Beat
from shoal.model.report import MemberExit

log = logging.getLogger("shoal.agent")

ENDING_S = 1.0  # so long after a member was signaled, its agent knows whether the node ends
SIGNALS_FROM = 128  # higher codes mean a signal, which the last line of output does not explain


class Members:
    """`changed` is called when the book has something new to report."""

    def __init__(
        self,
        directory: Path,
        book: NodeBook,
        supplies: Supplies,
        shipping: Shipping,
        keeping: Keeping,
        changed: Callable[[], None],
    ) -> None:
        self._directory = directory / MEMBERS
        self._directory.mkdir(exist_ok=True)
        self._folder = str(self._directory)
        self._exits = Exits(self._directory)
        self._book = book
        self._supplies = supplies
        self._shipping = shipping
        self._keeping = keeping
        self._changed = changed
        groups = Cgroups.open(directory, book.spec.cpu_milli, binds=binds(book.spec.tree))
        self.processes = Processes(directory, groups, own_gpus(book.spec))
        folders = {SCRATCH_FOLDER: (), TMP_FOLDER: self.processes.apart.inside_tmp}
        self._spares = Spares(directory / "spare-members", 0o755, ("output",), folders)
        self._surroundings = Surroundings(directory, supplies, keeping, self.processes.apart)
        self.beats = Beats(changed)
        self.idle = IdleWatch(self.processes, self.beats, shipping.silent)
        self.memory = MemoryWatch()
        self.doors = Doors(self.processes, book, self._robbed)
        self._members: dict[MemberRef, Member] = {}
        self._preparing_jobs: dict[str, asyncio.Task[None]] = {}  # jobs that may come here
        self.left: list[Callable[[MemberRef], None]] = []  # called when a member has ended
        watches = self.beats, self.idle
        self.naps = Naps(self.processes, book, self._members, *watches, changed)
        self.left += [self.naps.ended, self.doors.forget, MOUNTS.leave]
        self._closing = False
        self._reaped = asyncio.Event()

    # -- the beginning ---------------------------------------------------------------------

    def launch(self, command: Launch) -> None:
        """Ends in a process, in a member that is being prepared, or in an exit that says why."""
        member = self._members[command.ref] = Member(command.ref)
        directory = f"{self._folder}/{command.ref}"
        try:
            member.user = self.processes.own_user(command)
            self._spares.make(directory, member.user)
            must_have_room(directory)
            self._shipping.watch(command.ref, f"{directory}/output", fresh=True)
            ready = self._supplies.here(command)
        except Exception as error:
            self._cannot_start(member, error)
            return
        if ready is not None:
            self._begin(member, ready, directory)
            return
        self._book.gets(command.ref, self._supplies.lacks(command))
        try:
            self.doors.hold(command)
        except Exception as error:
            self._cannot_start(member, error)
            return
        member.become(State.PREPARING)
        member.task = asyncio.create_task(self._prepare_member(member, command, directory))

    async def _prepare_member(self, member: Member, command: Launch, directory: str) -> None:
        """It is not alive before it has everything it needs."""
        ref = member.ref
        try:
            ready = await self._supplies.get(
                command, Path(directory, "output"), lambda what: self._book.gets(ref, what)
            )
        except Exception as error:
            self._cannot_start(member, error)
            return
        self._book.begins(ref)
        self._begin(member, ready, directory)
        self._changed()

    def _begin(self, member: Member, command: Launch, directory: str) -> None:
        try:
            found = self._surroundings.of(command, directory, {BEATS_ENV: self.beats.name})
            self.doors.release(command)
            self.processes.start(command, directory, found)
            self._supplies.secrets.started(command, self.processes.pid(member.ref))
        except Exception as error:
            self._cannot_start(member, error)
            return
        member.become(State.RUNNING)
        self.beats.expect(member.ref, self.processes.user(command))
        self.idle.expect(command)
        self.idle.starts(command.ref)
        self.doors.expect(command)
        self._supplies.shares.expect(command)
        if MOUNTS:
            MOUNTS.use(member.ref, paths_of(command))

    def _cannot_start(self, member: Member, error: Exception) -> None:
        if not isinstance(error, CannotStart | OSError):
            log.error("%s cannot start", member.ref, exc_info=error)
        why = str(error) if isinstance(error, CannotStart) else f"cannot start: {error}"
        fault = fault_of(error)
        if fault is Fault.HANGS and not self._book.alive[member.ref].limits.ports:
            fault = Fault.START  # an older head knows no other
        if not fault and (problem := disk_problem(self._directory)):
            why, fault = f"{why}; this node's disk: {problem}", Fault.START
        self._book.gets(member.ref, "could not start it")  # it was never alive
        self._ended(member, CANNOT_START_CODE, why, fault=fault)
        self._shipping.pump([member.ref])
        self.settle(member.ref)

    def prepare(self, command: Prepare) -> None:
        """Fetch what a member would need before it comes."""
        ready = self._supplies.here(command)
        if ready is not None:
            self.processes.prepare(ready)
        elif command.job not in self._preparing_jobs:
            self._preparing_jobs[command.job] = asyncio.create_task(self._prepare_job(command))

    async def _prepare_job(self, command: Prepare) -> None:
        try:
            self.processes.prepare(await self._supplies.get(command, Path(os.devnull), log.debug))
        except (CannotStart, OSError) as error:
            log.warning("cannot prepare for %s: %s", command.job, error)
        finally:
            del self._preparing_jobs[command.job]

    # -- the end ---------------------------------------------------------------------------

    def stop(self, command: Stop) -> None:
        member = self._members.get(command.ref)
        if member is None:
            self.audit()
        elif member.state is State.PREPARING:
            if member.task is not None:
                member.task.cancel()
            self._ended(member, STOPPED_BEFORE_START_CODE, "stopped before it started")
            self.settle()
        elif member.state is State.RUNNING:
            pid = self.processes.leader(command.ref)
            if pid is None:
                self.audit()
            elif command.dump:
                member.become(State.DUMPING)
                member.task = asyncio.create_task(self._dump_and_stop(member, command, pid))
            else:
                self._terminate(member, command)
        elif member.state in NAPPING:
            self._terminate(member, command, obeys=self.naps.stop(member))
        elif member.state in (State.DUMPING, State.STOPPING) and not command.grace_ms:
            self._kill(member)  # its lease ends before its grace time does

    async def _dump_and_stop(self, member: Member, command: Stop, pid: int) -> None:
        """Save what it is doing while it still does it. That takes bounded time."""
        ref = member.ref
        try:
            text, why = await asyncio.to_thread(stacks, pid, {MARK: str(ref)})
            if member.state is State.DUMPING:
                member.why = why
                said = f"\n--- stopped by Shoal ({command.why}); its stacks:\n{text}\n---\n"
                append(self._directory / str(ref) / "output", said.encode())
        except OSError as error:
            log.warning("the stacks of %s could not be saved: %s", ref, error)
        finally:
            if member.state is State.DUMPING:
                self._terminate(member, command)

    def _terminate(self, member: Member, command: Stop, *, obeys: bool = True) -> None:
        """SIGTERM first. The agent keeps the grace time itself and needs no controller for it."""
        member.become(State.STOPPING)
        grace = command.grace_ms / 1000 * obeys
        if self.naps.restored(member.ref) and self.naps.deaf(member.ref):
            member.task = asyncio.create_task(self._leave_gpus(member, self._ask, member, grace))
        else:
            self._ask(member, grace)

    def _ask(self, member: Member, seconds: float) -> None:
        self.processes.signal(member.ref, signal.SIGTERM)
        self.processes.signal(member.ref, signal.SIGCONT)  # a stopped process takes no signal
        member.kill = asyncio.get_running_loop().call_later(seconds, self._kill, member)

    def _kill(self, member: Member) -> None:
        if self.naps.restored(member.ref):
            number = signal.SIGKILL
            kill = self._leave_gpus(member, self.processes.signal, member.ref, number)
            member.task = asyncio.create_task(kill)
        else:
            self.processes.signal(member.ref, signal.SIGKILL)

    async def _leave_gpus(self, member: Member, then: Callable[..., None], *args: Any) -> None:
        await self.naps.leave(member.ref)
        if member.state in LIVING:
            then(*args)

    def overused(self, ref: MemberRef, why: str, *, end: bool) -> None:
        """It uses more than it asked for, and others pay for that: end it, or only say so."""
        member = self._members.get(ref)
        if member is not None and member.state is State.RUNNING:
            said = f"\nshoal: {why}{'' if end else '; this is only a warning'}\n"
            with contextlib.suppress(OSError):
                append(self._directory / str(ref) / "output", said.encode())
            if end:
                member.why = why
                self._kill(member)

    def _robbed(self, ref: MemberRef, why: str) -> None:
        """Whoever has its port would answer in its place. It ends, and its next attempt gets
        another."""
        member = self._members.get(ref)
        if member is not None and member.state in (State.RUNNING, *NAPPING):
            log.warning("%s: %s", ref, why)
            member.why = why
            member.fault = Fault.TAKEN if self._book.alive[ref].limits.ports else Fault.NONE
            self._kill(member)

    def audit(self) -> None:
        """Every member that the book calls alive has a process, or is on its way to one or to its
        exit. A member that has neither would hold its GPUs forever, so it ends here."""
        for ref in list(self._book.alive):
            member = self._members.setdefault(ref, Member(ref))
            lost = member.state in LIVING
            if member.state is State.LAUNCHED or (lost and self.processes.pid(ref) is None):
                log.error("%s has no process that this agent knows", ref)
                self._ended(member, CANNOT_START_CODE, "the agent lost track of its process")
        self.settle()

    def reap(self) -> None:
        ended = self.processes.reap()
        if self._closing:  # they end because the agent does, and that is not a result
            self._reaped.set()
            return
        if ended:
            self.beats.take()  # their last beats
        starved = any(one.code == KILLED_CODE for one in ended) and self.memory.killed()
        for one in ended:
            ref, code = one.ref, one.code
            member = self._members[ref]
            beat = self.beats.newest(ref)
            self.beats.forget(ref)
            self._supplies.shares.forget(ref)
            member.alone = one.alone
            self._surroundings.remove_empty_checkpoints(self._book.alive.get(ref), alone=one.alone)
            try:
                why, fault = self._cause(member, one, starved)
            except Exception:  # the code counts more than the reason
                log.exception("nothing is known about why %s ended", ref)
                why, fault = "", Fault.NONE
            self._ended(member, code, why, beat, fault)
        self._reaped.set()
        if ended:  # they end one by one: to look at all of them each time would be quadratic
            self._shipping.pump([one.ref for one in ended])

    def _cause(self, member: Member, ended: Ended, starved: bool) -> tuple[str, Fault]:
        """Why it ended, and whether that is the node's fault. A member that was told to stop needs
        no reason but what it was doing."""
        if member.why or member.ref in self._book.stopping:
            return member.why, member.fault
        code, output = ended.code, f"{self._folder}/{member.ref}/output"
        why = refusal(ended.used, ended.ceiling) if code else ""
        if why:
            append(output, f"\n[shoal: {why}]\n".encode())
            return why, Fault.NONE
        if not ended.started:
            launch = self._book.alive[member.ref]
            self._supplies.images.forget(launch.image)  # it may be gone from this node
            return not_started(last_words(output), launch.argv[0])
        if code == 0:
            if self._shipping.silent(member.ref):
                return "", Fault.NONE
            return parting_words(output, self._supplies.secrets.mask(member.ref)), Fault.NONE
        if 0 < code < SIGNALS_FROM:
            why = last_words(output, self._supplies.secrets.mask(member.ref))
            if robbed := self.doors.robbed(self._book.alive[member.ref], why):
                return f"{why}; {robbed}" if why else robbed, Fault.TAKEN
        elif code == KILLED_CODE and starved:
            why = OUT_OF_MEMORY
        if code and (problem := disk_problem(self._directory)):
            if fills_disk(self._directory / str(member.ref)):
                return f"{why + '; ' if why else ''}it filled this node's disk", Fault.NONE
            return f"{why + '; ' if why else ''}this node's disk: {problem}", Fault.SICK
        return why, Fault.NONE

    def _ended(
        self,
        member: Member,
        code: int,
        why: str,
        beat: Beat | None = None,
        fault: Fault = Fault.NONE,
    ) -> None:
        note(f"{member.ref} ended with code {code}")
        stopped = member.ref in self._book.stopping
        why = self._supplies.secrets.ended(member.ref, why)
        exit_ = member.end(code, why, beat, fault, stopped=stopped)
        self._book.ends(member.ref)
        for act in self.left:
            act(member.ref)
        self._keeping.ended(member.ref, alone=member.alone)
        if code not in FROM_OUTSIDE:
            member.unwritten = True
            self._exits.keep(exit_, lambda: self._written(member))

    def _written(self, member: Member) -> None:
        member.unwritten = False
        self.settle(member.ref)

    def settle(self, only: MemberRef | None = None) -> None:
        """Report the exits of members whose output has arrived, or took too long: then the rest
        of the output comes after the exit. `only`: the news concerns no other member; to look at
        all of them each time would be quadratic in a gang."""
        some = self._members.values() if only is None else [self._members.get(only)]
        for member in [member for member in some if member is not None]:
            if member.state is State.ENDED and not member.unwritten:
                self._report_exit(member)
            elif member.state is State.LEFTOVER and self._arrived(member.ref):
                self._forget(member.ref)

    def _arrived(self, ref: MemberRef) -> bool:
        """All that the member wrote: output, and files in its kept folders."""
        return self._shipping.complete(ref) and self._keeping.complete(ref)

    def _report_exit(self, member: Member) -> None:
        ref, exit_ = member.ref, member.exit
        late = self._shipping.waited(member.ended_at)
        if exit_ is None or self._goes_with_the_node(member, exit_):
            return
        if self._keeping.waits(exit_, member.ended_at):
            return
        if late or self._shipping.complete(ref):
            member.become(State.REPORTED)
            self._book.exited(
                ref,
                exit_.code,
                exit_.why,
                exit_.step,
                exit_.fault,
                exit_.spent,
                exit_.saved_step,
            )
            self._changed()

    def _goes_with_the_node(self, member: Member, exit_: MemberExit) -> bool:
        """An engine that ends a machine of ours signals all its processes at once, and a member may
        be gone before the agent knows. For a moment, its exit says nothing about the job."""
        if not self._book.spec.order or exit_.stopped or exit_.code not in FROM_OUTSIDE:
            return False
        return self._closing or time.monotonic() - member.ended_at < ENDING_S

    def acknowledged(self, ref: MemberRef) -> None:
        """Its exit is stored. If its output is not, the member stays until it is."""
        member = self._members.get(ref)
        if member is not None and member.state not in (State.REPORTED, State.LEFTOVER):
            return  # a late acknowledgement cannot concern a member that has not ended
        self._exits.stored(ref)
        if self._arrived(ref):
            self._forget(ref)
        elif member is not None and member.state is State.REPORTED:
            member.become(State.LEFTOVER)

    def _forget(self, ref: MemberRef) -> None:
        if ref in self._book.exits:  # an exit of an earlier life that is not acknowledged yet
            return
        member = self._members.pop(ref, None)
        self._shipping.forget(ref)
        self._keeping.forget(ref)
        self._supplies.secrets.forget(ref)
        folder = f"{self._folder}/{ref}"
        if member is None or not member.alone or not self._spares.take(folder, member.user):
            remove_folder(folder)

    # -- this life of the node, and the one before -----------------------------------------

    def clear_up(self) -> None:
        """An earlier life of this node may have left processes, and output it could not ship."""
        killed = self.processes.kill_leftovers()
        self.processes.containers.clear()
        if killed:
            log.warning("killed %d processes that an earlier life had left", killed)
        for directory in sorted(self._directory.iterdir()):
            ref = member_ref(directory.name)
            if ref is None:
                continue  # not ours
            try:
                self._shipping.watch(ref, directory / "output", fresh=False)
                self._supplies.secrets.recall(ref)
                self._keeping.recall(ref)
            except OSError as error:  # an unreadable file must not keep the node away
                log.warning("the output of %s is left where it is: %s", ref, error)
                continue
            self._members[ref] = Member(ref, State.LEFTOVER)
        self._keeping.sweep({ref.job for ref in self._members})

    async def end(self) -> None:
        """Members get a moment to end well; the keeper ends what is left."""
        self._closing = True
        self.processes.warm.close()
        preparing = [m.task for m in self._members.values() if m.state is State.PREPARING]
        for task in (*preparing, *self._preparing_jobs.values()):
            if task is not None:
                task.cancel()
        for ref in list(self._book.alive):
            self.processes.signal(ref, signal.SIGTERM)
            self.naps.close(ref)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s(self._book.alive.values())):
                while self.processes:
                    self._reaped.clear()
                    await self._reaped.wait()
        await self.processes.containers.close()
        self._supplies.secrets.close()
        self._supplies.shares.daemons.close()
        self.processes.groups.close()
        self._exits.close()


def remove_folder(folder: str) -> None:
    """Of a member. Mostly only its output is in it, and the empty folders that tenants get."""
    for inner in ("output", SCRATCH_FOLDER, TMP_FOLDER):
        with contextlib.suppress(OSError):
            (os.unlink if inner == "output" else os.rmdir)(f"{folder}/{inner}")
    try:
        os.rmdir(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


# Did a member end because it, or this machine, ran out of memory or processes?


RECENT_S = 5.0
OUT_OF_MEMORY = "killed, and the kernel ran out of memory at that moment"


def refusal(used: Used, ceiling: Ceiling) -> str:
    """What the kernel refused the member, in words; empty if nothing."""
    if used.killed and used.filled and ceiling.memory_mb:
        return f"it used more than its {ceiling.memory_mb} MB of memory and was ended (memory)"
    if used.killed:
        return OUT_OF_MEMORY
    if used.refused:
        return f"it wanted more than its {ceiling.processes} processes and threads (processes)"
    return ""


class MemoryWatch:
    """The kernel counts its kills without naming the victims. A member that was killed at the same
    time was probably one of them."""

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._count = self._kills()
        self._seen = float("-inf")

    def look(self) -> None:
        """Called about once a second, so that an old kill does not explain a new death."""
        before, self._count = self._count, self._kills()
        if self._count > before:
            self._seen = time.monotonic()

    def killed(self) -> bool:
        """Has the kernel killed a process a moment ago?"""
        self.look()
        return time.monotonic() - self._seen < RECENT_S

    def _kills(self) -> int:
        try:
            for line in self._vmstat.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            pass
        return 0
