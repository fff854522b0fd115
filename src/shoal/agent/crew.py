"""The members of a node from their order to their end: brought, begun, stopped, reaped, settled."""

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

from shoal.agent.beats import Beats
from shoal.agent.faults import CannotStart, ailment, fault_of, must_have_room
from shoal.agent.idling import Idling
from shoal.agent.members import CANNOT_START_CODE, MARK, Members
from shoal.agent.memory import OUT_OF_MEMORY, MemoryWatch
from shoal.agent.shipping import Shipping, last_words
from shoal.agent.stacks import stacks
from shoal.agent.supplies import Supplies
from shoal.core.nodebook import STOPPED_BEFORE_START_CODE, NodeBook
from shoal.exits import FROM_OUTSIDE, MEMBERS, member_ref, remove_exit, write_exit
from shoal.model.commands import Launch, Prepare, Stop
from shoal.model.job import Fault, MemberRef
from shoal.model.progress import BEATS_ENV
from shoal.model.report import MemberExit
from shoal.wire import CHECKPOINT_ROOT

log = logging.getLogger("shoal.agent")

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"
SCRATCH = "SHOAL_SCRATCH"  # a packed job may not write where it runs; this goes with the member

# On `shoal down` members get this long after SIGTERM, whatever they asked for.
SHUTDOWN_GRACE_S = 5.0
WRITE_S_MAX = 5.0  # a disk that takes longer does not hold an exit up
KILLED_CODE = 128 + signal.SIGKILL
SIGNALS_FROM = 128  # codes above it mean a signal; what was said before does not explain that


