"""The simulated controller: drives one `Tick` on virtual time, recovers, and crashes anywhere."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence

from shoal.core.invariants import Violation
from shoal.core.state.state import State
from shoal.core.step import Step
from shoal.model.budget import Spending
from shoal.model.commands import Envelope
from shoal.model.neighbor import NeighborReport
from shoal.model.policy import Policy
from shoal.model.report import Answer, NodeGone, NodeReport, Request, Still
from shoal.model.service import ServiceLoad
from shoal.model.supply import SupplyCommand, SupplyReport
from shoal.ports import StoreError
from shoal.tick import Send, Stage, Tick, verify_all, verify_nothing, verify_waits
from storm.disk import Disk, image_of
from storm.timeline import Timeline
from storm.witness import Witness

Reply = Callable[[Answer], None]
RECOVERY_MS = 500  # between two attempts to load the state and store an epoch


def verify_changes(state: State, policy: Policy, done: Step, now_ms: int) -> None:
    """Looks at the whole state if the step had events: only they change facts. Whether each job
    that waits has a reason depends on the time, too."""
    verify = verify_all if done.events else verify_waits
    verify(state, policy, done, now_ms)


class Moment(enum.StrEnum):
    """Where in a tick a controller can die."""

    DECIDED = "before its decisions were stored"
    COMMITTED = "before its commands were sent"
    HALF_SENT = "while its commands were being sent"
    IDLE = "between two ticks"


class Asked:
    """A client that waits for an answer, until it is answered, refused or leaves."""

    def __init__(self, request: Request, reply: Reply, witness: Witness) -> None:
        self.taken = False  # by a step: from then on the request may have an effect
        self._request = request
        self._reply = reply
        self._witness = witness
        self._over = False

    def done(self) -> bool:
        return self._over

    def set_result(self, answer: Answer) -> None:
        self._over = True
        self._witness.answered(self._request, answer)
        self._reply(answer)

    def set_exception(self, _: Exception) -> None:
        self._over = True  # the client does not learn what became of its request

    def leave(self) -> None:
        if not self._over and not self.taken:
            self._witness.withdrawn(self._request)
        self._over = True


class Crash(Exception):
    """The controller dies here."""


class Controller:
    """`checked` verifies the state after every step, and compares states after every load."""

    def __init__(
        self,
        timeline: Timeline,
        disk: Disk,
        policy: Policy,
        send: Send,
        *,
        witness: Witness,
        begun: Callable[[], None],
        batch_ms: int = 0,
        checked: bool = True,
    ) -> None:
        self.up = False
        self.life = 0  # counts starts: messages to an earlier life are not heard
        self.steps = 0
        self.fences = False  # the engine can end nodes that do not answer
        self.twist: Callable[[NodeReport], NodeReport] = lambda report: report  # by nodes that lie
        self.supply: Callable[[Sequence[SupplyCommand]], None] = verify_nothing
        self.policy = policy  # in force, as far as its operators know
        self._wanted: Policy | None = policy  # not stored yet
        self.crash_at: Moment | None = None
        self.crashed: Callable[[], None] = lambda: None
        self._timeline = timeline
        self._disk = disk
        self._send = send
        self._witness = witness
        self._begun = begun  # an epoch is stored: nodes should report again
        self._batch_ms = batch_ms
        self._checked = checked
        self._drift_ms = 0  # how far the machine's clock is ahead; it outlives a controller
        self._image: bytes | None = None  # of the state that a crash took, as it was stored
        self._tick = self._new_tick()

    @property
    def state(self) -> State:
        assert self.readable, "the state is not what is stored"
        return self._tick.state

    @property
    def readable(self) -> bool:
        return self.up and self._tick.settled

    # -- what reaches it -------------------------------------------------------------------

    def hear(self, report: NodeReport) -> None:
        self._witness.heard(report)
        self._tick.hear(self.twist(report))
        self._poke()

    def still(self, still: Still) -> bool:
        """It waits for the next step. False: its node should report in full."""
        known = self._tick.still(still)
        if known:
            self._witness.still(still)
        return known

    def gone(self, gone: NodeGone) -> None:
        self._tick.gone(gone)
        self._poke()

    def ask(self, asked: Asked, request: Request) -> None:
        self._tick.ask(request, asked)
        self._poke()

    def served(self, load: ServiceLoad) -> None:
        if self._tick.served(load):
            self._poke()

    def neighbors(self, reports: Sequence[NeighborReport]) -> None:
        self._tick.neighbors(reports)
        self._poke()

    def supplied(self, report: SupplyReport) -> None:
        self._tick.supplied(report)
        self._poke()

    def _deliver_supplies(self, commands: Sequence[SupplyCommand]) -> None:
        self.supply(commands)

    def spent(self, spendings: tuple[Spending, ...]) -> None:
        self._tick.spent(spendings)
        self._poke()

    def drifted(self, drift_ms: int) -> None:
        self._drift_ms = drift_ms
        self._tick.drifted(drift_ms)
        if self.up:
            self._poke()

    def obey(self, policy: Policy) -> None:
        """An operator has written another policy; a controller that is down reads it later."""
        self.policy = self._wanted = policy
        if self.up:
            self._poke()

    # -- life and death --------------------------------------------------------------------

    def start(self) -> None:
        assert not self.up, "a controller is running already"
        self.up = True
        self.life += 1
        self._witness.started_over()
        self._tick = self._new_tick()
        self._begin(self.life)

    def _new_tick(self) -> Tick:
        verify = verify_changes if self._checked else verify_nothing
        tick = Tick(self._disk, self._wanted, self._deliver, fences=self.fences, verify=verify)
        tick.supply = self._deliver_supplies
        tick.drifted(self._drift_ms)
        self._poked = False
        self._wake_ms: int | None = None
        self._sends_left: int | None = None
        return tick

    def _begin(self, life: int) -> None:
        """Load the state and store an epoch, until both work."""
        if not self.up or self.life != life:
            return
        try:
            self._tick.load()
            self._compare()
            self._tick.begin(self._timeline.now_ms)
        except StoreError as error:
            self._tick.refuse(error)
            self._timeline.after(RECOVERY_MS, lambda: self._begin(life))
            return
        self._round()
        self._begun()

    def _compare(self) -> None:
        if self._checked:
            loaded = image_of(self._tick.state)
            if self._image is not None and loaded != self._image:
                raise Violation("the state that was loaded is not the state that was lost")
            if image_of(self._disk.load_from_start()) != loaded:
                raise Violation("the whole log does not lead to the state that was loaded")
        self._image = None

    def keep_snapshot(self) -> None:
        with contextlib.suppress(StoreError):  # as in life, it is only tried again
            self._disk.snapshot(*self._tick.snapshot())

    def crash(self, image: bytes | None = None) -> None:
        """What is not on the disk is lost; messages on their way to the nodes are not."""
        self._image = image
        if image is None and self._tick.stage is Stage.READY:
            self._image = image_of(self._tick.state)
        self.up = False
        self.crash_at = None
        self.crashed()

    # -- one round -------------------------------------------------------------------------

    def _poke(self) -> None:
        if not self._poked:
            self._poked = True
            life = self.life
            self._timeline.after(self._batch_ms, lambda: self._take_up(life))

    def _take_up(self, life: int) -> None:
        if self.up and self.life == life and self._poked:
            self._round()

    def _plan_wake(self, wake_ms: int | None) -> None:
        self._wake_ms = wake_ms
        if wake_ms is not None:
            life = self.life
            self._timeline.at(wake_ms, lambda: self._wake(life, wake_ms))

    def _wake(self, life: int, wake_ms: int) -> None:
        if self.up and self.life == life and self._wake_ms == wake_ms:
            self._round()

    def _round(self) -> None:
        self._poked = False
        self._wake_ms = None
        tick, crash_at = self._tick, self.crash_at
        if tick.stage is not Stage.READY:
            return  # it recovers; the round that follows sees the inbox
        tick.fences = self.fences
        if self._wanted is not None:
            tick.policy = self._wanted
        before = image_of(tick.state) if crash_at is Moment.DECIDED else None
        self.steps += 1
        if tick.receive():
            tick.look_up(self._disk)
        decision = tick.decide(self._timeline.now_ms)
        for asked in decision.replies:
            assert isinstance(asked, Asked)
            asked.taken = True
        if crash_at is Moment.DECIDED:
            self.crash(before)
            return
        try:
            tick.commit()
        except StoreError as error:
            tick.fail(error)
            life = self.life
            self._timeline.after(RECOVERY_MS, lambda: self._begin(life))
            return
        if not decision.step.events:
            self._witness.committed([])
        self._witness.stored(decision.report.nodes)
        self.policy, self._wanted = tick.state.policy, None
        if crash_at is Moment.COMMITTED:
            self.crash(image_of(tick.state))
            return
        if crash_at is Moment.HALF_SENT:
            self._sends_left = len({command.node for command in decision.step.commands}) // 2
        try:
            tick.finish()
            if crash_at is Moment.HALF_SENT:
                raise Crash
        except Crash:
            self.crash()
            return
        self._plan_wake(decision.step.wake_ms)

    def _deliver(self, node: str, envelope: Envelope) -> None:
        if self._sends_left is not None:
            if not self._sends_left:
                raise Crash
            self._sends_left -= 1
        self._witness.sent(envelope)
        self._send(node, envelope)
