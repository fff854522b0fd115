"""An operator changes a node's labels or taints. What the node itself reports stays underneath."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.phases.round import Round
from shoal.model.events import NodeLabelled
from shoal.model.labels import NODE, changed, taint_pairs, taint_text
from shoal.model.node import LABELS_MAX, LabelChange
from shoal.model.report import Accepted, Answer, Refused, SetLabels

NAMED_MAX = 8


def set_labels(round_: Round, request: SetLabels) -> Answer:
    node = round_.state.nodes.get(request.node)
    if node is None:
        return Refused("node", f"there is no node {request.node}", missing=True)
    change = request.change
    if NODE in change.labels:
        return Refused("labels", f"{NODE} is the node's own name and cannot be changed")
    reported = taint_pairs(node.spec.taints)
    labels = _over(node.spec.labels, {**node.labels_set, **change.labels})
    taints = _over(reported, {**node.taints_set, **change.taints})
    for field, below, above in (
        ("labels", node.spec.labels, labels),
        ("taints", reported, taints),
    ):
        if len(changed(below, above)) > LABELS_MAX:
            return Refused(field, f"a node has at most {LABELS_MAX} of them; remove some: KEY-")
    if (labels, taints) == (node.labels_set, node.taints_set):
        return Accepted(node.id, "it already has them so")
    why = f"{_text(change)} by {request.who}"
    round_.emit(
        NodeLabelled(at_ms=round_.now_ms, node=node.id, labels=labels, taints=taints, why=why)
    )
    return Accepted(node.id)


def _over(reported: Mapping[str, str], wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """Only what differs from the node's own report is kept."""
    return {
        key: value
        for key, value in sorted(wanted.items())
        if value != reported.get(key) and (value is not None or key in reported)
    }


def _text(change: LabelChange) -> str:
    changes = [
        (f"{key}={value}" if value is not None else f"{key}-", "labelled")
        for key, value in change.labels.items()
    ]
    changes += [
        (taint_text(key, value) if value is not None else f"{key}-", "tainted")
        for key, value in change.taints.items()
    ]
    parts = []
    for verb in ("labelled", "tainted"):
        named = [text for text, done in changes if done == verb]
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        parts += [f"{verb} {', '.join(named[:NAMED_MAX])}{more}"] if named else []
    return " and ".join(parts)