class Crew:
    """`changed` is called when the book has something new to report."""

    def __init__(
        self,
        directory: Path,
        book: NodeBook,
        supplies: Supplies,
        shipping: Shipping,
        changed: Callable[[], None],
    ) -> None:
        self._directory = directory / MEMBERS
        self._directory.mkdir(exist_ok=True)
        self._book = book
        self._supplies = supplies
        self._shipping = shipping
        self._changed = changed
        self.members = Members(directory)
        self.beats = Beats(changed)
        self.idling = Idling(self.members, self.beats)
        self.memory = MemoryWatch()
        self._checkpoints = os.environ.get(CHECKPOINT_ROOT) or str(directory / "checkpoints")
        self._outfits: dict[MemberRef, asyncio.Task[None]] = {}  # of those that cannot start yet
        self._readying: dict[str, asyncio.Task[None]] = {}  # jobs that may come here
        # Over, but output still to ship: code, reason, the step it was in, whose fault; since when.
        self._ended: dict[MemberRef, tuple[int, str, int | None, Fault]] = {}
        self._ended_at: dict[MemberRef, float] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._unwritten: dict[MemberRef, None] = {}  # their exits are on the way to the disk
        self._closing = False
        self._leftovers: dict[MemberRef, None] = {}  # output of a life before this one
        self._kills: dict[MemberRef, asyncio.TimerHandle] = {}
        self._dumps: dict[MemberRef, asyncio.Task[None]] = {}
        self._whys: dict[MemberRef, str] = {}  # what members were doing when they were stopped
        self._reaped = asyncio.Event()

    def launch(self, order: Launch) -> None:
        """Ends in a process, in one that is being got ready, or in an exit that says why not."""
        ref, directory = order.ref, self._directory / str(order.ref)
        try:
            directory.mkdir(exist_ok=True)
            must_have_room(directory)
            self._shipping.watch(ref, directory / "output", fresh=True)
            ready = self._supplies.here(order)
            if ready is None:
                self._book.gets(ref, self._supplies.lacks(order))
                self._outfits[ref] = asyncio.create_task(self._outfit(order, directory))
                return
        except Exception as error:
            self._cannot_start(ref, error)
            return
        self._begin(ready, directory)

    async def _outfit(self, order: Launch, directory: Path) -> None:
        """It is not alive before it has all that it needs."""
        ref = order.ref
        try:
            ready = await self._supplies.get(
                order, directory / "output", lambda what: self._book.gets(ref, what)
            )
        except Exception as error:
            self._cannot_start(ref, error)
            return
        finally:
            self._outfits.pop(ref, None)
        self._book.begins(ref)
        self._begin(ready, directory)
        self._changed()

    def _begin(self, order: Launch, directory: Path) -> None:
        try:
            extra = {BEATS_ENV: self.beats.name, **self._checkpoint_dir(order)}
            if order.package:
                extra[SCRATCH] = str(directory)
            self.members.start(order, directory, extra)
        except Exception as error:
            self._cannot_start(order.ref, error)
            return
        self.beats.expect(order.ref)
        self.idling.expect(order)

    def _cannot_start(self, ref: MemberRef, error: Exception) -> None:
        if not isinstance(error, CannotStart | OSError):
            log.error("%s cannot start", ref, exc_info=error)
        why = str(error) if isinstance(error, CannotStart) else f"cannot start: {error}"
        fault = fault_of(error)
        if not fault and (ails := ailment(self._directory)):
            why, fault = f"{why}; this node's disk: {ails}", Fault.START
        self._book.gets(ref, "could not start it")  # until that is told it was never alive
        self._is_over(ref, CANNOT_START_CODE, why, fault=fault)
        self._shipping.pump([ref])
        self.settle(ref)

    def audit(self) -> None:
        """Whoever the book calls alive has a process, or is on the way to one or to its exit. One
        that is neither would hold its GPUs for ever, so it ends here."""
        for ref in list(self._book.alive):
            known = ref in self._outfits or ref in self._ended or self.members.pid(ref) is not None
            if not known:
                log.error("%s has no process that anybody knows of", ref)
                self._is_over(ref, CANNOT_START_CODE, "its process was lost track of")
        self.settle()

    def prepare(self, order: Prepare) -> None:
        """What a member would need is brought before it comes."""
        ready = self._supplies.here(order)
        if ready is not None:
            self.members.prepare(ready)
        elif order.job not in self._readying:
            self._readying[order.job] = asyncio.create_task(self._ready(order))

    async def _ready(self, order: Prepare) -> None:
        try:
            self.members.prepare(await self._supplies.get(order, Path(os.devnull), log.debug))
        except (CannotStart, OSError) as error:
            log.warning("cannot get ready for %s: %s", order.job, error)
        finally:
            del self._readying[order.job]

    def _checkpoint_dir(self, order: Launch) -> dict[str, str]:
        """A place of the job's own that outlives its attempts. It may be no directory but an
        address (s3://...), where nothing need be made."""
        if order.env.get(CHECKPOINT_DIR):
            return {}
        path = f"{self._checkpoints.rstrip('/')}/{order.ref.job}"
        if "://" not in path:
            try:
                os.makedirs(path, mode=0o700, exist_ok=True)
            except OSError as error:
                raise CannotStart(
                    f"cannot make the checkpoint directory {path}: {error.strerror}; "
                    f"set {CHECKPOINT_DIR} in the job's env to a directory it may write to"
                ) from None
        return {CHECKPOINT_DIR: path}

    def _tidy_checkpoints(self, ref: MemberRef) -> None:
        """Most jobs save nothing. An empty directory goes, if no other member may be about to
        write to it."""
        order = self._book.alive.get(ref)
        if order is not None and order.env.get("SHOAL_MEMBERS") == "1":
            with contextlib.suppress(OSError):
                os.rmdir(f"{self._checkpoints.rstrip('/')}/{ref.job}")

    def stop(self, order: Stop) -> None:
        if order.ref in self._kills or order.ref in self._ended or order.ref in self._dumps:
            return
        outfit = self._outfits.pop(order.ref, None)
        if outfit is not None:
            outfit.cancel()
            self._is_over(order.ref, STOPPED_BEFORE_START_CODE, "stopped before it started")
            self.settle()
            return
        pid = self.members.pid(order.ref)
        if pid is None:
            self.audit()
            return
        if order.dump:
            self._dumps[order.ref] = asyncio.create_task(self._dump_and_stop(order, pid))
        else:
            self._end(order)

    async def _dump_and_stop(self, order: Stop, pid: int) -> None:
        """First look what it does, as long as it still does it. That takes bounded time."""
        ref = order.ref
        try:
            text, why = await asyncio.to_thread(stacks, pid, {MARK: str(ref)})
            if self.members.pid(ref) == pid:
                self._whys[ref] = why
                said = f"\n--- stopped by Shoal ({order.why}); its stacks:\n{text}\n---\n"
                _append(self._directory / str(ref) / "output", said.encode())
        except OSError as error:
            log.warning("the stacks of %s could not be saved: %s", ref, error)
        finally:
            del self._dumps[ref]
            self._end(order)

    def _end(self, order: Stop) -> None:
        """Gently first. The agent keeps the time itself, so it needs no controller for the rest."""
        if self.members.pid(order.ref) is None:
            return
        self.members.signal(order.ref, signal.SIGTERM)
        self.members.signal(order.ref, signal.SIGCONT)  # a stopped process takes no signal
        self._kills[order.ref] = asyncio.get_running_loop().call_later(
            order.grace_ms / 1000, self.members.signal, order.ref, signal.SIGKILL
        )

    def reap(self) -> None:
        ended = self.members.reap()
        if self._closing:  # they end because we do, and that is no result
            self._reaped.set()
            return
        for ref, code in ended:
            self._ended[ref] = (code, "", None, Fault.NONE)  # whatever goes wrong below
        self.beats.take()  # what the dead said last
        starved = any(code == KILLED_CODE for _, code in ended) and self.memory.killed()
        for ref, code in ended:
            timer = self._kills.pop(ref, None)
            if timer is not None:
                timer.cancel()
            step = self.beats.step(ref)
            self.beats.forget(ref)
            self._tidy_checkpoints(ref)
            why = self._whys.pop(ref, "")
            if not why and 0 < code < SIGNALS_FROM and ref not in self._book.stopping:
                why = last_words(self._directory / str(ref) / "output")
            if not why and starved and code == KILLED_CODE and ref not in self._book.stopping:
                why = OUT_OF_MEMORY
            fault = Fault.NONE
            if code and ref not in self._book.stopping and (ails := ailment(self._directory)):
                why, fault = f"{why + '; ' if why else ''}this node's disk: {ails}", Fault.SICK
            self._is_over(ref, code, why, step, fault)
        self._reaped.set()
        if ended:  # they end one by one: to look at everybody each time would be quadratic, too
            self._shipping.pump([ref for ref, _ in ended])

    def _is_over(
        self,
        ref: MemberRef,
        code: int,
        why: str,
        step: int | None = None,
        fault: Fault = Fault.NONE,
    ) -> None:
        self._ended[ref] = (code, why, step, fault)
        self._ended_at[ref] = time.monotonic()
        self._book.ends(ref)
        if code not in FROM_OUTSIDE:
            exit_ = MemberExit(ref, code, why, ref in self._book.stopping, step, fault)
            self._unwritten[ref] = None
            task = asyncio.create_task(self._write(exit_))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, exit_: MemberExit) -> None:
        """To the disk before it is told, unless the disk is sick: then we have to remember it."""
        try:
            writing = asyncio.to_thread(write_exit, self._directory, exit_)
            await asyncio.wait_for(writing, WRITE_S_MAX)
        except OSError as error:  # a timeout, too
            why = str(error) or "the disk is too slow"
            log.warning("the exit of %s is only in memory: %s", exit_.ref, why)
        finally:
            self._unwritten.pop(exit_.ref, None)
        self.settle(exit_.ref)

    def settle(self, only: MemberRef | None = None) -> None:
        """A member has ended for the controller when all its output is there too, unless that
        takes too long: then the rest of the output comes after the exit. `only`: what is new
        concerns nobody else; to look at everybody each time would be quadratic in a gang."""
        refs = [*self._ended, *self._leftovers] if only is None else [only]
        for ref in [ref for ref in refs if ref in self._ended and ref not in self._unwritten]:
            since = self._ended_at.get(ref, 0.0)
            if self._shipping.complete(ref) or self._shipping.waited(since):
                self._ended_at.pop(ref, None)
                self._book.exited(ref, *self._ended.pop(ref))
                self._changed()
        leftovers = [ref for ref in refs if ref in self._leftovers]
        for ref in [ref for ref in leftovers if self._shipping.complete(ref)]:
            del self._leftovers[ref]
            if ref not in self._book.exits:  # else that is still to be acknowledged
                self.forget(ref)

    def forget(self, ref: MemberRef) -> None:
        """Its exit is stored. If its output is not, it stays until it is."""
        remove_exit(self._directory, ref)
        if not self._shipping.complete(ref):
            self._leftovers[ref] = None
            return
        self._shipping.forget(ref)
        shutil.rmtree(self._directory / str(ref), ignore_errors=True)

    def clear_up(self) -> None:
        """An earlier life of this node may have left processes, and output it could not ship."""
        killed = self.members.kill_leftovers()
        if killed:
            log.warning("killed %d processes that an earlier life had left", killed)
        for directory in sorted(self._directory.iterdir()):
            ref = member_ref(directory.name)
            if ref is None:
                continue  # not ours
            try:
                self._shipping.watch(ref, directory / "output", fresh=False)
            except OSError as error:  # one that cannot be read must not keep the node away
                log.warning("the output of %s is left where it is: %s", ref, error)
                continue
            self._leftovers[ref] = None

    async def end(self) -> None:
        """They get a moment to end well; what is left falls to the keeper."""
        self._closing = True
        self.members.nursery.close()
        for task in (*self._outfits.values(), *self._readying.values()):
            task.cancel()
        for ref in list(self._book.alive):
            self.members.signal(ref, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while self.members:
                    self._reaped.clear()
                    await self._reaped.wait()


def _append(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
