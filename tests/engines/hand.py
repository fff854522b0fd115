"""What the contract's tests hold an engine with: the rig that an engine's own tests give, and a
controller without a mind that says what it is told to say and keeps what it hears."""

from __future__ import annotations

import abc
import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from harness.waiting import WAIT_S
from storm.node import Fate

from shoal.control.logs import LogStore
from shoal.control.packages import PackageStore
from shoal.link.sealing import seal
from shoal.model.commands import Acknowledge, Command, Envelope, Launch, Stop
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk, MemberExit, NodeGone, NodeReport, PackagePiece, Still
from shoal.model.secret import SealedSecrets, SecretsOf, SecretsWanted
from shoal.ports import Engine, Files

# Commands may be lost: what is not seen to be done is said again.
SAY_AGAIN_S = 1.0
GRACE_MS = 10_000


class Program(NamedTuple):
    """The same life as a shell script and as the simulation tells it. `ready` comes before the
    process says that it is there, `script` after it."""

    script: str
    fate: Fate
    ready: str = ""

    @property
    def argv(self) -> tuple[str, ...]:
        return ("sh", "-c", f'{self.ready}\necho $$ >>"$RIG/$SHOAL_REF"\n{self.script}')


SUCCEEDS = Program("exit 0", Fate(10))
FAILS = Program("exit 3", Fate(10, 3))
CRASHES = Program("kill -SEGV $$", Fate(10, 139))
SLEEPS = Program("exec sleep 600", Fate(None))
ENDS_WELL = Program(
    "while :; do sleep 0.05; done", Fate(None, stopping_ms=5, stopped_code=7), "trap 'exit 7' TERM"
)
STUBBORN = Program("while :; do sleep 0.05; done", Fate(None, stopping_ms=None), "trap '' TERM")
# Goes on until the rig lets it go; in the simulation that is a matter of time.
WAITS = Program(
    'until [ -e "$RIG/$SHOAL_REF.go" ]; do sleep 0.05; done\necho last words\nexit 5',
    Fate(60_000, 5),
)
PROGRAMS = (SUCCEEDS, FAILS, CRASHES, SLEEPS, ENDS_WELL, STUBBORN, WAITS)


class Rig(abc.ABC):
    """An engine under test: nodes that outlive the engine's objects, and the power to hurt them."""

    nodes: tuple[str, ...]  # two or more, with 4 GPUs each
    certain: bool  # the engine knows when a node has ended; else the node is merely silent

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.epoch = 0
        self.jobs = 0

    @abc.abstractmethod
    def engine(self) -> Engine:
        """As the next controller would make it, for the same nodes."""

    async def crash(self, engine: Engine) -> None:
        """Its controller dies. Engines that say goodbye in `close` must do worse than that here."""
        await engine.close()

    @abc.abstractmethod
    def kill(self, node: str) -> None:
        """The node ends at once, with all that runs on it."""

    def revive(self, node: str) -> None:  # noqa: B027
        """It is switched on again, where nobody else does that."""

    async def pause(self) -> None:
        """Let a little time pass."""
        await asyncio.sleep(0.02)

    def starts(self, ref: MemberRef) -> int:
        """How many processes have begun under this name."""
        return len(self._pids(ref))

    def running(self, ref: MemberRef) -> bool:
        """Is a process of this name there, whoever knows of it?"""
        return any(_alive(pid) for pid in self._pids(ref))

    def release(self, ref: MemberRef) -> None:
        """Let a program that waits go on."""
        (self.scratch / f"{ref}.go").touch()

    def _pids(self, ref: MemberRef) -> list[int]:
        path = self.scratch / str(ref)
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Ears:
    """The inbox of one controller: the newest report of each node, the deaths, the output."""

    def __init__(self, logs: LogStore, packages: PackageStore) -> None:
        self.files: Files | None = None
        self.blocks = self.tunnels = None
        self.newest: dict[str, NodeReport] = {}
        self.deaths: list[NodeGone] = []
        self._logs = logs
        self._packages = packages
        self.secrets: dict[MemberRef, SecretsOf] = {}
        self.wanted: list[tuple[str, int, MemberRef]] = []

    def heard(self, report: NodeReport) -> None:
        last = self.newest.get(report.spec.id)
        stamp = (report.incarnation, report.sequence)
        if last is None or stamp > (last.incarnation, last.sequence):
            self.newest[report.spec.id] = report

    def still(self, still: Still) -> bool:
        last = self.newest.get(still.node)
        number = (still.incarnation, still.sequence)
        return last is not None and (last.incarnation, last.sequence) == number

    def gone(self, gone: NodeGone) -> None:
        self.deaths.append(gone)

    def log(self, chunk: LogChunk) -> int:
        return self._logs.append(chunk)

    def log_from(self, chunk: LogChunk, node: str, answer: Callable[[int], None]) -> None:
        answer(self.log(chunk))

    def piece(self, package: str, offset: int, node: str = "") -> PackagePiece:
        return self._packages.piece(package, offset)

    def secrets_of(self, node: str, wanted: SecretsWanted) -> SealedSecrets | None:
        self.wanted.append((node, wanted.incarnation, wanted.ref))
        found = self.secrets.get(wanted.ref)
        return None if found is None else seal(found, wanted.public)


