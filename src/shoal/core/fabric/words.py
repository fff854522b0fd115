"""What was measured of a node's links, in words."""

from __future__ import annotations

from shoal.model.fabric import Fabric


def weak_links(fabric: Fabric, node: str) -> list[str]:
    """One line for each weak link of the node, or for all of them together."""
    lines: list[str] = []
    for weak in fabric.weak:
        if node not in (weak.node, weak.peer):
            continue
        other = weak.peer if node == weak.node else weak.node
        what = f"weak link to {other}" if weak.peer else "weak links"
        rate = f"{weak.mbs:,} MB/s" if weak.mbs else "no traffic"
        usual = f", usually {weak.usual_mbs:,}" if weak.usual_mbs else ""
        lines.append(f"{what}: {rate}{usual}")
    return lines
