"""What can happen to nodes."""

from __future__ import annotations

from shoal.model.eventbase import EventBase, NodeEvent
from shoal.model.fabric import Fabric
from shoal.model.health import CheckResult, Record
from shoal.model.node import End, NodeIntent, NodeSpec


class NodeJoined(NodeEvent, frozen=True, kw_only=True):
    """`incarnation` grows each time the node's agent starts. `instead`: a node that is gone for
    long is forgotten, and the new one takes its place."""

    spec: NodeSpec
    incarnation: int
    instead: str = ""


class NodeReady(NodeEvent, frozen=True, kw_only=True):
    pass


class NodeSilent(NodeEvent, frozen=True, kw_only=True, tag="NodeSuspected"):
    """The node is out of contact. The tag is the name before 0.2, so that old logs can be read."""


class NodeLost(NodeEvent, frozen=True, kw_only=True):
    """`dead`: known to be gone, so this incarnation can never report again; otherwise silent."""

    incarnation: int
    dead: bool


class NodeIntended(NodeEvent, frozen=True, kw_only=True):
    """`leaving`: the node itself asked to leave; no operator did. `ending`: its end is near."""

    intent: NodeIntent
    leaving: bool = False
    ending: bool = False


class NodeEnding(NodeEvent, frozen=True, kw_only=True):
    """Until when the node lives; None: no end is known any more. `own`: the node itself said so;
    otherwise an operator did. Both may be known, and the earlier one counts."""

    end: End | None
    own: bool


class NodeLabelled(NodeEvent, frozen=True, kw_only=True):
    """All that people have changed of the node's labels and taints; None: removed."""

    labels: dict[str, str | None] = {}
    taints: dict[str, str | None] = {}


class NodeChecked(NodeEvent, frozen=True, kw_only=True):
    """The node was measured, and its figures were compared with the usual ones."""

    result: CheckResult
    passed: bool


class FabricMeasured(EventBase, frozen=True, kw_only=True):
    """A tour has ended: what it showed of the network between the nodes that took part."""

    id: str
    nodes: tuple[str, ...]
    fabric: Fabric  # with what earlier tours showed of other nodes
    why: str = ""


class NodeJudged(NodeEvent, frozen=True, kw_only=True):
    """The node's standing has changed: suspect, in quarantine, or ok again."""

    record: Record
