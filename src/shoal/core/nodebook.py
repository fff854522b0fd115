"""The node's side of the protocol: which members live here, which ended, which commands are old.

Pure, so that the agent and the simulated world keep their books with the same code.
"""

from __future__ import annotations

import msgspec

from shoal.core.leasebook import LeaseBook
from shoal.model.blocks import Held
from shoal.model.commands import (
    Acknowledge,
    Check,
    Dismiss,
    Envelope,
    Fence,
    Launch,
    Prepare,
    Renew,
    Sleep,
    Stop,
    Wake,
)
from shoal.model.health import CheckResult
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import Progress, Spent
from shoal.model.report import (
    Began,
    Getting,
    Hung,
    Idle,
    MemberExit,
    NodeReport,
    Refusal,
    Slept,
    Still,
    Touched,
    Uses,
    Woke,
)
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import NodeSample

STOPPED_BEFORE_START_CODE = 143
PREPARED_MAX = 2  # a warm interpreter takes memory
LOOK_MS = 1_000  # how often leases are looked at
STILLS_MAX = 9  # between two complete reports, so that one comes every 10 s
CHECKS_KEPT = 4  # in every report, until newer ones take their place
PAIRS_TOLD_MAX = 60  # reports with the pairs of a tour: there may be 1,000 of them

# What an agent has to do for a command; an acknowledgement needs the book only.
Action = Launch | Stop | Sleep | Wake | Check | Prepare | Dismiss


