"""The cluster timeline of the report: which job held which GPU, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.model.node import NodeSpec
from shoal.sim.replay.metrics import Outcome, time_text

RECTANGLES_MAX = 5_000  # more would only be slow to draw
ROWS_MAX = 64  # GPUs
JOB_COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b",
    "#b279a2", "#ff9da6", "#9d755d", "#86a8d1", "#c2a83e", "#7a9e7e",
)  # fmt: skip


def timeline(
    outcome: Outcome, nodes: Sequence[NodeSpec], unit: tuple[str, float]
) -> dict[str, Any]:
    """GPUs from top to bottom, time from left to right, a colour for each job."""
    shown, offsets, height = _sampled(nodes)
    segments = outcome.segments
    picked = [index for index, node in enumerate(segments.node) if node in offsets]
    # Only the longest are visible at all.
    picked.sort(key=lambda index: segments.begin_ms[index] - segments.end_ms[index])
    bars: dict[int, dict[str, list[Any]]] = {}
    for index in picked[:RECTANGLES_MAX]:
        begin_ms, end_ms = segments.begin_ms[index], segments.end_ms[index]
        row, node = segments.row[index], segments.node[index]
        bar = bars.setdefault(
            row % len(JOB_COLOURS), {"x": [], "base": [], "y": [], "w": [], "t": []}
        )
        for first, count in _runs(segments.mask[index] or not outcome.levels.in_gpus):
            bar["base"].append(round(begin_ms / unit[1], 4))
            bar["x"].append(round((end_ms - begin_ms) / unit[1], 4))
            bar["y"].append(offsets[node] + first + count / 2 - 0.5)
            bar["w"].append(count * 0.94)
            bar["t"].append(
                f"job in row {row} on {nodes[node].id}, {time_text((end_ms - begin_ms) / 1000)}"
            )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": bar["x"],
            "base": bar["base"],
            "y": bar["y"],
            "width": bar["w"],
            "text": bar["t"],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": JOB_COLOURS[colour], "line": {"width": 0}},
            "showlegend": False,
        }
        for colour, bar in sorted(bars.items())
    ]
    ticks = [offsets[node] + max(nodes[node].gpus, 1) / 2 - 0.5 for node in shown]
    layout = {
        "barmode": "overlay",
        "height": 110 + 7 * max(height, 24),
        "xaxis": {
            "title": {"text": f"{unit[0]} since the first submission"},
            "range": [0, outcome.levels.now_ms / unit[1]],
        },
        "yaxis": {
            "tickvals": ticks,
            "ticktext": [nodes[node].id for node in shown],
            "range": [height - 0.5, -0.5],
            "automargin": True,
            "showgrid": False,
        },
    }
    return {"data": data, "layout": layout}


def _sampled(nodes: Sequence[NodeSpec]) -> tuple[list[int], dict[int, int], int]:
    """Nodes evenly over the cluster, as many as have room; where each begins; rows in all."""
    gpus = max((node.gpus for node in nodes), default=0) or 1
    count = min(len(nodes), max(ROWS_MAX // gpus, 1))
    shown = [index * len(nodes) // count for index in range(count)]
    offsets, height = {}, 0
    for index in shown:
        offsets[index] = height
        height += max(nodes[index].gpus, 1) + 1  # and a gap between two nodes
    return shown, offsets, max(height - 1, 1)


def _runs(mask: int) -> list[tuple[int, int]]:
    """Neighbouring bits together: 0b1011 is [(0, 2), (3, 1)]."""
    runs, first = [], 0
    while mask:
        first += (skipped := (mask & -mask).bit_length() - 1)
        mask >>= skipped
        count = ((mask + 1) & -(mask + 1)).bit_length() - 1
        runs.append((first, count))
        first += count
        mask >>= count
    return runs