class Hand:
    """One controller's life. The next one finds the same nodes and the same logs."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._logs = LogStore(rig.scratch / "logs")
        self.packages = PackageStore(rig.scratch / "packages")
        self._number = 0
        self.ears = Ears(self._logs, self.packages)
        self.engine: Engine | None = None

    async def begin(self) -> None:
        self.rig.epoch += 1
        self.epoch = self.rig.epoch
        self.engine = self.rig.engine()
        await self.engine.start(self.ears)
        await self.until(lambda: self.ears.newest.keys() >= set(self.rig.nodes))

    async def die(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await self.rig.crash(engine)

    async def end(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    async def until(self, fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < deadline, f"not so after {WAIT_S} s: {self.ears.newest}"
            await self.rig.pause()

    # -- what it says ----------------------------------------------------------------------

    def say(self, node: str, *commands: Command, stamp: tuple[int, int] | None = None) -> None:
        """`stamp` is the epoch and the number of an envelope that comes late."""
        assert self.engine is not None
        if stamp is None:
            self._number += 1
        epoch, number = stamp or (self.epoch, self._number)
        self.engine.send(node, Envelope(epoch, number, commands))

    async def insist(self, node: str, command: Command, fact: Callable[[], bool]) -> None:
        """Say it, and say it again, until it is so."""
        deadline = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < deadline, f"{command} does nothing: {self.ears.newest}"
            self.say(node, command)
            again = time.monotonic() + SAY_AGAIN_S
            while time.monotonic() < again and not fact():
                await self.rig.pause()

    def new_ref(self, member: int = 0) -> MemberRef:
        self.rig.jobs += 1
        return MemberRef(f"j{self.rig.jobs}", 1, member)

    def keep(self, package: str, data: bytes) -> None:
        """A working directory that was sent."""
        upload = self.packages.begin(package, len(data), set())
        try:
            upload.write(data)
            upload.finish()
        finally:
            upload.close()

    def launch_order(
        self,
        node: str,
        ref: MemberRef,
        argv: tuple[str, ...],
        *,
        env: dict[str, str] | None = None,
        workdir: str = "",
        gpus: tuple[int, ...] = (),
    ) -> Launch:
        path = os.environ.get("PATH", os.defpath)
        return Launch(
            node=node,
            incarnation=self.report(node).incarnation,
            ref=ref,
            argv=argv,
            env={"RIG": str(self.rig.scratch), "PATH": path, **(env or {})},
            workdir=workdir,
            stop_grace_ms=GRACE_MS,
            gpus=gpus,
        )

    async def launch(self, node: str, program: Program, gpus: tuple[int, ...] = ()) -> MemberRef:
        """Have it started, and see that it was."""
        ref = self.new_ref()
        order = self.launch_order(node, ref, program.argv, gpus=gpus)
        await self.insist(node, order, lambda: self.knows(node, ref))
        await self.until(lambda: self.rig.starts(ref) > 0)
        return ref

    async def stop(self, node: str, ref: MemberRef, grace_ms: int = GRACE_MS) -> MemberExit:
        order = Stop(
            node=node, incarnation=self.report(node).incarnation, ref=ref, grace_ms=grace_ms
        )
        await self.insist(node, order, lambda: self.has_ended(node, ref))
        return await self.exit(node, ref)

    async def acknowledge(self, node: str, ref: MemberRef) -> None:
        order = Acknowledge(node=node, incarnation=self.report(node).incarnation, ref=ref)
        await self.insist(node, order, lambda: not self.has_ended(node, ref))

    # -- what it hears ---------------------------------------------------------------------

    def report(self, node: str) -> NodeReport:
        return self.ears.newest[node]

    def alive(self, node: str, ref: MemberRef) -> bool:
        return ref in self.report(node).alive

    def has_ended(self, node: str, ref: MemberRef) -> bool:
        return any(one.ref == ref for one in self.report(node).exits)

    def knows(self, node: str, ref: MemberRef) -> bool:
        return self.alive(node, ref) or self.has_ended(node, ref) or self.gets(node, ref)

    def gets(self, node: str, ref: MemberRef) -> bool:
        """It was ordered, and waits for what it needs."""
        report = self.ears.newest.get(node)
        return report is not None and any(one.ref == ref for one in report.getting)

    async def exit(self, node: str, ref: MemberRef) -> MemberExit:
        await self.until(lambda: self.has_ended(node, ref))
        return next(one for one in self.report(node).exits if one.ref == ref)

    async def settle(self, node: str) -> NodeReport:
        """Until all that was said is obeyed, or lost, or too old to be: for a node answers a stop
        of what never started, and takes no envelope that was overtaken by a newer one."""
        ref = self.new_ref()
        await self.stop(node, ref)
        await self.acknowledge(node, ref)
        return self.report(node)

    def output(self, ref: MemberRef) -> bytes:
        offset, kept = 0, b""
        while True:
            read = self._logs.read(ref, offset)
            kept += read.data
            offset = read.next
            if offset >= read.size:
                return kept


@asynccontextmanager
async def controller(rig: Rig) -> AsyncIterator[Hand]:
    hand = Hand(rig)
    try:
        await hand.begin()
        yield hand
    finally:
        await hand.end()


def clean(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
