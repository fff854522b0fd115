"""Prints how a node's GPUs, CPUs and cards are joined: `shoal nodes NODE --tree`."""

from __future__ import annotations

from pathlib import Path

from shoal.cli import cluster
from shoal.cli.screen import show
from shoal.forms.failure import USAGE, Failure
from shoal.model.phrases import printable


def print_tree(node: str | None, tree: bool, json: bool, home: Path) -> None:
    if node is None:
        raise Failure("--tree: name a node, e.g. shoal nodes n3 --tree", USAGE)
    if not tree:
        raise Failure("NODE: is for --tree; for one node alone: shoal nodes --where node=N", USAGE)
    asked = cluster.node_id(node)
    with cluster.connect(home) as client:
        found = cluster.on_node(client, asked, lambda client: client.node_tree(asked))
    if json:
        show.as_json(found)
    elif not found.lines:
        show.note(f"{asked} shows no tree: it has no GPUs, or its agent could not read them")
    for text in () if json else found.lines:
        show.line(printable(text))
