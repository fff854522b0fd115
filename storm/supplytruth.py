"""What is promised about ordered nodes: never more than allowed, never dearer than allowed, and no
machine is given back while something runs there, unless it cannot be reached. The join token of an
order lets each of its machines in, and nobody after them."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.identity import KeySet
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined
from shoal.core.state.events.supply import NodesOrdered, OrderEnded
from shoal.model.policy import Policy
from shoal.model.supply import Provision
from storm.contacts import Contacts
from storm.jobtruth import JobTruth
from storm.lives import Lives, Untruth
from storm.timeline import Timeline

TOKEN_OF = "the join token of "  # with which a machine joined


class SupplyTruth:
    def __init__(
        self,
        timeline: Timeline,
        policy: Policy,
        lives: Lives,
        jobs: Mapping[str, JobTruth],
        contacts: Contacts,
    ) -> None:
        self._timeline = timeline
        self._policy = policy
        self._lives = lives
        self._jobs = jobs
        self._contacts = contacts
        self._orders: dict[str, NodesOrdered] = {}  # in the log, and not ended there
        self._numbers: set[str] = set()
        self._came: set[tuple[str, str]] = set()  # orders, and nodes that joined by them
        self._sent: dict[str, tuple[int, list[str]]] = {}  # order -> when, nodes that are heard

    def see(self, event: Event) -> None:
        match event:
            case PolicyChanged():
                self._policy = event.policy
            case NodesOrdered():
                if event.order in self._numbers:
                    raise Untruth(f"{event.order} was placed twice")
                self._numbers.add(event.order)
                self._orders[event.order] = event
                self._within_bounds(event)
            case OrderEnded():
                del self._orders[event.order]
            case NodeJoined():
                self._came.add((event.spec.order, event.spec.id))
            case KeySet() if event.who.startswith(TOKEN_OF):
                order, node = event.who.removeprefix(TOKEN_OF), event.key.node
                if (order, node) in self._came or order not in self._orders:
                    raise Untruth(f"the join token of {order} let {node} in again")

    def _within_bounds(self, event: NodesOrdered) -> None:
        one = event.supply
        nodes = [n for o in self._orders.values() if o.supply.name == one.name for n in o.nodes]
        if len(nodes) > one.most:
            raise Untruth(f"{one.name} was asked for {len(nodes)} nodes, but most is {one.most}")
        if one.ceiling and len(nodes) * one.price > one.ceiling:
            raise Untruth(f"{one.name} costs {len(nodes) * one.price}, above {one.ceiling}")
        if len(event.nodes) != one.lot or len(set(nodes)) != len(nodes):
            raise Untruth(f"{event.order} is not one lot of new names: {event.nodes}")

    def holds(self, held: Mapping[str, Provision]) -> None:
        """What the supplier has or will bring."""
        for one in {command.supply.name: command.supply for command in held.values()}.values():
            nodes = sum(
                len(command.nodes) for command in held.values() if command.supply.name == one.name
            )
            if nodes > one.most:
                raise Untruth(f"{one.name} brings {nodes} nodes, but most is {one.most}")

    def released(self, order: str, nodes: tuple[str, ...]) -> None:
        """The controller asks to have the order ended."""
        now_ms = self._timeline.now_ms
        reached = [
            node for node in nodes if self._contacts.silent_ms(node, now_ms) < self._policy.grace_ms
        ]
        self._sent.setdefault(order, (now_ms, reached))
        for node in reached:
            self._nothing_runs(order, node, since_ms=0)

    def ends(self, order: str, nodes: tuple[str, ...]) -> None:
        """The supplier does it: nothing was started there in between."""
        if order in self._sent:
            since_ms, reached = self._sent[order]
            for node in nodes:
                if node in reached:
                    self._nothing_runs(order, node, since_ms)

    def _nothing_runs(self, order: str, node: str, since_ms: int) -> None:
        for life in self._lives.on_node(node):
            if life.ref not in self._jobs[life.ref.job].given_up and life.started_ms >= since_ms:
                raise Untruth(f"{order} is given back, but {life.ref} runs on {node}")
