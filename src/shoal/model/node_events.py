"""What can happen to nodes."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.eventbase import ClusterEvent, NodeEvent, Reader
from shoal.model.fabric import Fabric
from shoal.model.health import CheckResult, Record, Standing, Suspicion
from shoal.model.node import End, NodeIntent, NodeSpec
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

    def phrase(self) -> str:
        place = f" at {self.spec.place}" if self.spec.place else ""
        return f"joined{place}{because(self.why)}"


class NodeReady(NodeEvent, frozen=True, kw_only=True):
    def phrase(self) -> str:
        return f"is ready{because(self.why)}"


class NodeSilent(NodeEvent, frozen=True, kw_only=True, tag="NodeSuspected"):
    """The node is out of contact. The tag is the name before 0.2, so that old logs can be read."""

    def phrase(self) -> str:
        return f"is silent{because(self.why)}"


class NodeLost(NodeEvent, frozen=True, kw_only=True):
    """`dead`: known to be gone, so this incarnation can never report again; otherwise silent."""

    incarnation: int
    dead: bool

    def phrase(self) -> str:
        return f"{'died' if self.dead else 'was given up'}{because(self.why)}"


class NodeIntended(NodeEvent, frozen=True, kw_only=True):
    """`leaving`: the node itself asked to leave; no operator did. `ending`: its end is near."""

    intent: NodeIntent
    leaving: bool = False
    ending: bool = False

    def phrase(self) -> str:
        return f"{INTENT_WORDS[self.intent]}{because(self.why)}"


class NodeEnding(NodeEvent, frozen=True, kw_only=True):
    """Until when the node lives; None: no end is known any more. `own`: the node itself said so;
    otherwise an operator did. Both may be known, and the earlier one counts."""

    end: End | None
    own: bool

    def phrase(self) -> str:
        if self.end is not None:
            return self.why
        whose = "of its own" if self.own else "that an operator set"
        return f"has no end {whose}{because(self.why)}"


class NodeLabelled(NodeEvent, frozen=True, kw_only=True):
    """All that people have changed of the node's labels and taints; None: removed."""

    labels: dict[str, str | None] = {}
    taints: dict[str, str | None] = {}

    def phrase(self) -> str:
        return f"was {self.why}" if self.why else "has other labels or taints"


class NodeChecked(NodeEvent, frozen=True, kw_only=True):
    """The node was measured, and its figures were compared with the usual ones."""

    result: CheckResult
    passed: bool

    def phrase(self) -> str:
        return f"{'passed' if self.passed else 'failed'} a check{because(self.why)}"


class FabricMeasured(ClusterEvent, frozen=True, kw_only=True):
    """A tour has ended: what it showed of the network between the nodes that took part."""

    id: str
    nodes: tuple[str, ...]
    fabric: Fabric  # with what earlier tours showed of other nodes
    why: str = ""

    @property
    def subject(self) -> str:
        return "the network"

    def sentence(self) -> str:
        return printable(self.why)


class NodeJudged(NodeEvent, frozen=True, kw_only=True):
    """The node's standing has changed: suspect, in quarantine, or ok again."""

    record: Record

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
