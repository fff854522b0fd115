"""`shoal label` and `shoal taint`: what nodes are called, and what keeps jobs away from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, verb

if TYPE_CHECKING:
    from shoal.model.node import LabelChange

WORDS = Argument(
    "words",
    "NODE... CHANGE...",
    "Node ids, then KEY=VALUE to set and KEY- to remove.",
    nargs=-1,
    required=True,
)


@verb(WORDS)
def label(words: tuple[str, ...], json: bool, home: Path) -> int:
    """Set or remove labels of nodes.

    Jobs choose nodes by their labels: `shoal run --where pool=a100`. What you
    set here stays when the node or the controller restarts, and goes before
    what the node reports of itself. Running jobs stay where they are.

    Examples:
      shoal label n1 pool=a100 zone=b
      shoal label n1 n2 zone-
      shoal nodes --labels
    """
    return _change(words, json, home, taints=False)


@verb(WORDS)
def taint(words: tuple[str, ...], json: bool, home: Path) -> int:
    """Keep jobs away from nodes, unless they tolerate it.

    A taint is a name, with a value if you like. A new job starts on the node
    only if it names the taint: `shoal run --tolerates maintenance`. Running
    jobs stay where they are; `shoal drain` moves them.

    Examples:
      shoal taint n1 maintenance
      shoal taint n1 n2 reserved=vision
      shoal taint n1 maintenance-
    """
    return _change(words, json, home, taints=True)


def _change(words: tuple[str, ...], json: bool, home: Path, *, taints: bool) -> int:
    from shoal.cli import cluster
    from shoal.cli.each import each
    from shoal.forms import readers
    from shoal.forms.failure import USAGE, BadField, Failure

    nodes, changes = _sorted(words, bare=taints)
    try:
        change = _change_of(readers.changes("CHANGE", changes, bare=taints), taints=taints)
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    asked = list(dict.fromkeys(cluster.node_id(text) for text in nodes))
    if not asked or not changes:
        example = "shoal taint n1 maintenance" if taints else "shoal label n1 pool=a100"
        raise Failure(f"name a node, then what to change, e.g. {example}", USAGE)
    with cluster.connect(home) as client:
        return each(
            asked,
            lambda node: cluster.on_node(client, node, lambda c: c.set_labels(node, change)),
            "is changed",
            json,
        )


def _sorted(words: tuple[str, ...], *, bare: bool) -> tuple[list[str], list[str]]:
    """The nodes come first. A change has `=` or ends with `-`. A taint may also be a bare name:
    then only the last word is one."""
    count = 0
    for word in words:
        if "=" in word or word.endswith("-") or not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", word):
            break
        count += 1
    if bare and count == len(words):
        count -= 1
    return list(words[:count]), list(words[count:])


def _change_of(changes: dict[str, str | None], *, taints: bool) -> LabelChange:
    from shoal.model.node import LabelChange

    return LabelChange(taints=changes) if taints else LabelChange(labels=changes)
