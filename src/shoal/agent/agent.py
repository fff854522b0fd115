"""The agent of one node: obeys whichever controller is connected, and outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.agent.blocks.doorkeeper import Doorkeeper
from shoal.agent.checks import Checks
from shoal.agent.confine import rdma
from shoal.agent.confine.limits import devices, unenforced
from shoal.agent.images.runtimes import find
from shoal.agent.keeping.copying import Message
from shoal.agent.keeping.keeping import Keeping
from shoal.agent.members import Members
from shoal.agent.nearby import Nearby
from shoal.agent.numbers import TREE_FILE, own_gpus
from shoal.agent.sampling import Sampler
from shoal.agent.secrets import Secrets
from shoal.agent.shares import MpsDaemons, Shares
from shoal.agent.shipping import Shipping
from shoal.agent.sleeping.naps import described, way_of
from shoal.agent.supplies import Supplies
from shoal.core.nodebook import Action, NodeBook
from shoal.database.formats import VERSION
from shoal.link.wire import (
    CHECKPOINT_ROOT,
    AsBefore,
    Ask,
    Commands,
    Enter,
    FileKept,
    Finds,
    FromAgent,
    GivesFile,
    Handed,
    Heard,
    Joined,
    Joins,
    Keep,
    Kept,
    Link,
    Log,
    Need,
    Opens,
    Piece,
    Seeks,
    ToAgent,
    Turned,
    Wants,
    WantsFile,
)
from shoal.machine.ends import EndFile
from shoal.machine.enduring import enduring
from shoal.machine.exits import MEMBERS, read_exits
from shoal.machine.files import CONTACT, LEAVING, write_private
from shoal.machine.kernel import wireguard
from shoal.machine.paths import MOUNTS, ask
from shoal.model.commands import (
    Acknowledge,
    Check,
    Dismiss,
    Envelope,
    Launch,
    Prepare,
    Sleep,
    Stop,
    Wake,
)
from shoal.model.health import CheckResult
from shoal.model.job import MemberRef
from shoal.model.kept import CopyHeld, FileWanted
from shoal.model.labels import WIREGUARD
from shoal.model.node import TOLD_TO_END, NodeSpec
from shoal.model.report import Hung, LogChunk, NodeReport, Still
from shoal.model.secret import SecretsWanted
from shoal.model.tree import Tree

if TYPE_CHECKING:
    from shoal.agent.sessions.sessions import Sessions
    from shoal.agent.tunnel.tunnels import Tunnels
    from shoal.model.session import SessionOrder


log = logging.getLogger("shoal.agent")


HEARTBEAT_S = 1.0
OUTPUT_POLL_S = 0.1
LAST_OUTPUT_S = 3.0  # to ship what members wrote while they ended
# A controller that does not read must not make the agent's memory grow.
BACKLOG_BYTES_MAX = 16 * 1024 * 1024
HARMLESS = (Launch, Acknowledge)  # commands that no living member notices


class Agent:
    _sessions: Sessions | None = None  # these two are made when somebody needs them
    _tunnels: Tunnels | None = None

    def __init__(self, directory: Path, spec: NodeSpec, incarnation: int) -> None:
        self._directory = directory
        root = os.environ.get(CHECKPOINT_ROOT) or str(directory / "checkpoints")
        runtime = find()
        spec = msgspec.structs.replace(
            spec,
            checkpoints=ask((root,), root_name, root),
            containers=runtime.name if runtime else "",
            tree=self._tree(spec),
            labels=_labels(spec),
        )
        self._book = NodeBook(spec, incarnation, read_exits(directory / MEMBERS))
        self._book.version = VERSION
        self._book.leases.clock = boot_ms
        self._book.listens = {}
        self._checks = Checks(directory, spec, self._measured)
        self._sampler = Sampler(own_gpus(spec))
        shares = Shares(MpsDaemons(directory, own=own_gpus(spec)), spec.gpu_memory_mb)
        self._shipping = Shipping(self._send_log)
        secrets = Secrets(directory, directory / MEMBERS, self._want, self._shipping.hide)
        self.doorkeeper = Doorkeeper(directory, lambda door: self._send(Opens(door)))
        self._supplies = Supplies(directory, self._book, self._need, shares, secrets)
        self._keeping = Keeping(
            directory,
            root.rstrip("/"),
            self._keep,
            self._want_file,
            secrets.files_key,
            spec.id,
            self.doorkeeper,
        )
        self._supplies.fetching = self._keeping.fetching
        self._supplies.root = self._root = root
        self.members = Members(
            directory, self._book, self._supplies, self._shipping, self._keeping, self._report_soon
        )
        self._supplies.environments.apart = self.members.processes.apart
        self._share_blocks(spec.id)
        self.members.left.append(self._supplies.volumes.forget)
        self._supplies.own_user = self.members.processes.own_user
        self._supplies.tunnels_of = self._tunnels_of
        processes = self.members.processes
        if isinstance(spec.tree, Tree):
            processes.nearby = Nearby(spec.tree)
        apart = processes.apart
        lacks = apart.problem, apart.binding.problem
        missing = unenforced(processes.groups, bool(devices()), *lacks)
        cards = rdma.look()
        processes.rdma = bool(cards)
        spec = msgspec.structs.replace(spec, unenforced=missing, rdma=cards or msgspec.UNSET)
        self.members.naps.way = way_of(spec, real=bool(devices()))
        self._book.spec = described(spec, self.members.naps.way)
        self.members.processes.helpers = (
            self._checks,
            self._supplies.environments,
            self._supplies.volumes,
            self._supplies.runs,
            shares.daemons,
            self.doorkeeper,
        )
        self._end = EndFile(directory)
        self._link: Link | None = None
        self._met = False  # the controller has spoken on this connection
        self._report_due = False
        self.compresses = False  # its link leads to another machine
        self.turned_away: Callable[[str], None] = log.error  # is told why
        self.learn: Callable[[tuple[str, ...]], None] = lambda _: None  # where the heads are
        self.stopping = asyncio.Event()

    def _share_blocks(self, name: str) -> None:
        """Volumes and packages are fetched from neighbors, and given to them."""
        volumes, packages = self._supplies.volumes, self._supplies.packages
        volumes.apart = self.members.processes.apart
        volumes.pace = self.doorkeeper.pace
        volumes.name = packages.name = name
        volumes.offer = packages.offer = self.doorkeeper.offer
        volumes.seek = packages.seek = lambda seek: self._send(Seeks(seek))

    @staticmethod
    def _tree(spec: NodeSpec) -> Tree | msgspec.UnsetType:
        """A node without GPUs has none, and does not even import what reads it."""
        if not spec.gpus or not (devices() or os.environ.get(TREE_FILE)):
            return msgspec.UNSET
        from shoal.agent.tree import tree_of

        return tree_of(spec, own_gpus(spec), real=bool(devices()))

    def connect(self) -> Link:
        """Called for each connection. The agent obeys the newest controller."""
        return Link(ToAgent, self._opened, self._received, self._closed, compress=self.compresses)

    def _opened(self, link: Link) -> None:
        if self._link is not None:
            self._link.close()
        self._link = link
        self._met = False
        self._shipping.reconnected()
        self._keeping.reconnected()
        self._supplies.packages.ask_again(all_of_them=True)
        self._supplies.secrets.ask_again()
        self.doorkeeper.reconnected()
        if self._tunnels is not None:
            self._tunnels.reconnected()
        self._report()

    def _closed(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._shipping.disconnected()
            self._keeping.disconnected()

    def _received(self, message: FromAgent | ToAgent) -> None:
        if isinstance(message, Turned):
            self.turned_away(message.why)
            return
        if not self._met:
            self._met = True
            self._note(CONTACT)
        match message:
            case Commands(envelope):
                self._obey(envelope)
            case Kept(ref, size):
                self._shipping.kept(ref, size)
                self.members.settle(ref)
                self.members.processes.notice()
            case Ask(heads):
                self.learn(heads)
                self._report()
            case Piece(piece):
                self._supplies.packages.take(piece)
            case Handed(secrets):
                self._supplies.secrets.take(secrets)
            case FileKept(answer):
                self._keeping.take(answer)
            case GivesFile(sent):
                self._keeping.fetching.take(sent)
            case Finds(sought):
                self._supplies.volumes.found(sought)
                self._supplies.packages.found(sought)
            case Joined(tunnel) if self._tunnels is not None:
                self._tunnels.found(tunnel)
            case Enter(order):
                self._enter(order)

    def _enter(self, order: SessionOrder) -> None:
        """What it needs is imported when the first user comes."""
        if self._sessions is None:
            from shoal.agent.sessions.sessions import Sessions

            self._sessions = Sessions(self._directory, self.members.processes, self._book)
            self.members.left.append(self._sessions.ended)
        self._sessions.begin(order)

    def _tunnels_of(self) -> Tunnels:
        """Imported when the first gang asks for an encrypted network."""
        if self._tunnels is None:
            from shoal.agent.tunnel.tunnels import Tunnels

            lost = partial(self.members.overused, end=True)
            say = lambda end: self._send(Joins(end))  # noqa: E731
            self._tunnels = Tunnels(self._directory, self._book.spec.id, say, lost)
            self.members.left.append(self._tunnels.left)
            self.members.processes.helpers = (*self.members.processes.helpers, self._tunnels)
        return self._tunnels

    def _note(self, name: str) -> None:
        """`shoal join` and the starter look for such files. If none can be written, we go on."""
        try:
            write_private(self._directory / name, str(time.time_ns()).encode())
        except OSError as error:
            log.error("the file %s could not be written: %s", name, error)

    def _obey(self, envelope: Envelope) -> None:
        """Commands for several jobs come together; one that fails does not harm the others."""
        if not all(isinstance(command, HARMLESS) for command in envelope.commands):
            self.members.reap()  # a member that has ended by now was not stopped by this envelope
        actions = self._book.take(envelope)
        reported_at = time.monotonic()
        for number, action in enumerate(actions):
            if time.monotonic() - reported_at > HEARTBEAT_S:  # a busy node must not look silent
                self._queue_up(actions[number:])
                self._report()
                reported_at = time.monotonic()
            try:
                self._carry_out(action)
            except Exception:  # a launch that fails ends in an exit by itself
                log.exception("a %s could not be carried out", type(action).__name__)
        for command in envelope.commands:
            if isinstance(command, Acknowledge) and command.ref not in self._book.exits:
                self.members.acknowledged(command.ref)
        # What the controller knows is stored needs no answer; the next heartbeat shows it.
        if not all(isinstance(command, Acknowledge) for command in envelope.commands):
            self._report_soon()

    def _queue_up(self, actions: list[Action]) -> None:
        """A member is not reported as alive before its turn to start has come."""
        for action in actions:
            if isinstance(action, Launch):
                self._book.gets(action.ref, "starts other members first")

    def _carry_out(self, action: Action) -> None:
        match action:
            case Launch() if self.stopping.is_set():
                log.info("%s is not started: this node ends", action.ref)
            case Launch():
                self._book.begins(action.ref)
                self.members.launch(action)
            case Stop():
                self.members.stop(action)
            case Sleep():
                self.members.naps.sleep(action)
            case Wake():
                self.members.naps.wake(action)
            case Check():
                self._checks.ask(action, busy=bool(self._book.alive))
            case Prepare():
                self.members.prepare(action)
            case Dismiss():
                self._note(LEAVING)  # so that its starter ends, too
                self.stopping.set()

    def _report_soon(self) -> None:
        """Several changes at the same moment make one report."""
        if not self._report_due:
            self._report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        """A complete report."""
        self._report_due = False
        self._tell(self._book.report)

    def _tell(self, say: Callable[..., NodeReport | Still]) -> None:
        if self._link is not None and self._link.backlog_bytes < BACKLOG_BYTES_MAX:
            self._book.ends_in_ms, self._book.ends_why = self._end.left()
            if self.stopping.is_set() and self._book.alive:
                self._book.ends_in_ms, self._book.ends_why = 0, TOLD_TO_END
            sample, said = self._sampler.take(), self.members.beats.progress()
            idle = self.members.idle.idle(sample)
            self._book.began = self.members.idle.began()
            self._book.holdings = self._supplies.volumes.held
            found = say(said, sample, idle)
            if not isinstance(found, Still):
                self._sampler.look()
            self._link.send(AsBefore(found) if isinstance(found, Still) else Heard(found))

    def _hangs(self) -> tuple[Hung, ...]:
        """What does not answer. Without its checkpoints' folder, no member can start."""
        root = MOUNTS.of(self._root)
        return tuple(
            Hung(mount.point, path, mount is root)
            for mount in MOUNTS.hanging()
            for path in ("", *mount.names)
        )

    def _measured(self, result: CheckResult) -> None:
        self._book.measured(result)
        self._report_soon()

    def _send(self, message: FromAgent) -> None:
        if self._link is not None:
            self._link.send(message)

    def _need(self, package: str, offset: int) -> None:
        self._send(Need(package, offset))

    def _want(self, ref: MemberRef, public: bytes) -> bool:
        if self._link is None:
            return False
        self._link.send(Wants(SecretsWanted(ref, self._book.incarnation, public)))
        return True

    def _keep(self, what: Message | CopyHeld) -> bool:
        if self._link is None:
            return False
        self._link.send(Keep(what))
        return True

    def _want_file(self, wanted: FileWanted) -> None:
        self._send(WantsFile(wanted))

    def _send_log(self, chunk: LogChunk) -> None:
        self._send(Log(chunk))

    def listen(self) -> None:
        self._supplies.volumes.offer_all()
        self.members.beats.listen()
        self._sampler.start()
        MOUNTS.use("checkpoints", (self._root,))

    async def live(self) -> None:
        async def heartbeat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                self._end_leases()
                for job in self.members.processes.tend():
                    self._book.prepared.pop(job, None)
                self._checks.tend()
                self._supplies.packages.ask_again(all_of_them=False)
                self._supplies.secrets.ask_again()
                self.members.memory.look()
                self._sampler.shared = self._supplies.shares.gpus | self.members.naps.gpus
                self._supplies.shares.keep(
                    self._sampler.processes, self.members.processes.owner, self.members.overused
                )
                self._book.hangs = self._hangs() if MOUNTS else ()
                self._book.leaving = (self._directory / LEAVING).exists()
                changed = self._end.look()
                self.members.audit()
                self.members.naps.tend(self._sampler.processes)
                self._tell(self._book.report if changed else self._book.heartbeat)

        async def ship() -> None:
            while True:
                await asyncio.sleep(OUTPUT_POLL_S)
                self._shipping.pump()
                self.members.settle()
                if self.members.doors.look():
                    self._report_soon()

        tasks = [
            asyncio.create_task(enduring("the heartbeat", heartbeat)),
            asyncio.create_task(enduring("the shipping of output", ship)),
        ]
        await self.stopping.wait()
        tasks.pop(0).cancel()
        tasks.append(asyncio.create_task(self._take_leave()))
        await self.members.end()
        for _ in range(int(LAST_OUTPUT_S / OUTPUT_POLL_S)):
            if self._link is None or self._shipping.done:
                break
            await asyncio.sleep(OUTPUT_POLL_S)
        for task in tasks:
            task.cancel()
        if self._tunnels is not None:
            self._tunnels.close()

    async def _take_leave(self) -> None:
        """While members end: say that this node ends, so that nothing else is started here."""
        while True:
            self._end_leases()
            self._tell(self._book.heartbeat)
            await asyncio.sleep(HEARTBEAT_S)

    def _end_leases(self) -> None:
        """Whatever the head does: it may be dead, or cut off."""
        for stop in self._book.end_leases():
            log.warning("%s is stopped: %s", stop.ref, stop.why)
            try:
                self.members.stop(stop)
            except Exception:  # it is tried again, and others must end, too
                log.exception("%s could not be stopped", stop.ref)


def boot_ms() -> int:
    """A clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def _labels(spec: NodeSpec) -> dict[str, str]:
    """With how this node can encrypt a gang's network, if it can."""
    way = "" if WIREGUARD in spec.labels else wireguard()
    return {**spec.labels, WIREGUARD: way} if way else spec.labels


# Which checkpoint directory a node sees, by a name that is written in the directory itself.


NAME_FILE = ".shoal-root"
NAME_CHARACTERS_MAX = 64


def root_name(root: str) -> str:
    """Nodes that read the same name share the directory. An address (s3://...) is its own name. The
    first node that looks writes the name, atomically. Empty: unknown."""
    if "://" in root:
        return root
    path = Path(root) / NAME_FILE
    fresh = path.with_name(f"{NAME_FILE}.{uuid.uuid4().hex}")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if not path.exists():
            fresh.write_text(uuid.uuid4().hex)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                fresh.unlink()
        return path.read_text()[:NAME_CHARACTERS_MAX].strip()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("cannot find out whether %s is shared between nodes: %s", root, error)
        return ""
