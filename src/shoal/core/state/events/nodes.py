"""What happens to nodes."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.core.books.baseline import count, learn
from shoal.core.books.failures import refute
from shoal.core.state.apply_job import member_over
from shoal.core.state.apply_queue import unclaim_on
from shoal.core.state.apply_room import (
    add_node,
    change_kind,
    close,
    drop_node,
    file_again,
    gained,
    open_up,
    replace_node,
    set_end,
    set_intent,
)
from shoal.core.state.asked import kind_of
from shoal.core.state.events.base import ClusterEvent, NodeEvent, Reader
from shoal.core.state.state import Node, State
from shoal.model.fabric import Fabric
from shoal.model.health import CheckResult, Record, Standing, Suspicion
from shoal.model.job import MemberStatus
from shoal.model.node import End, NodeHealth, NodeIntent, NodeSpec
from shoal.model.phrases import because, printable

INTENT_WORDS = {
    NodeIntent.OPEN: "is open for jobs again",
    NodeIntent.CORDONED: "is cordoned: nothing new starts on it",
    NodeIntent.DRAINING: "is being drained: its jobs move to other nodes",
    NodeIntent.REMOVED: "was removed from the cluster",
}
STANDING_WORDS = {
    Standing.OK: "is healthy",
    Standing.SUSPECT: "is suspected to be slow or faulty",
    Standing.QUARANTINED: "is in quarantine",
}


class NodeJoined(NodeEvent, frozen=True, kw_only=True):
    """`incarnation` grows each time the node's agent starts. `instead`: a node that is gone for
    long is forgotten, and the new one takes its place."""

    spec: NodeSpec
    incarnation: int
    instead: str = ""

    def apply(self, state: State) -> None:
        node = state.nodes.get(self.node)
        if node is None:
            index = drop_node(state, self.instead) if self.instead else len(state.order)
            node = Node(spec=self.spec, index=index, incarnation=self.incarnation)
            add_node(state, node)
        elif self.incarnation != node.incarnation:
            replace_node(state, node, self.spec, self.incarnation)
        if node.intent is NodeIntent.REMOVED or node.leaving:
            set_intent(state, node, NodeIntent.OPEN)
            node.leaving, node.closed_from = False, None
        node.dead = False
        _set_health(state, node, NodeHealth.JOINING, self)

    def phrase(self) -> str:
        place = f" at {self.spec.place}" if self.spec.place else ""
        return f"joined{place}{because(self.why)}"


class NodeReady(NodeEvent, frozen=True, kw_only=True):
    def apply(self, state: State) -> None:
        _set_health(state, state.nodes[self.node], NodeHealth.READY, self)

    def phrase(self) -> str:
        return f"is ready{because(self.why)}"


class NodeSilent(NodeEvent, frozen=True, kw_only=True, tag="NodeSuspected"):
    """The node is out of contact. The tag is the name before 0.2, so that old logs can be read."""

    def apply(self, state: State) -> None:
        _set_health(state, state.nodes[self.node], NodeHealth.SILENT, self)

    def phrase(self) -> str:
        return f"is silent{because(self.why)}"


class NodeLost(NodeEvent, frozen=True, kw_only=True):
    """`dead`: known to be gone, so this incarnation can never report again; otherwise silent."""

    incarnation: int
    dead: bool

    def apply(self, state: State) -> None:
        node = state.nodes[self.node]
        _set_health(state, node, NodeHealth.LOST, self)
        node.dead = self.dead
        if node.own_end is not None:
            set_end(state, node, None, node.set_end)  # its next life says when that ends
        state.heard.contacts.pop(node.id, None)
        unclaim_on(state, node.id)
        for ref, job in list(state.placed[node.id].items()):
            job.members[ref.member].status = MemberStatus.LOST
            member_over(state, job, ref.member, self.at_ms)

    def phrase(self) -> str:
        return f"{'died' if self.dead else 'was given up'}{because(self.why)}"


class NodeIntended(NodeEvent, frozen=True, kw_only=True):
    """`leaving`: the node itself asked to leave; no operator did. `ending`: its end is near."""

    intent: NodeIntent
    leaving: bool = False
    ending: bool = False

    def apply(self, state: State) -> None:
        node = state.nodes[self.node]
        before = node.intent
        close(state, node)
        set_intent(state, node, self.intent)
        node.intent_why, node.intent_ms = self.why, self.at_ms
        node.leaving = self.leaving
        node.closed_from = before if self.ending else None
        open_up(state, node)
        if self.intent is NodeIntent.REMOVED and node.end is not None:
            set_end(state, node, None, None)
        if self.intent is NodeIntent.DRAINING:
            for job in state.placed[node.id].values():
                state.agenda.attention[job.id] = None

    def phrase(self) -> str:
        return f"{INTENT_WORDS[self.intent]}{because(self.why)}"


class NodeEnding(NodeEvent, frozen=True, kw_only=True):
    """Until when the node lives; None: no end is known any more. `own`: the node itself said so;
    otherwise an operator did. Both may be known, and the earlier one counts."""

    end: End | None
    own: bool

    def apply(self, state: State) -> None:
        node = state.nodes[self.node]
        own, wanted = (self.end, node.set_end) if self.own else (node.own_end, self.end)
        set_end(state, node, own, wanted)

    def phrase(self) -> str:
        if self.end is not None:
            return self.why
        whose = "of its own" if self.own else "that an operator set"
        return f"has no end {whose}{because(self.why)}"


class NodeLabelled(NodeEvent, frozen=True, kw_only=True):
    """All that people have changed of the node's labels and taints; None: removed."""

    labels: dict[str, str | None] = {}
    taints: dict[str, str | None] = {}

    def apply(self, state: State) -> None:
        """Running jobs stay where they are; the next placement sees the new labels."""
        node = state.nodes[self.node]
        node.labels_set, node.taints_set = self.labels, self.taints
        change_kind(state, node, kind_of(state.looks_at, node))
        if node.schedulable:
            gained(state, state.rooms[node.index])

    def phrase(self) -> str:
        return f"was {self.why}" if self.why else "has new labels or taints"


