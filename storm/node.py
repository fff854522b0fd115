"""A simulated node: the agent's own book-keeping over virtual processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shoal.core.nodebook import STOPPED_BEFORE_START_CODE, NodeBook
from shoal.model.blocks import Held
from shoal.model.commands import Check, Dismiss, Envelope, Launch, Prepare, Sleep, Stop, Wake
from shoal.model.fabric import Pair, Tour
from shoal.model.health import CheckResult
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import Progress, spent_of
from shoal.model.report import Began, Hung, Idle, MemberExit, NodeReport, Still, Uses
from shoal.model.storage import PHASES, READ_MBS, WRITE_MBS, Storage
from storm.datasets import fetched
from storm.naps import Naps, Nights, Sleepy
from storm.timeline import Timeline
from storm.training import Trainer, Training
from storm.witness import End, Witness

KILLED_CODE = 137
TERMINATED_CODE = 143
CANNOT_START_CODE = 127
IDLE_REPORT_MS = 300
LEASES_MS = 1_000  # between two looks at members whose leases may be over
START_MS = 400  # of members with GPUs


class Fate(NamedTuple):
    """What a virtual process does, unless it is stopped."""

    duration_ms: int | None  # None: until it is stopped
    code: int = 0
    # From SIGTERM to its end; None: it ignores SIGTERM and has to be killed.
    stopping_ms: int | None = 0
    stopped_code: int = TERMINATED_CODE
    training: Training | None = None  # None: it reports no steps
    rests_ms: int = 0  # it uses its GPUs for a moment and then rests this long; 0: it never rests
    getting_ms: int = 0  # before it can start, for its package or environment
    shipping_ms: int = 0  # from its end until its output is stored


Fates = Callable[[Launch], Fate]


class Process:
    __slots__ = ("clock", "fate", "launch", "started_ms", "trainer")

    def __init__(
        self, launch: Launch, fate: Fate, trainer: Trainer | None, started_ms: int
    ) -> None:
        self.started_ms = started_ms
        self.launch = launch
        self.fate = fate
        self.trainer = trainer
        self.clock = Sleepy()


class StormNode:
    """Reports its whole inventory when it changes, and every `heartbeat_ms` anyway."""

    def __init__(
        self,
        spec: NodeSpec,
        *,
        timeline: Timeline,
        fates: Fates,
        witness: Witness,
        heartbeat_ms: int,
        out: Callable[[NodeReport | Still], None],
        saved: dict[str, int],
        nights: Nights | None = None,
        pairs: Callable[[str, str, Tour], tuple[Pair, ...]] | None = None,
        clock: Callable[[], int] = int,
    ) -> None:
        self._clock = clock  # its own, which leases count by
        self._pairs = pairs  # what it measures on a tour
        self.spec = spec
        self.incarnation = 0
        self.book: NodeBook | None = None  # None: it is off
        self.processes: dict[MemberRef, Process] = {}
        self._timeline = timeline
        self._fates = fates
        self._witness = witness
        self._heartbeat_ms = heartbeat_ms
        self._out = out
        self._saved = saved
        self._slow = False
        self.broken = False  # its checks fail
        self.exits: tuple[MemberExit, ...] = ()  # on its disk while it is off
        self.sick = False  # its disk is full: nothing can be started
        self.bare = False  # it has none of the programs that jobs want
        self.hung = False  # a mount that every member needs does not answer
        self._hogged = False
        self.end: tuple[int, str] | None = None  # when it ends, as far as it knows, and why
        self._left: list[MemberRef] = []  # they outlive the node
        self._holdings: tuple[Held, ...] = ()  # on its disk, whether it is on or off
        self._unshipped: dict[MemberRef, MemberExit] = {}  # their output is on the way
        self._nights = nights or Nights()
        self._naps = Naps(
            timeline,
            self._nights,
            clock=lambda ref: self.processes[ref].clock if ref in self.processes else None,
            wakened=self._go_on,
            dies=self._dies,
            report=self.report,
        )

    @property
    def up(self) -> bool:
        return self.book is not None

    def boot(self, spec: NodeSpec | None = None) -> None:
        """Begin a new life, perhaps with other hardware."""
        assert not self.up, f"{self.spec.id} is on already"
        self.end_left()
        self.spec = spec or self.spec
        self.incarnation += 1
        self.book = NodeBook(self.spec, self.incarnation, self.exits)
        self.book.leases.clock = self._clock
        self.end = None
        self._witness.booted(self.spec, self.incarnation)
        self._beat(self.incarnation)
        if self._heartbeat_ms > LEASES_MS:
            self._look_at_leases(self.incarnation)

    def lose_keeper(self) -> None:
        """The agent dies with its keeper; what members have started lives on until `end_left`."""
        self._left, self.processes = list(self.processes), {}
        self.power_off()

    def end_left(self) -> None:
        left, self._left = self._left, []
        for ref in left:
            self._witness.ended(ref, None, End.NODE_DIED)

    def power_off(self) -> None:
        if self.book is not None:  # exits that were not reported yet are on the disk, too
            self.exits = (*self.book.exits.values(), *self._unshipped.values())
        self._unshipped = {}
        self.book = None
        processes, self.processes = self.processes, {}
        self._witness.powered_off(self.spec.id)
        for ref in processes:
            self._witness.ended(ref, None, End.NODE_DIED)

    def take(self, envelope: Envelope) -> None:
        """As the agent does, it answers commands with its inventory, even if nothing changed. So
        commands that are repeated for ever show as a storm of messages."""
        if self.book is None:
            return
        for command in self.book.take(envelope):
            match command:
                case Launch():
                    self._start(command)
                case Stop():
                    self._stop(command)
                case Sleep():
                    self._naps.sleep(self.book, command)
                case Wake():
                    self._naps.wake(self.book, command)
                case Check(tour=Tour() as tour) if self._pairs is not None:
                    pairs = self._pairs(self.spec.id, command.id, tour)
                    self.book.measured(CheckResult(id=command.id, pairs=pairs))
                case Check(storage=Storage() as storage):
                    self._store(self.book, command.id, storage)
                case Check():
                    self.book.measured(self._measure(command.id))
                case Prepare():
                    pass  # its processes take no time to start
                case Dismiss():
                    self.power_off()
                    return
        self.report()

    def _store(self, book: NodeBook, id_: str, storage: Storage) -> None:
        """It takes a while, in which the node may die."""

        def end() -> None:
            if self.book is book and id_ not in book.checks:
                book.measured(CheckResult(id=id_, figures={WRITE_MBS: 100, READ_MBS: 100}))
                self.report()

        self._timeline.after(PHASES * storage.phase_ms, end)

    def _measure(self, id_: str) -> CheckResult:
        return CheckResult(
            id=id_,
            busy=bool(self.processes),
            figures={"memory_mbs": 2_000 if self._slow else 10_000},
            faults=("a fan stands still",) if self.broken or self.sick else (),
        )

    def report(self, *, beat: bool = False) -> None:
        """`beat`: a word that nothing has changed will do."""
        if self.book is not None:
            say = self.book.heartbeat if beat else self.book.report
            now_ms = self._timeline.now_ms
            end_ms, self.book.ends_why = self.end or (None, "")
            self.book.ends_in_ms = None if end_ms is None else max(0, end_ms - now_ms)
            self.book.uses = tuple(self._uses()) if self._nights.tells(self.spec.id) else ()
            self.book.began = tuple(self._began(now_ms))
            self.book.holdings = self._holdings
            self.book.hangs = (Hung("/mnt", whole=True),) if self.hung else ()
            self._out(say(tuple(self._progress()), idle=tuple(self._idle(now_ms))))

    def _idle(self, now_ms: int) -> Iterator[Idle]:
        """One that sleeps uses no GPU either, but nobody asks it."""
        for ref, process in self.processes.items():
            rests_ms = process.fate.rests_ms
            if rests_ms and not process.clock.still:
                idle_ms = (process.clock.own_ms(now_ms) - process.started_ms) % rests_ms
                if idle_ms >= IDLE_REPORT_MS:
                    yield Idle(ref, idle_ms)

    def _began(self, now_ms: int) -> Iterator[Began]:
        """Those with GPUs whose start-up is over."""
        for ref, process in self.processes.items():
            if (
                process.launch.gpus
                and process.clock.own_ms(now_ms) >= process.started_ms + START_MS
            ):
                yield Began(ref, START_MS, "gpu")

    def _uses(self) -> Iterator[Uses]:
        for ref, process in self.processes.items():
            if not process.clock.still:
                yield Uses(ref, self._nights.gpu_mb(process.launch))

    @property
    def trains(self) -> bool:
        return any(process.trainer is not None for process in self.processes.values())

    @property
    def slow(self) -> bool:
        return self._slow

    @slow.setter
    def slow(self, slow: bool) -> None:
        list(self._progress())  # bring steps up to date at the old pace
        self._slow = slow

    def _progress(self) -> Iterator[Progress]:
        now_ms = self._timeline.now_ms
        for ref, process in self.processes.items():
            trainer = process.trainer
            if trainer is not None:
                own_ms = process.clock.own_ms(now_ms)
                trainer.go_on(own_ms, slow=self._slow)
                if trainer.hangs:
                    self._witness.hangs(ref)
                yield trainer.progress(own_ms)

    def lose_trace(self, ref: MemberRef) -> None:
        """The process is gone without a trace: no exit code, and not in the inventory."""
        assert self.book is not None
        del self.processes[ref]
        book = self.book
        naps = (book.dozing, book.asleep, book.waking, book.woke, book.refused)
        for page in (book.alive, book.stopping, *naps):
            page.pop(ref, None)
        self._witness.ended(ref, None, End.VANISHED)
        self.report()

    def _beat(self, incarnation: int) -> None:
        if self.up and self.incarnation == incarnation:
            self._end_leases()
            self.report(beat=True)
            self._timeline.after(self._heartbeat_ms, lambda: self._beat(incarnation))

    def _look_at_leases(self, incarnation: int) -> None:
        if self.up and self.incarnation == incarnation:
            self._end_leases()
            self._timeline.after(LEASES_MS, lambda: self._look_at_leases(incarnation))

    def _end_leases(self) -> None:
        assert self.book is not None
        for stop in self.book.end_leases():
            if stop.ref in self.processes or stop.ref in self.book.getting:
                self._witness.lapses(stop.ref, self.book.leases.lapsed[stop.ref])
                self._stop(stop)

    def _start(self, launch: Launch) -> None:
        fate = self._fates(launch)
        if launch.volumes:
            self._holdings = fetched(self._holdings, launch)
        if fate.getting_ms:
            assert self.book is not None
            self.book.gets(launch.ref, "brings its package")
            book = self.book
            self._timeline.after(fate.getting_ms, lambda: self._got(book, launch, fate))
        else:
            self._begin(launch, fate)

    def _got(self, book: NodeBook, launch: Launch, fate: Fate) -> None:
        """Unless it was stopped meanwhile, or the node has restarted."""
        if self.book is book and launch.ref in book.getting:
            book.begins(launch.ref)
            self._begin(launch, fate)
            self.report()

    @property
    def hogged(self) -> bool:
        """Other programs of the machine have every odd port, and take those that are given out."""
        return self._hogged

    @hogged.setter
    def hogged(self, hogged: bool) -> None:
        self._hogged = hogged
        for ref, process in list(self.processes.items()):
            if self._is_robbed(process.launch) and not process.clock.still:
                self._witness.could_not_start(ref, Fault.TAKEN)
                self._end(process, KILLED_CODE, End.LOST, Fault.TAKEN)

    def _is_robbed(self, launch: Launch) -> bool:
        return self._hogged and any(port % 2 for port in launch.ports)

    def _begin(self, launch: Launch, fate: Fate) -> None:
        if self.sick or self.bare or self.hung or self._is_robbed(launch):
            assert self.book is not None
            fault = Fault.START if self.sick else Fault.MISSING if self.bare else Fault.PORT
            if self.hung and not (self.sick or self.bare):
                fault = Fault.HANGS
            self._witness.could_not_start(launch.ref, fault)
            self.book.exited(launch.ref, CANNOT_START_CODE, "cannot start", fault=fault)
            return
        plan, now_ms = fate.training, self._timeline.now_ms
        trainer = Trainer(launch.ref, plan, self._saved, now_ms) if plan is not None else None
        process = Process(launch, fate, trainer, now_ms)
        self.processes[launch.ref] = process
        self._witness.started(self.spec.id, launch)
        self._go_on(launch.ref)

    def _go_on(self, ref: MemberRef) -> None:
        """It comes to its own end when it has worked for long enough, in its own time."""
        process = self.processes[ref]
        duration_ms, now_ms = process.fate.duration_ms, self._timeline.now_ms
        if duration_ms is None:
            return
        end_ms = process.started_ms + duration_ms

        def end() -> None:
            clock = process.clock
            if not clock.still and clock.own_ms(self._timeline.now_ms) >= end_ms:
                self._end(process, process.fate.code, End.OWN)

        self._timeline.after(end_ms - process.clock.own_ms(now_ms), end)

    def _stop(self, command: Stop) -> None:
        assert self.book is not None
        if command.ref in self.book.getting:
            self.book.exited(command.ref, STOPPED_BEFORE_START_CODE, "stopped before it started")
            return
        process = self.processes[command.ref]
        fate = process.fate
        self._witness.stop_arrived(command.ref)
        if process.clock.still:
            self._nights.note("sleeper stopped")
            if self._nights.gpu_mb(process.launch):  # a part of it is not in its processes
                self._plan_end(process, 0, KILLED_CODE, End.STOPPED)
                return
            self._naps.release(command.ref)
        if fate.stopping_ms is not None and fate.stopping_ms < command.grace_ms:
            self._plan_end(process, fate.stopping_ms, fate.stopped_code, End.STOPPED)
        else:
            self._plan_end(process, command.grace_ms, KILLED_CODE, End.STOPPED)

    def _dies(self, ref: MemberRef) -> None:
        """It could not be woken, so it is killed: its node is to blame."""
        self._witness.could_not_start(ref, Fault.WAKE)
        self._end(self.processes[ref], KILLED_CODE, End.LOST, Fault.WAKE)

    def _plan_end(self, process: Process, delay_ms: int, code: int, how: End) -> None:
        self._timeline.after(delay_ms, lambda: self._end(process, code, how))

    def _end(self, process: Process, code: int, how: End, fault: Fault = Fault.NONE) -> None:
        ref = process.launch.ref
        if self.book is not None and self.processes.get(ref) is process:
            del self.processes[ref]
            self._witness.ended(ref, code, how)
            self.book.ends(ref)
            stopped = ref in self.book.stopping
            trained = process.trainer
            spent, saved = None, 0
            if trained is not None:
                beat = trained.progress(self._timeline.now_ms).beat
                spent, saved = spent_of(beat), beat.saved_step
            exit_ = MemberExit(ref, code, "", stopped, fault=fault, spent=spent, saved_step=saved)
            self._unshipped[ref] = exit_
            if process.fate.shipping_ms:
                book = self.book
                self._timeline.after(process.fate.shipping_ms, lambda: self._shipped(book, exit_))
            else:
                self._shipped(self.book, exit_)

    def _shipped(self, book: NodeBook, exit_: MemberExit) -> None:
        """Unless the node has restarted."""
        if self.book is book:
            del self._unshipped[exit_.ref]
            book.exited(
                exit_.ref,
                exit_.code,
                fault=exit_.fault,
                spent=exit_.spent,
                saved_step=exit_.saved_step,
            )
            self.report()
