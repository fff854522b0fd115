"""A cluster on virtual time: simulated nodes and a controller, with a network between them.

The world itself is perfect. Faults come from outside: through the methods here and through the
network that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.model.commands import Envelope, Fence
from shoal.model.fabric import Pair, Tour
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import NodeGone, NodeReport, Request, Still
from storm.controller import Asked, Controller, Moment, Reply
from storm.disk import Disk
from storm.naps import Nights
from storm.network import Network
from storm.node import Fates, StormNode
from storm.timeline import Timeline
from storm.witness import Witness

FENCING_MS = 20
RESTART_MS = 2_000


def _all_alike(_: str, __: str, tour: Tour) -> tuple[Pair, ...]:
    """A network in which all links are the same."""
    return tuple(Pair(host.node, 20, 10_000, 10_000) for host in tour.hosts[: tour.own])


class World:
    def __init__(
        self,
        policy: Policy,
        fates: Fates,
        *,
        timeline: Timeline | None = None,
        network: Network | None = None,
        witness: Witness | None = None,
        heartbeat_ms: int = 1_000,
        batch_ms: int = 0,
        checked: bool = True,
        nights: Nights | None = None,
        clock: Timeline | None = None,
    ) -> None:
        """`clock`: the controller's own, if that is not the true time."""
        self._nights = nights
        self.clock_of: Callable[[str, int], int] = lambda _, now_ms: now_ms  # a node's own clock
        self.pairs: Callable[[str, str, Tour], tuple[Pair, ...]] = _all_alike
        self.timeline = timeline or Timeline()
        self.machines: dict[str, StormNode] = {}
        self.saved: dict[str, int] = {}  # the newest step that each job has saved
        self._fates = fates
        self._network = network or Network()
        self._witness = witness or Witness()
        self.disk = Disk(self._witness)
        self._heartbeat_ms = heartbeat_ms
        self._deaths: dict[str, NodeGone] = {}  # those known for certain, by node
        self.controller = Controller(
            clock or self.timeline,
            self.disk,
            policy,
            self._send,
            witness=self._witness,
            begun=self._resend,
            batch_ms=batch_ms,
            checked=checked,
        )

    # -- nodes -----------------------------------------------------------------------------

    def add_node(self, spec: NodeSpec) -> None:
        """A new server, already on."""
        machine = self.machines[spec.id] = StormNode(
            spec,
            timeline=self.timeline,
            fates=self._fates,
            witness=self._witness,
            heartbeat_ms=self._heartbeat_ms,
            out=self._report,
            saved=self.saved,
            nights=self._nights,
            pairs=lambda own, id_, tour: self.pairs(own, id_, tour),
            clock=lambda: self.clock_of(spec.id, self.timeline.now_ms),
        )
        machine.boot()

    def boot(self, node: str, spec: NodeSpec | None = None) -> None:
        self._deaths.pop(node, None)
        self.machines[node].boot(spec)

    def power_off(self, node: str, *, known: bool) -> None:
        """`known`: the engine knows it for certain, so nothing has to wait out a silence."""
        machine = self.machines[node]
        machine.power_off()
        if known:
            gone = NodeGone(node, machine.incarnation, "its agent died", machine.exits)
            self._deaths[node] = gone
            self._notify(gone)

    def kill_keeper(self, node: str, linger_ms: int) -> None:
        """The engine ends what is left, which takes a while, and only then says that the node is
        dead."""
        machine = self.machines[node]
        incarnation = machine.incarnation
        machine.lose_keeper()
        gone = NodeGone(node, incarnation, "its agent died", machine.exits)

        def announce() -> None:
            if not machine.up and machine.incarnation == incarnation:
                machine.end_left()
                self._deaths[node] = gone
                self._notify(gone)

        self.timeline.after(linger_ms, announce)

    def _fence(self, command: Fence) -> None:
        """As the local engine does, which needs no network; it then starts the node again."""
        machine = self.machines[command.node]

        def boot() -> None:
            if not machine.up:
                self.boot(command.node)

        def end() -> None:
            if machine.up and machine.incarnation == command.incarnation:
                self.power_off(command.node, known=True)
                self.timeline.after(RESTART_MS, boot)

        self.timeline.after(FENCING_MS, end)

    def lose_trace(self, node: str, ref: MemberRef) -> None:
        self.machines[node].lose_trace(ref)

    # -- the controller --------------------------------------------------------------------

    def start_controller(self) -> None:
        if not self.controller.up:
            self.controller.start()

    def _resend(self) -> None:
        """Every node reports its inventory, and known deaths are reported again."""
        for gone in self._deaths.values():
            self._notify(gone)
        for machine in self.machines.values():
            machine.report()

    def crash_controller(self, moment: Moment, down_ms: int) -> None:
        """It dies at the next such moment, and is started again after `down_ms`."""
        controller = self.controller
        controller.crashed = lambda: self.timeline.after(down_ms, self.start_controller)
        if moment is Moment.IDLE:
            controller.crash()
        else:
            controller.crash_at = moment

    def ask(self, request: Request, reply: Reply, patience_ms: int | None = None) -> None:
        """The answer may never come: the controller may be down, crash, or fail to store the step.
        A client with `patience_ms` leaves after that time."""
        if self.controller.up:
            asked = Asked(request, reply, self._witness)
            self._witness.asked(request)
            self.controller.ask(asked, request)
            if patience_ms is not None:
                self.timeline.after(patience_ms, asked.leave)

    # -- messages --------------------------------------------------------------------------

    def _report(self, report: NodeReport | Still) -> None:
        node = report.node if isinstance(report, Still) else report.spec.id
        for delay_ms in self._network.to_controller(node):
            self._to_controller(delay_ms, lambda: self._hear(report))

    def _hear(self, report: NodeReport | Still) -> None:
        if isinstance(report, NodeReport):
            self.controller.hear(report)
        elif not self.controller.still(report):
            for delay_ms in self._network.to_node(report.node):
                self.timeline.after(delay_ms, self.machines[report.node].report)

    def _notify(self, gone: NodeGone) -> None:
        delay_ms = self._network.death_notice()
        self._to_controller(delay_ms, lambda: self.controller.gone(gone))

    def _to_controller(self, delay_ms: int, deliver: Callable[[], None]) -> None:
        """Connections die with a controller: messages on their way to it reach no other."""
        life = self.controller.life

        def arrive() -> None:
            if self.controller.up and self.controller.life == life:
                deliver()

        if self.controller.up:
            self.timeline.after(delay_ms, arrive)

    def _send(self, node: str, envelope: Envelope) -> None:
        for command in envelope.commands:
            if isinstance(command, Fence):
                self._fence(command)
        for delay_ms in self._network.to_node(node):
            self.timeline.after(delay_ms, lambda: self.machines[node].take(envelope))
