"""The simulated control loop: collect, step, verify, commit, send, answer; and crash anywhere."""

from __future__ import annotations

import enum
from collections.abc import Callable

from shoal.core.state.apply import apply
from shoal.core.state.invariants import Violation, verify, verify_touched
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.budget import Spending
from shoal.model.commands import Command, Envelope
from shoal.model.events import ControllerStarted
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Answer, NodeGone, NodeReport, Report, Request, Submit
from shoal.model.service import ServiceLoad
from shoal.sim.storm.agenda import Agenda
from shoal.sim.storm.disk import Disk, image_of
from shoal.sim.storm.witness import Witness

Reply = Callable[[Answer], None]
Send = Callable[[str, Envelope], None]


class Moment(enum.StrEnum):
    """Where in a round a controller can die."""

    DECIDED = "before its decisions were stored"
    COMMITTED = "before its orders were sent"
    HALF_SENT = "while its orders were being sent"
    IDLE = "between two rounds"


class Controller:
    """`checked` runs the invariants after every step, and compares states after every restart."""

    def __init__(
        self,
        agenda: Agenda,
        disk: Disk,
        policy: Policy,
        send: Send,
        *,
        witness: Witness,
        batch_ms: int = 0,
        checked: bool = True,
    ) -> None:
        self.state = State()
        self.up = False
        self.life = 0  # counts starts: what belongs to an earlier life is not heard
        self.steps = 0
        self.crash_at: Moment | None = None
        self.crashed: Callable[[], None] = lambda: None
        self._agenda = agenda
        self._disk = disk
        self.fences = False  # the engine can end nodes that do not answer
        self.policy = policy
        self._send = send
        self._witness = witness
        self._batch_ms = batch_ms
        self._checked = checked
        self._spendings: tuple[Spending, ...] = ()
        self._drift_ms = 0  # how far the machine's clock is ahead; no controller's life changes it
        self._forget_inbox()
        self._image: bytes | None = None  # of the last life's state at its last commit

    # -- what reaches it -------------------------------------------------------------------

    def hear(self, report: NodeReport) -> None:
        self._witness.heard(report)
        self._nodes.append(report)
        self._poke()

    def learn_gone(self, gone: NodeGone) -> None:
        self._gone.append(gone)
        self._poke()

    def ask(self, request: Request, reply: Reply) -> None:
        self._asked.append((request, reply))
        self._poke()

    def served(self, load: ServiceLoad) -> None:
        """What the gateway sees of a service; as in life, only news is worth a step."""
        self._loads[load.service] = load
        if self.state.loads.get(load.service) != load:
            self._poke()

    def spent(self, spendings: tuple[Spending, ...]) -> None:
        """What a ledger would say of all tenants."""
        self._spendings = spendings
        self._poke()

    def drifted(self, drift_ms: int) -> None:
        self._drift_ms = drift_ms
        if self.up:
            self._poke()

    def obey(self, policy: Policy) -> None:
        """An operator has written another policy; a controller that is down reads it later."""
        self.policy = policy
        if self.up:
            self._poke()

    # -- life and death --------------------------------------------------------------------

    def start(self) -> None:
        assert not self.up, "a controller is running already"
        self.up = True
        self.life += 1
        self._forget_inbox()
        self.state = self._disk.load()
        self._compare_with_last_life()
        started = ControllerStarted(at_ms=self._agenda.now_ms, epoch=self.state.epoch + 1)
        apply(self.state, started)
        self._disk.append([started])
        self._witness.committed([started])
        self._numbers: dict[str, int] = {}
        self._round()

    def keep_snapshot(self) -> None:
        self._disk.keep_snapshot(self.state)

    def crash(self, image: bytes | None = None) -> None:
        """All that is not on the disk is gone; what is on its way to the nodes is not."""
        self._image = image or image_of(self.state)
        self.up = False
        self.crash_at = None
        self.state = State()
        self.crashed()

    def _forget_inbox(self) -> None:
        self._nodes: list[NodeReport] = []
        self._gone: list[NodeGone] = []
        self._asked: list[tuple[Request, Reply]] = []
        self._loads: dict[str, ServiceLoad] = {}
        self._spendings = ()
        self._poked = False
        self._wake_ms: int | None = None

    def _compare_with_last_life(self) -> None:
        if self._checked and self._image is not None:
            if image_of(self.state) != self._image:
                raise Violation("the state that was loaded is not the state that was lost")
            if image_of(self._disk.load_from_start()) != self._image:
                raise Violation("the whole log does not lead to the state that was lost")

    # -- one round -------------------------------------------------------------------------

    def _poke(self) -> None:
        if not self._poked:
            self._poked = True
            life = self.life
            self._agenda.after(self._batch_ms, lambda: self._take_up(life))

    def _take_up(self, life: int) -> None:
        if self.up and self.life == life and self._poked:
            self._round()

    def _plan_wake(self, wake_ms: int | None) -> None:
        self._wake_ms = wake_ms
        if wake_ms is not None:
            life = self.life
            self._agenda.at(wake_ms, lambda: self._wake(life, wake_ms))

    def _wake(self, life: int, wake_ms: int) -> None:
        if self.up and self.life == life and self._wake_ms == wake_ms:
            self._round()

    def _round(self) -> None:
        asked = [one for one in self._asked if not self._answered_already(*one)]
        report = Report(
            requests=tuple(request for request, _ in asked),
            nodes=tuple(self._nodes),
            gone=tuple(self._gone),
            services=tuple(self._loads.values()),
            spendings=self._spendings,
            drift_ms=self._drift_ms,
            fences=self.fences,
        )
        self._forget_inbox()
        image = image_of(self.state) if self.crash_at is Moment.DECIDED else None
        self.steps += 1
        taken = step(self.state, report, self.policy, self._agenda.now_ms)
        self._check(taken)
        if self.crash_at is Moment.DECIDED:
            self.crash(image)
            return
        self._disk.append(taken.events, taken.finished)
        self._witness.committed(taken.events)
        if self.crash_at is Moment.COMMITTED:
            self.crash()
            return
        self._dispatch(taken.commands)
        if self.crash_at is Moment.HALF_SENT:
            self.crash()
            return
        for (_, reply), answer in zip(asked, taken.answers, strict=True):
            reply(answer)
        self._plan_wake(taken.wake_ms)

    def _answered_already(self, request: Request, reply: Reply) -> bool:
        """As in life, the store knows the keys of finished jobs, and the state those of others."""
        if not isinstance(request, Submit) or request.key not in self._disk.keys:
            return False
        reply(Accepted(self._disk.keys[request.key], "this submission was already accepted"))
        return True

    def _check(self, taken: Step) -> None:
        if self._checked:
            now_ms = self._agenda.now_ms
            due_ms = self.state.look_ms  # a look at the whole queue that is due comes next
            settled = taken.wake_ms != now_ms and (due_ms is None or due_ms > now_ms)
            verify(self.state, self.policy, now_ms, settled=settled)
            verify_touched(self.state, taken.events)

    def _dispatch(self, commands: list[Command]) -> None:
        by_node: dict[str, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        nodes = list(by_node)
        if self.crash_at is Moment.HALF_SENT:
            nodes = nodes[: len(nodes) // 2]
        for node in nodes:
            number = self._numbers[node] = self._numbers.get(node, 0) + 1
            self._send(node, Envelope(self.state.epoch, number, tuple(by_node[node])))
