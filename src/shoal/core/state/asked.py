"""What of the nodes' labels and taints matters: only what some job asks about makes nodes differ.

Labels that differ on every node would otherwise give every node a kind of its own, and the
scheduler walks the kinds (ADR 39).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.model.labels import NODE, OTHER_TAINT, words_of
from shoal.model.resources import Kind

if TYPE_CHECKING:
    from shoal.core.state.facts import Node


class Asked(NamedTuple):
    """What some job asked about, taken apart."""

    words: Mapping[str, None]
    keys: tuple[str, ...]  # of labels
    whole: frozenset[str]  # labels of which every value matters


def taken_apart(words: Mapping[str, None]) -> Asked:
    labels = [word.partition("=") for word in words if not word.startswith("~")]
    keys = tuple(dict.fromkeys(key for key, _, _ in labels))
    return Asked(words, keys, frozenset(key for key, _, value in labels if value == "*"))


def kind_of(asked: Asked, node: Node) -> Kind:
    """The node's kind, with the labels and taints that some job asked about. All other taints look
    the same: no job tolerates them by name."""
    kind, taints, keys = node.spec.kind, node.taints, asked.keys
    if not keys and not taints:
        return kind
    words: list[str] = []
    kept: tuple[str, ...] = ()
    for key in keys:
        value = node.label(key)
        if value is not None:
            word = f"{key}={value}"
            if key in asked.words:
                words.append(key)
            if word in asked.words or key in asked.whole:
                words.append(word)
    if taints:
        named = {taint if _named(taint, asked.words) else OTHER_TAINT for taint in taints}
        kept = tuple(sorted(named))
    return Kind(*kind[:6], tuple(sorted(words)), kept)


def full_kind(node: Node) -> Kind:
    """The node's kind with all of its labels and taints, but its own name."""
    labels = {key: value for key, value in node.labels.items() if key != NODE}
    return node.spec.kind._replace(labels=words_of(labels), taints=node.taints)


def words_of_node(node: Node) -> set[str]:
    """Everything that is true of its labels."""
    return set(words_of(node.labels))


def _named(taint: str, asked: Mapping[str, None]) -> bool:
    return f"~{taint}" in asked or f"~{taint.partition('=')[0]}" in asked
