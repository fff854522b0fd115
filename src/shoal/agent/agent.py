"""The agent of one node: takes orders from whichever controller is there, and outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec

from shoal.agent.beats import Beats
from shoal.agent.checks import Checks
from shoal.agent.idling import Idling
from shoal.agent.members import CANNOT_START_CODE, MARK, CannotStart, Members
from shoal.agent.memory import OUT_OF_MEMORY, MemoryWatch
from shoal.agent.sampling import Sampler
from shoal.agent.shipping import Shipping, last_words
from shoal.agent.stacks import stacks
from shoal.agent.supplies import Supplies
from shoal.core.nodebook import STOPPED_BEFORE_START_CODE, NodeBook
from shoal.files import write_private
from shoal.kernel import reap_orphans
from shoal.model.commands import Acknowledge, Check, Dismiss, Envelope, Launch, Prepare, Stop
from shoal.model.health import CheckResult
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import BEATS_ENV
from shoal.model.report import LogChunk
from shoal.wire import (
    CHECKPOINT_ROOT,
    Ask,
    FromAgent,
    Heard,
    Kept,
    Link,
    Log,
    Need,
    Orders,
    Piece,
    ToAgent,
    short_path,
)

log = logging.getLogger("shoal.agent")

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"
SCRATCH = "SHOAL_SCRATCH"  # a packed job may not write where it runs; this goes with the member

CONTACT = "contact"  # written when a controller has spoken to this agent
LEAVING = "leaving"  # its being there means that the node wants to leave

HEARTBEAT_S = 1.0
OUTPUT_POLL_S = 0.1
# On `shoal down` members get this long after SIGTERM, whatever they asked for.
SHUTDOWN_GRACE_S = 5.0
# A controller that does not read must not make the agent's memory grow.
BACKLOG_BYTES_MAX = 16 * 1024 * 1024
KILLED_CODE = 128 + signal.SIGKILL
SIGNALS_FROM = 128  # codes above it mean a signal; what was said before does not explain that


class AgentInfo(msgspec.Struct, frozen=True):
    """Written to `agent.json` when the agent listens."""

    pid: int
    keeper: int
    incarnation: int


class Agent:
    def __init__(self, directory: Path, spec: NodeSpec, incarnation: int) -> None:
        self._directory = directory
        self._members_dir = directory / "members"
        self._members_dir.mkdir(exist_ok=True)
        self._book = NodeBook(spec, incarnation)
        self._members = Members(directory)
        self._checks = Checks(directory, spec, self._measured)
        self._supplies = Supplies(directory, self._book, self._need)
        self._members.helpers = (self._checks, self._supplies.environments)
        self._outfits: dict[MemberRef, asyncio.Task[None]] = {}  # of those that cannot start yet
        self._readying: dict[str, asyncio.Task[None]] = {}  # jobs that may come here
        self._shipping = Shipping(self._send_log)
        self._beats = Beats(self._report_soon)
        self._sampler = Sampler(spec.gpus)
        self._idling = Idling(self._members, self._beats)
        self._memory = MemoryWatch()
        self._checkpoints = os.environ.get(CHECKPOINT_ROOT) or str(directory / "checkpoints")
        self._link: Link | None = None
        self._met = False  # its other end has spoken
        # Over, but output still to ship: code, reason, the step it was in.
        self._ended: dict[MemberRef, tuple[int, str, int | None]] = {}
        self._leftovers: dict[MemberRef, None] = {}  # output of a life before this one
        self._kills: dict[MemberRef, asyncio.TimerHandle] = {}
        self._dumps: dict[MemberRef, asyncio.Task[None]] = {}
        self._whys: dict[MemberRef, str] = {}  # what members were doing when they were stopped
        self._report_due = False
        self._reaped = asyncio.Event()
        self.stopping = asyncio.Event()

    # -- the controller --------------------------------------------------------------------

    def connect(self) -> Link:
        """For each connection; the newest controller is the one that counts."""
        return Link(ToAgent, self._opened, self._received, self._closed)

    def _opened(self, link: Link) -> None:
        if self._link is not None:
            self._link.close()
        self._link = link
        self._met = False
        self._shipping.reconnected()
        self._supplies.packages.ask_again(all_of_them=True)
        self._report()

    def _closed(self, link: Link) -> None:
        if self._link is link:
            self._link = None

    def _received(self, message: FromAgent | ToAgent) -> None:
        if not self._met:  # `shoal join` waits for a sign that a controller answers
            self._met = True
            write_private(self._directory / CONTACT, str(time.time_ns()).encode())
        match message:
            case Orders(envelope):
                self._obey(envelope)
            case Kept(ref, size):
                self._shipping.kept(ref, size)
                self._settle()
            case Ask():
                self._report()
            case Piece(piece):
                self._supplies.packages.take(piece)

    def _obey(self, envelope: Envelope) -> None:
        for order in self._book.take(envelope):
            match order:
                case Launch():
                    self._launch(order)
                case Stop():
                    self._stop(order)
                case Check():
                    self._checks.ask(order, busy=bool(self._book.alive))
                case Prepare():
                    self._prepare(order)
                case Dismiss():
                    self.stopping.set()
        for command in envelope.commands:
            if isinstance(command, Acknowledge) and command.ref not in self._book.exits:
                self._forget(command.ref)
        self._report_soon()

    def _report_soon(self) -> None:
        """Several changes of one moment make one report."""
        if not self._report_due:
            self._report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._report_due = False
        if self._link is not None and self._link.backlog_bytes < BACKLOG_BYTES_MAX:
            sample, said = self._sampler.take(), self._beats.progress()
            self._link.send(Heard(self._book.report(said, sample, self._idling.idle(sample))))

    def _measured(self, result: CheckResult) -> None:
        self._book.measured(result)
        self._report_soon()

    def _need(self, package: str, offset: int) -> None:
        if self._link is not None:
            self._link.send(Need(package, offset))

    def _send_log(self, chunk: LogChunk) -> None:
        if self._link is not None:
            self._link.send(Log(chunk))

    # -- members ---------------------------------------------------------------------------

    def _launch(self, order: Launch) -> None:
        ref, directory = order.ref, self._members_dir / str(order.ref)
        try:
            directory.mkdir(exist_ok=True)
            self._shipping.watch(ref, directory / "output", fresh=True)
            ready = self._supplies.here(order)
            if ready is None:
                self._book.gets(ref, self._supplies.lacks(order))
                self._outfits[ref] = asyncio.create_task(self._outfit(order, directory))
                return
        except OSError as error:
            self._cannot_start(ref, f"cannot start: {error}")
            return
        self._begin(ready, directory)

    async def _outfit(self, order: Launch, directory: Path) -> None:
        """It is not alive before it has all that it needs."""
        ref = order.ref
        try:
            ready = await self._supplies.get(
                order, directory / "output", lambda what: self._book.gets(ref, what)
            )
        except (CannotStart, OSError) as error:
            self._cannot_start(ref, str(error))
            return
        finally:
            self._outfits.pop(ref, None)
        self._book.begins(ref)
        self._begin(ready, directory)
        self._report_soon()

    def _begin(self, order: Launch, directory: Path) -> None:
        try:
            extra = {BEATS_ENV: self._beats.name, **self._checkpoint_dir(order)}
            if order.package:
                extra[SCRATCH] = str(directory)
            self._members.start(order, directory, extra)
        except (CannotStart, OSError) as error:
            why = str(error) if isinstance(error, CannotStart) else f"cannot start: {error}"
            self._cannot_start(order.ref, why)
            return
        self._beats.expect(order.ref)
        self._idling.expect(order)

    def _cannot_start(self, ref: MemberRef, why: str) -> None:
        self._ended[ref] = (CANNOT_START_CODE, why, None)
        self._shipping.pump()
        self._settle()

    def _prepare(self, order: Prepare) -> None:
        """What a member would need is brought before it comes."""
        ready = self._supplies.here(order)
        if ready is not None:
            self._members.prepare(ready)
        elif order.job not in self._readying:
            self._readying[order.job] = asyncio.create_task(self._ready(order))

    async def _ready(self, order: Prepare) -> None:
        try:
            self._members.prepare(await self._supplies.get(order, Path(os.devnull), log.debug))
        except CannotStart as error:
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

    def _stop(self, order: Stop) -> None:
        if order.ref in self._kills or order.ref in self._ended or order.ref in self._dumps:
            return
        outfit = self._outfits.pop(order.ref, None)
        if outfit is not None:
            outfit.cancel()
            self._ended[order.ref] = (STOPPED_BEFORE_START_CODE, "stopped before it started", None)
            self._settle()
            return
        pid = self._members.pid(order.ref)
        if order.dump and pid is not None:
            self._dumps[order.ref] = asyncio.create_task(self._dump_and_stop(order, pid))
        else:
            self._end(order)

    async def _dump_and_stop(self, order: Stop, pid: int) -> None:
        """First look what it does, as long as it still does it. That takes bounded time."""
        ref = order.ref
        try:
            text, why = await asyncio.to_thread(stacks, pid, {MARK: str(ref)})
            if self._members.pid(ref) == pid:
                self._whys[ref] = why
                said = f"\n--- stopped by Shoal ({order.why}); its stacks:\n{text}\n---\n"
                _append(self._members_dir / str(ref) / "output", said.encode())
        except OSError as error:
            log.warning("the stacks of %s could not be saved: %s", ref, error)
        finally:
            del self._dumps[ref]
            self._end(order)

    def _end(self, order: Stop) -> None:
        """Gently first. The agent keeps the time itself, so it needs no controller for the rest."""
        if self._members.pid(order.ref) is None:
            return
        self._members.signal(order.ref, signal.SIGTERM)
        self._members.signal(order.ref, signal.SIGCONT)  # a stopped process takes no signal
        self._kills[order.ref] = asyncio.get_running_loop().call_later(
            order.grace_ms / 1000, self._members.signal, order.ref, signal.SIGKILL
        )

    def reap(self) -> None:
        self._beats.take()  # what the dead said last
        ended = self._members.reap()
        starved = any(code == KILLED_CODE for _, code in ended) and self._memory.killed()
        for ref, code in ended:
            timer = self._kills.pop(ref, None)
            if timer is not None:
                timer.cancel()
            step = self._beats.step(ref)
            self._beats.forget(ref)
            self._tidy_checkpoints(ref)
            why = self._whys.pop(ref, "")
            if not why and 0 < code < SIGNALS_FROM and ref not in self._book.stopping:
                why = last_words(self._members_dir / str(ref) / "output")
            if not why and starved and code == KILLED_CODE and ref not in self._book.stopping:
                why = OUT_OF_MEMORY
            self._ended[ref] = (code, why, step)
        self._reaped.set()
        self._shipping.pump()
        self._settle()

    def _settle(self) -> None:
        """A member has ended for the controller when all its output is there too."""
        for ref in [ref for ref in self._ended if self._shipping.complete(ref)]:
            self._book.exited(ref, *self._ended.pop(ref))
            self._report_soon()
        for ref in [ref for ref in self._leftovers if self._shipping.complete(ref)]:
            del self._leftovers[ref]
            self._forget(ref)

    def _forget(self, ref: MemberRef) -> None:
        self._shipping.forget(ref)
        shutil.rmtree(self._members_dir / str(ref), ignore_errors=True)

    # -- life ------------------------------------------------------------------------------

    def clear_up(self) -> None:
        """An earlier life of this node may have left processes, and output it could not ship."""
        killed = self._members.kill_leftovers()
        if killed:
            log.warning("killed %d processes that an earlier life had left", killed)
        for directory in sorted(self._members_dir.iterdir()):
            try:
                job, attempt, member = directory.name.split(".")
                ref = MemberRef(job, int(attempt), int(member))
            except ValueError:
                continue  # not ours
            self._leftovers[ref] = None
            self._shipping.watch(ref, directory / "output", fresh=False)

    def listen(self) -> None:
        self._beats.listen()
        self._sampler.start()

    async def live(self) -> None:
        async def heartbeat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                for job in self._members.tend():
                    self._book.prepared.pop(job, None)
                self._checks.tend()
                self._supplies.packages.ask_again(all_of_them=False)
                self._memory.look()
                self._book.leaving = (self._directory / LEAVING).exists()
                self._report()

        async def ship() -> None:
            while True:
                await asyncio.sleep(OUTPUT_POLL_S)
                self._shipping.pump()

        tasks = [asyncio.create_task(heartbeat()), asyncio.create_task(ship())]
        await self.stopping.wait()
        for task in tasks:
            task.cancel()

    async def end_members(self) -> None:
        """They get a moment to end well; what is left falls to the keeper."""
        self._members.nursery.close()
        for task in (*self._outfits.values(), *self._readying.values()):
            task.cancel()
        for ref in list(self._book.alive):
            self._members.signal(ref, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while self._members:
                    self._reaped.clear()
                    await self._reaped.wait()


def run(directory: Path, keeper: int) -> int:
    """The agent's whole life; returns its exit code."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    reap_orphans()
    return asyncio.run(_run(directory, keeper))


async def _run(directory: Path, keeper: int) -> int:
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=NodeSpec)
    incarnation = _next_incarnation(directory / "incarnation")
    agent = Agent(directory, spec, incarnation)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, agent.reap)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stopping.set)
    agent.clear_up()
    agent.listen()
    socket_path = directory / "agent.sock"
    socket_path.unlink(missing_ok=True)
    with short_path(socket_path) as path:
        await loop.create_unix_server(agent.connect, path)
    info = AgentInfo(os.getpid(), keeper, incarnation)
    write_private(directory / "agent.json", msgspec.json.encode(info))
    log.info("%s is up as incarnation %d", spec.id, incarnation)
    await agent.live()
    await agent.end_members()
    log.info("%s is down", spec.id)
    return 0


def _append(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


def _next_incarnation(path: Path) -> int:
    """Grows with each life of the node, so that what concerns an earlier one can be told apart.
    By the clock if the file is lost, by the file if the clock was set back."""
    try:
        last = int(path.read_text())
    except (FileNotFoundError, ValueError):
        last = 0
    incarnation = max(last + 1, int(time.time()))
    write_private(path, str(incarnation).encode())
    return incarnation