class NodeBook:
    """An agent opens a new book, with a higher incarnation, each time it starts. `exits`: those of
    its earlier lives that the controller has not acknowledged."""

    def __init__(
        self, spec: NodeSpec, incarnation: int, exits: tuple[MemberExit, ...] = ()
    ) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.alive: dict[MemberRef, Launch] = {}  # with those that are getting ready
        self.getting: dict[MemberRef, str] = {}
        self.stopping: dict[MemberRef, None] = {}
        self.ended: dict[MemberRef, None] = {}  # before a command to stop came
        self.exits: dict[MemberRef, MemberExit] = {exit_.ref: exit_ for exit_ in exits}
        self.dozing: dict[MemberRef, None] = {}
        self.asleep: dict[MemberRef, Slept] = {}
        self.waking: dict[MemberRef, Slept] = {}
        self.woke: dict[MemberRef, Woke] = {}
        self.refused: dict[MemberRef, Refusal] = {}
        self.touched: dict[MemberRef, int] = {}  # since they fell asleep
        self.leases = LeaseBook()
        self.uses: tuple[Uses, ...] = ()  # for the report
        self.began: tuple[Began, ...] = ()  # too
        self.holdings: tuple[Held, ...] = ()  # too
        self.hangs: tuple[Hung, ...] = ()  # and this
        # Replicas that listen on their ports by themselves. None: this node does not look.
        self.listens: dict[MemberRef, None] | None = None
        self.checks: dict[str, CheckResult] = {}
        self.prepared: dict[str, Prepare] = {}
        self.leaving = False
        self.version = ""  # of Shoal, for the report
        self.ends_in_ms: int | None = None
        self.ends_why = ""
        self._sequence = 0
        self._pairs_told = 0
        self._reported: NodeReport | None = None  # the last complete report
        self._stills = 0  # sent since then
        self._newest = (0, 0)

    def take(self, envelope: Envelope) -> list[Action]:
        """What to start, stop and measure. Commands that are old or for an old life do nothing."""
        stamp = (envelope.epoch, envelope.number)
        if stamp <= self._newest:
            return []
        self._newest = stamp
        todo: list[Action] = []
        for command in envelope.commands:
            if command.incarnation != self.incarnation or isinstance(command, Fence):
                continue
            if isinstance(command, Check):
                if command.id not in self.checks:
                    todo.append(command)
            elif isinstance(command, Dismiss):
                if (self.leaving or self.spec.order) and not self.alive and not self.exits:
                    todo.append(command)
            elif isinstance(command, Prepare):
                self._prepare(command)
                todo.append(command)
            else:
                self._take_one(command, todo)
        return todo

    def _prepare(self, command: Prepare) -> None:
        self.prepared.pop(command.job, None)
        self.prepared[command.job] = command
        while len(self.prepared) > PREPARED_MAX:
            del self.prepared[next(iter(self.prepared))]

    def _take_one(
        self, command: Launch | Stop | Sleep | Wake | Renew | Acknowledge, todo: list[Action]
    ) -> None:
        ref = command.ref
        known = ref in self.alive or ref in self.exits
        match command:
            case Launch():
                # A node that was given up may still run what the controller has written off. Its
                # GPUs are taken until that ends; the command comes again with the next report.
                if not known and self._gpus_free(command) and self._may_live(command):
                    self.alive[ref] = command
                    todo.append(command)
            case Renew():
                if ref in self.alive:
                    self.leases.take(ref, command.lease)
            case Stop():
                if not known:
                    # The controller waits for an end, so what never began ends here.
                    self.stopping[ref] = None
                    self.exited(ref, STOPPED_BEFORE_START_CODE, "stopped before it started")
                elif ref in self.alive and ref not in self.stopping:
                    self.stopping[ref] = None
                    if ref not in self.ended:
                        todo.append(command)
            case Sleep():
                if ref in self.alive and self._may_doze(ref):
                    self.woke.pop(ref, None)
                    self.touched.pop(ref, None)
                    self.dozing[ref] = None
                    todo.append(command)
                elif ref in self.asleep:  # the controller knows that it could not be woken
                    self.refused.pop(ref, None)
            case Wake():
                self.refused.pop(ref, None)
                self._wake(command, todo)
            case Acknowledge():
                self.exits.pop(ref, None)

    def _may_live(self, launch: Launch) -> bool:
        """Not after its lease, nor if that is unknown: then the command comes again, too."""
        if not self.leases.take(launch.ref, launch.lease):
            return False
        left_ms = self.leases.left_ms(launch)
        if left_ms is not None and left_ms <= 0:
            self.leases.forget(launch.ref)
            return False
        return True

    def end_leases(self) -> list[Stop]:
        """Members whose leases are over are stopped, as by a command. It comes again, without a
        grace time, while they live on after that."""
        todo = []
        for ref in self.alive if self.leases else ():
            left_ms = self.leases.left_ms(launch := self.alive[ref])
            if left_ms is None or left_ms > LOOK_MS or ref in self.ended:
                continue
            grace_ms = max(0, left_ms + launch.stop_grace_ms)
            if ref in self.stopping and grace_ms:
                continue
            self.stopping[ref] = None
            self.leases.lapse(ref)
            todo.append(
                Stop(
                    node=launch.node,
                    incarnation=self.incarnation,
                    ref=ref,
                    grace_ms=grace_ms,
                    why="its lease is over",
                )
            )
        return todo

    def _may_doze(self, ref: MemberRef) -> bool:
        """It runs, is not about to end, and is not known to be unable to sleep."""
        books = (self.getting, self.stopping, self.ended, self.dozing, self.asleep, self.waking)
        return ref not in self.refused and not any(ref in book for book in books)

    def _wake(self, command: Wake, todo: list[Action]) -> None:
        """One that is still falling asleep is woken when it sleeps and the command comes again."""
        ref = command.ref
        if ref not in self.asleep or ref in self.stopping:
            return
        launch = msgspec.structs.replace(self.alive[ref], gpus=command.gpus)
        if self._gpus_free(launch):
            self.alive[ref] = launch
            self.waking[ref] = self.asleep.pop(ref)
            todo.append(command)

    def slept(self, ref: MemberRef, memory_mb: int, took_ms: int) -> None:
        """It sleeps: its GPUs are free for others."""
        if self.dozing.pop(ref, 0) is None:
            self.asleep[ref] = Slept(ref, memory_mb, took_ms)

    def refuses(self, ref: MemberRef, why: str) -> None:
        """It could not be put to sleep, and is awake."""
        if self.dozing.pop(ref, 0) is None:
            self.refused[ref] = Refusal(ref, why)

    def touch(self, ref: MemberRef) -> None:
        """Somebody uses the member, and it has to be awake for that."""
        if ref in self.dozing or ref in self.asleep:
            self.touched[ref] = self.touched.get(ref, 0) + 1

    def awoke(self, ref: MemberRef, took_ms: int) -> None:
        self.touched.pop(ref, None)
        if self.waking.pop(ref, None) is not None:
            self.woke[ref] = Woke(ref, took_ms)

    def stays_asleep(self, ref: MemberRef, why: str) -> None:
        """There was no room to wake it; it sleeps as before."""
        if (slept := self.waking.pop(ref, None)) is not None:
            self.asleep[ref] = slept
            self.refused[ref] = Refusal(ref, why)

    def _gpus_free(self, launch: Launch) -> bool:
        left = dict.fromkeys(launch.gpus, WHOLE_GPU_MILLI - launch.gpu_milli)
        for ref, other in self.alive.items():
            if ref in self.asleep:
                continue
            for gpu in other.gpus:
                if gpu in left:
                    left[gpu] -= other.gpu_milli
        return all(milli >= 0 for milli in left.values())

    def heeds(self, ref: MemberRef, *, listens: bool) -> None:
        """Whether a replica, and nobody else, listens on its port now."""
        if self.listens is not None:
            self.listens.pop(ref, None)
            if listens and ref in self.alive:
                self.listens[ref] = None

    def gets(self, ref: MemberRef, what: str) -> None:
        """It cannot start yet. It holds its GPUs and can be stopped like any other."""
        if ref in self.alive:
            self.getting[ref] = what

    def begins(self, ref: MemberRef) -> None:
        """It has everything that it needs."""
        self.getting.pop(ref, None)

    def ends(self, ref: MemberRef) -> None:
        """Its process has ended, but its output is not stored yet. A command to stop it that comes
        now is too late to be the reason."""
        if ref in self.alive and ref not in self.stopping:
            self.ended[ref] = None

    def exited(
        self,
        ref: MemberRef,
        code: int,
        why: str = "",
        step: int | None = None,
        fault: Fault = Fault.NONE,
        spent: Spent | None = None,
        saved_step: int = 0,
    ) -> None:
        if ref in self.getting and ref in self.leases.lapsed:
            fault = Fault.LEASE
        books = (self.alive, self.getting, self.dozing, self.asleep, self.waking, self.woke)
        for book in (*books, self.refused, self.touched):
            book.pop(ref, None)
        self.heeds(ref, listens=False)
        stopped = ref in self.stopping and ref not in self.ended
        self.stopping.pop(ref, None)
        self.ended.pop(ref, None)
        lease_ms = self.leases.forget(ref)
        self.exits[ref] = MemberExit(
            ref, code, why, stopped, step, fault, spent, saved_step, lease_ms
        )

    def measured(self, result: CheckResult) -> None:
        self._drop_pairs()
        self._pairs_told = 0
        self.checks[result.id] = result
        while len(self.checks) > CHECKS_KEPT:
            del self.checks[next(iter(self.checks))]

    def _drop_pairs(self) -> None:
        """The controller has them, or does not ask for them any more."""
        for id_, result in self.checks.items():
            if result.pairs or result.collectives:
                self.checks[id_] = msgspec.structs.replace(result, pairs=(), collectives=())

    def report(
        self,
        progress: tuple[Progress, ...] = (),
        sample: NodeSample | None = None,
        idle: tuple[Idle, ...] = (),
    ) -> NodeReport:
        self._sequence += 1
        self.leases.reports(self._sequence)
        self._stills = 0
        self._pairs_told += 1
        if self._pairs_told > PAIRS_TOLD_MAX:
            self._drop_pairs()
        self._reported = self._inventory(progress, sample, idle)
        return self._reported

    def heartbeat(
        self,
        progress: tuple[Progress, ...] = (),
        sample: NodeSample | None = None,
        idle: tuple[Idle, ...] = (),
    ) -> NodeReport | Still:
        """A complete report, or that nothing has changed since the last one. The last one must have
        been sent on the same connection."""
        moving = progress or idle or self.getting or self.prepared or self.exits
        if moving or self._stills >= STILLS_MAX or self._reported is None:
            return self.report(progress, sample, idle)
        last, now = self._reported, self._inventory((), None, ())
        alike = msgspec.structs.replace(last, sample=None)
        if last.ends_in_ms is not None and now.ends_in_ms is not None:  # it only comes nearer
            alike = msgspec.structs.replace(alike, ends_in_ms=now.ends_in_ms)
        if now != alike:
            return self.report(progress, sample, idle)
        self._stills += 1
        return Still(self.spec.id, self.incarnation, self._sequence, sample)

    def _inventory(
        self, progress: tuple[Progress, ...], sample: NodeSample | None, idle: tuple[Idle, ...]
    ) -> NodeReport:
        return NodeReport(
            spec=self.spec,
            incarnation=self.incarnation,
            sequence=self._sequence,
            alive=tuple(ref for ref in self.alive if ref not in self.getting),
            stopping=tuple(self.stopping),
            exits=tuple(self.exits.values()),
            progress=progress,
            checks=tuple(self.checks.values()),
            prepared=tuple(self.prepared),
            leaving=self.leaving,
            sample=sample,
            idle=idle,
            getting=tuple(Getting(ref, what) for ref, what in self.getting.items()),
            ended=tuple(self.ended),
            ends_in_ms=self.ends_in_ms,
            ends_why=self.ends_why,
            shoal=self.version,
            dozing=tuple(self.dozing),
            asleep=tuple(self.asleep.values()),
            waking=tuple(self.waking),
            woke=tuple(self.woke.values()),
            refused=tuple(self.refused.values()),
            touched=tuple(Touched(ref, times) for ref, times in self.touched.items()),
            uses=self.uses,
            began=self.began,
            holdings=self.holdings,
            hangs=self.hangs,
            leases=self.leases.told(),
            listens=None if self.listens is None else tuple(self.listens),
        )
