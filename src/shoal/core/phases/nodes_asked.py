"""The nodes that a request names, or all that are ready."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.state.state import Node, State
from shoal.model.node import NodeHealth
from shoal.model.report import Refused


def ready_nodes(state: State, names: Sequence[str]) -> list[Node] | Refused:
    if not names:
        return [node for node in state.order if node.health is NodeHealth.READY]
    found: list[Node] = []
    for name in dict.fromkeys(names):
        node = state.nodes.get(name)
        if node is None:
            return Refused("node", f"there is no node {name}", missing=True)
        if node.health is not NodeHealth.READY:
            return Refused("node", f"{name} is {node.health}: {node.why}")
        found.append(node)
    return found
