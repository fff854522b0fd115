"""How the time of a replay grows with jobs, nodes and the length of the queue: a table and a plot.

    python bench/growth.py [--svg docs/images/growth.svg]

Made-up jobs (seeded) through the whole simulator, CPU time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

from bench.figures import machine, table
from shoal.core.policies import SHIPPED
from shoal.sim.replay.clusters import Conditions, alike
from shoal.sim.replay.replay import replay
from shoal.sim.replay.traces import Arrival, Gangs, Trace, in_order

SIZES = ((1, 60), (2, 15), (4, 10), (8, 12), (16, 3))
MEAN_WORK_S = 4_000
AXES = {
    "jobs": [(jobs, 50, 0.9) for jobs in (1_000, 2_000, 4_000, 8_000)],
    "nodes": [(3_000, nodes, 0.9) for nodes in (25, 100, 400, 1_600)],
    "load": [(3_000, 50, load) for load in (0.8, 1.2, 1.8, 2.7)],
}


def made_up(jobs: int, nodes: int, load: float) -> Trace:
    """Lognormal run times, with arrivals that ask for the share LOAD of the cluster."""
    rng = random.Random(1)
    gangs = Gangs(8)
    sizes = rng.choices([s for s, _ in SIZES], [w for _, w in SIZES], k=jobs)
    mean_gpus = sum(sizes) / jobs
    gap_ms = MEAN_WORK_S * 1000 * mean_gpus / (nodes * 8 * load)
    at_ms, arrivals = 0.0, []
    for row, gpus in enumerate(sizes):
        at_ms += rng.expovariate(1 / gap_ms)
        work_ms = int(rng.lognormvariate(math.log(MEAN_WORK_S * 1000) - 0.72, 1.2))
        arrivals.append(Arrival(int(at_ms), max(1, work_ms), gangs.spec(gpus), row=row))
    return in_order("made up", arrivals)


def measure(jobs: int, nodes: int, load: float) -> tuple[float, int]:
    """CPU milliseconds per job, and the steps that it took."""
    trace = made_up(jobs, nodes, load)
    began = time.process_time()
    outcome = replay(trace, alike(nodes, gpus=8), SHIPPED["fair"], Conditions())
    return (time.process_time() - began) * 1000 / jobs, len(outcome.step_ns)


def svg(found: dict[str, list[tuple[float, float]]]) -> str:
    """One panel for each logarithmic axis; a flat line means that cost grows in proportion."""
    width, height, parts = 260, 200, []
    top = max(ms for points in found.values() for _, ms in points)
    for panel, (axis, points) in enumerate(found.items()):
        left = 50 + panel * (width + 40)
        low, high = math.log(points[0][0]), math.log(points[-1][0])
        dots = [
            (left + width * (math.log(x) - low) / (high - low), 20 + height * (1 - ms / top))
            for x, ms in points
        ]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#2a78c2" stroke-width="2"/>')
        for (x, y), (value, ms) in zip(dots, points, strict=True):
            parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="#2a78c2"/>')
            parts.append(f'<text x="{x - 8:.0f}" y="{y - 8:.0f}">{ms:.2f}</text>')
            parts.append(f'<text x="{x - 12:.0f}" y="{height + 38}">{value:g}</text>')
        parts.append(f'<text x="{left}" y="{height + 58}">{axis}: CPU ms per job</text>')
        frame = f'x="{left - 10}" y="10" width="{width + 20}" height="{height + 14}"'
        parts.append(f'<rect {frame} fill="none" stroke="#999"/>')
    total = 50 + len(found) * (width + 40)
    style = "<style>text{font:11px sans-serif;fill:#777}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height + 70}">'
        f"{style}{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--svg", type=Path, help="write the plot there")
    arguments = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    found: dict[str, list[tuple[float, float]]] = {}
    for axis, cases in AXES.items():
        found[axis] = []
        for case in cases:
            ms, steps = measure(*case)
            value = case[("jobs", "nodes", "load").index(axis)]
            found[axis].append((float(value), ms))
            rows.append((f"{axis} {value}", f"{ms:.2f}", f"{ms * case[0] / steps:.3f}"))
    print(machine())
    print(table(("", "CPU ms a job", "CPU ms a step"), rows))
    if arguments.svg:
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(svg(found))
    print(json.dumps({axis: [round(ms, 3) for _, ms in points] for axis, points in found.items()}))


if __name__ == "__main__":
    main()