class NodeChecked(NodeEvent, frozen=True, kw_only=True):
    """The node was measured, and its figures were compared with the usual ones."""

    result: CheckResult
    passed: bool

    def apply(self, state: State) -> None:
        if self.passed and not self.result.error:
            learn(state.fleet, self.node, state.nodes[self.node].spec.kind, self.result)
            refute(state.failures, self.node)
        count(state.fleet, self.node, self.result)

    def phrase(self) -> str:
        return f"{'passed' if self.passed else 'failed'} a check{because(self.why)}"


class FabricMeasured(ClusterEvent, frozen=True, kw_only=True):
    """A tour has ended: what it showed of the network between the nodes that took part."""

    id: str
    nodes: tuple[str, ...]
    fabric: Fabric  # with what earlier tours showed of other nodes
    why: str = ""

    def apply(self, state: State) -> None:
        state.fabric = self.fabric
        file_again(state)

    @property
    def subject(self) -> str:
        return "the network"

    def sentence(self) -> str:
        return printable(self.why)


class NodeJudged(NodeEvent, frozen=True, kw_only=True):
    """The node's standing has changed: suspect, in quarantine, or ok again."""

    record: Record

    def apply(self, state: State) -> None:
        node = state.nodes[self.node]
        close(state, node)
        node.record = self.record
        open_up(state, node)
        if node.record.standing is Standing.OK:
            state.troubled.pop(node.id, None)
            return
        state.troubled[node.id] = None
        if node.record.standing is Standing.QUARANTINED:
            unclaim_on(state, node.id)
            for job in state.placed[node.id].values():
                state.agenda.attention[job.id] = None

    def phrase(self) -> str:
        return f"{STANDING_WORDS[self.record.standing]}{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        """A node's standing may quote anybody's jobs: shown if the reader's own led to it."""
        return reader.sees_all or bool(self._own(reader))

    def concealed(self, reader: Reader) -> Self:
        record, own = self.record, self._own(reader)
        why = record.why if own[-1].why in record.why else ""
        shown = Record(standing=record.standing, since_ms=record.since_ms, why=why, suspicions=own)
        return msgspec.structs.replace(self, record=shown, why=why).rendered(reader)

    def rendered(self, reader: Reader) -> Self:
        record = self.record.rendered(reader.text)
        return msgspec.structs.replace(self, record=record, why=reader.text(self.why))

    def _own(self, reader: Reader) -> tuple[Suspicion, ...]:
        suspicions = self.record.suspicions
        return tuple(one for one in suspicions if one.job and reader.sees_job(one.job))


def _set_health(
    state: State,
    node: Node,
    health: NodeHealth,
    event: NodeEvent,
) -> None:
    close(state, node)
    node.health = health
    node.since_ms = event.at_ms
    node.why = event.why
    open_up(state, node)
