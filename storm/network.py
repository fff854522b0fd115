"""How messages travel between the controller and the nodes: here, always and at once."""

from __future__ import annotations

USUAL_DELAY_MS = 1


class Network:
    """A message becomes as many deliveries as delays are returned: none means it is lost."""

    def to_controller(self, _node: str) -> tuple[int, ...]:
        return (USUAL_DELAY_MS,)

    def to_node(self, _node: str) -> tuple[int, ...]:
        return (USUAL_DELAY_MS,)

    def death_notice(self) -> int:
        """How long the engine takes to report that a node is certainly gone."""
        return USUAL_DELAY_MS
