"""What of the nodes' labels and taints matters: only what some job asks about makes nodes differ.

Labels that differ on every node would otherwise give every node a kind of its own, and the
scheduler walks the kinds (ADR 39).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.model.labels import NODE, OTHER_TAINT, words_of

if TYPE_CHECKING:
    from shoal.core.state.facts import Node
    from shoal.model.resources import Kind


def kind_of(asked: Mapping[str, None], node: Node) -> Kind:
    """The node's kind, with the labels and taints that some job asked about. All other taints look
    the same: no job tolerates them by name."""
    kind, taints = node.spec.kind, node.taints
    if taints:
        kept = {taint if _named(taint, asked) else OTHER_TAINT for taint in taints}
        kind = kind._replace(taints=tuple(sorted(kept)))
    if asked:
        words = [
            word
            for key, value in node.labels.items()
            for word in (key, f"{key}={value}")
            if word in asked or (word != key and f"{key}=*" in asked)
        ]
        kind = kind._replace(labels=tuple(sorted(words)))
    return kind


def full_kind(node: Node) -> Kind:
    """The node's kind with all of its labels and taints, but its own name."""
    labels = {key: value for key, value in node.labels.items() if key != NODE}
    return node.spec.kind._replace(labels=words_of(labels), taints=node.taints)


def words_of_node(node: Node) -> set[str]:
    """Everything that is true of its labels."""
    return set(words_of(node.labels))


def _named(taint: str, asked: Mapping[str, None]) -> bool:
    return f"~{taint}" in asked or f"~{taint.partition('=')[0]}" in asked
