"""What was measured between pairs of nodes, as one table of rows.

A tour of 1,000 nodes has half a million pairs, so everything here works on whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.model.fabric import Fabric
from shoal.model.health import CheckResult

# Figures that only the check of one node has: its agent does not know tours.
ORDINARY = ("cpu_one_mbs", "cpu_all_mbs")
Rows = list[list[int]]


class Table:
    """The figures between nodes, by their places in `names`; 0: not measured. `unmeasured` says why
    nothing is known of a node. A fault with such a node says nothing about a link."""

    def __init__(self, names: Sequence[str]) -> None:
        size = len(names)
        self.names = list(names)
        self.at = {name: place for place, name in enumerate(names)}
        self.rates: Rows = [[0] * size for _ in names]  # MB/s, from the row to the column
        # The slower direction of each link: a collective waits for it. The faster one shows how the
        # nodes are wired even if the other is ill.
        self.slower: Rows = []
        self.faster: Rows = []
        self.waits: Rows = [[0] * size for _ in names]  # latency in µs
        self.faults: dict[tuple[int, int], str] = {}
        self.unmeasured: dict[str, str] = {}
        self.links = 0  # that were measured


def table_of(names: Sequence[str], results: Mapping[str, CheckResult]) -> Table:
    """If both ends measured a link, the slower figures count."""
    table = Table(names)
    for name in names:
        if why := _unmeasured(results.get(name)):
            table.unmeasured[name] = why
    faults: dict[tuple[int, int], str] = {}
    for node, result in results.items():
        own = table.at.get(node)
        if own is None:
            continue
        rates, waits = table.rates[own], table.waits[own]
        for pair in result.pairs:
            other = table.at.get(pair.peer)
            if other is None or other == own:
                continue
            key = (own, other) if own < other else (other, own)
            if pair.fault:
                faults.setdefault(key, pair.fault)
                continue
            forth, back, wait = pair.mbs or 1, pair.back_mbs or 1, pair.latency_us or 1
            if known := rates[other]:
                forth, back = min(known, forth), min(table.rates[other][own], back)
                wait = max(waits[other], wait)
            else:
                table.links += 1
            rates[other], table.rates[other][own] = forth, back
            waits[other] = table.waits[other][own] = wait
    for row, column in zip(table.rates, zip(*table.rates, strict=True), strict=True):
        table.slower.append([a if a < b else b for a, b in zip(row, column, strict=True)])
        table.faster.append([b if a < b else a for a, b in zip(row, column, strict=True)])
    for (low, high), fault in sorted(faults.items()):
        gone = table.names[low] in table.unmeasured or table.names[high] in table.unmeasured
        if not gone and not table.rates[low][high]:
            table.faults[low, high] = fault
    return table


def _unmeasured(result: CheckResult | None) -> str:
    if result is None:
        return "it did not answer"
    if not result.pairs and any(figure in result.figures for figure in ORDINARY):
        return "its agent is older than tours"
    if result.error:
        return result.error
    if result.faults and not result.pairs:
        return result.faults[0]
    return ""


def quantile(values: Sequence[int], milli: int) -> int:
    """Of values in any order; the upper one of two; 0 if there is none."""
    if not values:
        return 0
    return sorted(values)[min(len(values) - 1, len(values) * milli // 1000)]


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
