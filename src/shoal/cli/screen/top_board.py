"""The state of `shoal top`: the rows of each view, their order, and what the keys do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from shoal.cli.screen.alarms import ASLEEP
from shoal.cli.screen.show import Cell, Column, state_cell
from shoal.cli.verbs.ps import elapsed_ms, nodes_text, shape_text
from shoal.forms.units import duration_text, memory_text
from shoal.model.ids import in_order
from shoal.model.resources import cpus_text
from shoal.model.samples import NodeSample
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries
from shoal.model.views import JobRow, NodeView, ServiceView, StatusView

VIEWS = {"j": "jobs", "n": "nodes", "s": "services"}
PAGE = 10
SPARKS = "▁▂▃▄▅▆▇█"


class Seen(msgspec.Struct, kw_only=True):
    """One look at the cluster, with only what the view needs."""

    status: StatusView
    jobs: list[JobRow] = []
    nodes: list[NodeView] = []
    services: list[ServiceView] = []
    samples: dict[str, NodeSample] = {}


class Row(NamedTuple):
    key: str
    cells: list[Cell]
    order: list[float | str]  # the sort key of each column
    why: str


COLUMNS: dict[str, tuple[Column, ...]] = {
    "jobs": (
        Column("JOB", firm=True),
        Column("NAME"),
        Column("STATE", firm=True),
        Column("TENANT"),
        Column("SHAPE", right=True, firm=True),
        Column("TIME", right=True, firm=True),
        Column("STEP", right=True, firm=True),
        Column("LOSS", right=True, firm=True),
        Column("LEFT", right=True, firm=True),
        Column("BOUND"),
        Column("NODES", flexible=True),
    ),
    "nodes": (
        Column("NODE", firm=True),
        Column("STATE", firm=True),
        Column("GPUS", right=True, firm=True),
        Column("BUSY", right=True, firm=True),
        Column("POWER", right=True, firm=True),
        Column("TEMP", right=True, firm=True),
        Column("CPU", right=True, firm=True),
        Column("MEMORY", right=True, firm=True),
        Column("PLACE"),
        Column("JOBS", flexible=True),
    ),
    "services": (
        Column("SERVICE", firm=True),
        Column("STATE", firm=True),
        Column("READY", right=True, firm=True),
        Column("RPS", right=True, firm=True),
        Column("FAILED", right=True, firm=True),
        Column("MEAN-MS", right=True, firm=True),
        Column("IN-FLIGHT", right=True, firm=True),
        Column("QUEUED", right=True, firm=True),
        Column("VERSION", right=True, firm=True),
        Column("URL", flexible=True),
    ),
}


class Board:
    """`sort` is a column, or None for the cluster's own order."""

    def __init__(self) -> None:
        self.view = "jobs"
        self.sort: dict[str, int | None] = dict.fromkeys(COLUMNS)
        self.down: dict[str, bool] = dict.fromkeys(COLUMNS, False)
        self.cursor = 0
        self.over = False

    def press(self, key: str) -> bool:
        """Returns whether the view changed, so that other data is needed."""
        moves = {"up": -1, "down": 1, "page-up": -PAGE, "page-down": PAGE}
        columns = len(COLUMNS[self.view])
        sort = self.sort[self.view]
        if key in ("q", "ctrl-c"):
            self.over = True
        elif key in VIEWS and VIEWS[key] != self.view:
            self.view, self.cursor = VIEWS[key], 0
            return True
        elif key in moves:
            self.cursor = max(0, self.cursor + moves[key])
        elif key in ("home", "g"):
            self.cursor = 0
        elif key in ("right", ">"):
            self.sort[self.view] = 0 if sort is None else (sort + 1 if sort + 1 < columns else None)
        elif key in ("left", "<"):
            self.sort[self.view] = columns - 1 if sort is None else (sort - 1 if sort else None)
        elif key == "r":
            self.down[self.view] = not self.down[self.view]
        return False

    def rows(self, seen: Seen) -> list[Row]:
        """The sorted rows; moves the cursor onto one of them if there are any."""
        rows = ROWS[self.view](seen)
        column = self.sort[self.view]
        if column is not None:
            rows.sort(key=lambda row: _sortable(row.order[column]))
        if self.down[self.view]:
            rows.reverse()
        self.cursor = min(self.cursor, max(0, len(rows) - 1))
        return rows


def _sortable(value: float | str) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, value, "")


def job_rows(seen: Seen) -> list[Row]:
    rows = []
    for job in seen.jobs:
        took_ms = elapsed_ms(job, seen.status.now_ms)
        progress = job.progress
        step = loss = left = bound = ""
        if progress is not None:
            step = f"{progress.step}" + (f"/{progress.steps_total}" if progress.steps_total else "")
            loss = "" if progress.loss is None else f"{progress.loss:.4g}"
            left = "" if progress.left_ms is None else duration_text(progress.left_ms)
            bound = "" if progress.bound is None else progress.bound.kind.value
        slow = bool(progress and progress.slow)
        cells = [
            Cell(job.id, "bold"),
            Cell(job.name),
            state_cell(job.state),
            Cell(job.tenant),
            Cell(shape_text(job)),
            Cell(duration_text(took_ms), "dim"),
            Cell(step, "red" if slow else ""),
            Cell(loss),
            Cell(left, "dim"),
            Cell(bound),
            Cell(nodes_text(job.nodes)),
        ]
        order: list[float | str] = [
            _place(job.id),
            job.name,
            job.state,
            job.tenant,
            -float((job.size or job.members) * job.gpus),
            -float(took_ms),
            -float(progress.step if progress else -1),
            float(progress.loss) if progress and progress.loss is not None else float("inf"),
            float(progress.left_ms) if progress and progress.left_ms is not None else float("inf"),
            bound,
            nodes_text(job.nodes),
        ]
        rows.append(Row(job.id, cells, order, job.why))
    return rows


def node_rows(seen: Seen) -> list[Row]:
    rows = []
    for node in seen.nodes:
        sample = seen.samples.get(node.id) if node.health == "ready" else None
        busy = [g.busy_milli for g in sample.gpus if g.busy_milli is not None] if sample else []
        power = [g.power_w for g in sample.gpus if g.power_w is not None] if sample else []
        heat = (
            [g.temperature_c for g in sample.gpus if g.temperature_c is not None] if sample else []
        )
        held = node.gpus - node.gpus_free
        cpu = node.cpu_milli - node.cpu_milli_free
        used = sample.memory_milli if sample else None
        order: list[float | str] = [
            node.id,
            node.state,
            -float(held),
            -float(sum(busy)),
            -float(sum(power)),
            -float(max(heat, default=0)),
            -float(sample.cpu_milli or 0 if sample else 0),
            -float(used or 0),
            node.place,
            -float(len(node.jobs)),
        ]
        cells = [
            Cell(node.id, "bold"),
            state_cell(node.state),
            Cell(f"{held}/{node.gpus}"),
            Cell(f"{sum(busy) / len(busy) / 10:.0f}%" if busy else ""),
            Cell(f"{sum(power)}W" if power else ""),
            Cell(f"{max(heat)}C" if heat else "", "red" if heat and max(heat) > 85 else ""),
            Cell(_percent(sample.cpu_milli) if sample else f"{cpus_text(cpu)} held"),
            Cell(_percent(used) if sample else memory_text(node.memory_mb)),
            Cell(node.place),
            Cell(",".join(node.jobs)),
        ]
        rows.append(Row(node.id, cells, order, node.why))
    return rows


def service_rows(seen: Seen) -> list[Row]:
    rows = []
    for one in seen.services:
        cells = [
            Cell(one.name, "bold"),
            state_cell(one.state),
            Cell(
                f"{one.ready}/{one.wanted}",
                "red" if one.ready < one.wanted and one.state not in ASLEEP else "",
            ),
            Cell(f"{one.requests_per_s:.1f}"),
            Cell(f"{one.failed_per_s:.1f}", "red" if one.failed_per_s else "dim"),
            Cell(f"{one.response_ms}"),
            Cell(f"{one.in_flight}"),
            Cell(f"{one.queued}", "yellow" if one.queued else ""),
            Cell(f"{one.version}"),
            Cell(one.url, "dim"),
        ]
        order: list[float | str] = [
            one.name,
            one.state,
            float(one.ready - one.wanted),
            -one.requests_per_s,
            -one.failed_per_s,
            -float(one.response_ms),
            -float(one.in_flight),
            -float(one.queued),
            -float(one.version),
            one.url,
        ]
        rows.append(Row(one.name, cells, order, one.why))
    return rows


ROWS: dict[str, Callable[[Seen], list[Row]]] = {
    "jobs": job_rows,
    "nodes": node_rows,
    "services": service_rows,
}


def detail(series: JobSeries | NodeSeries | ServiceSeries | None, width: int) -> str:
    """The most useful curve of the selected row, in one line."""
    room = max(8, width - 40)
    match series:
        case JobSeries(points=points) if points:
            losses = [point.loss for point in points if point.loss is not None]
            steps = [point.step_ms for point in points if point.step_ms is not None]
            parts = []
            if losses:
                parts.append(f"loss {spark(losses, room // 2)} {losses[-1]:.4g}")
            if steps:
                parts.append(f"step {spark(steps, room // 2)} {steps[-1]:.0f} ms")
            return "   ".join(parts)
        case NodeSeries(at_ms=[_, *_]):
            cpu = [value for value in series.cpu if value is not None]
            busy = [value for value in _mean_busy(series) if value is not None]
            parts = [f"CPU {spark(cpu, room // 2, 1.0)} {cpu[-1]:.0%}"] if cpu else []
            if busy:
                parts.append(f"GPUs {spark(busy, room // 2, 1.0)} {busy[-1]:.0%}")
            return "   ".join(parts)
        case ServiceSeries(at_ms=[_, *_]):
            rates = [value or 0.0 for value in series.requests_per_s]
            slow = [value for value in series.p99_ms if value is not None]
            text = f"rps {spark(rates, room // 2)} {rates[-1]:.1f}"
            return text + (f"   p99 {spark(slow, room // 2)} {slow[-1]:.0f} ms" if slow else "")
        case _:
            return ""


def spark(values: Sequence[float], width: int, most: float | None = None) -> str:
    """All values in `width` characters; each is the mean of its part."""
    if not values:
        return ""
    width = min(width, len(values))
    parts = []
    for place in range(width):
        first, last = place * len(values) // width, (place + 1) * len(values) // width
        parts.append(sum(values[first:last]) / (last - first))
    low = 0.0 if most is not None else min(parts)
    high = max(parts) if most is None else most
    span = high - low
    return "".join(
        SPARKS[min(7, max(0, int(8 * (part - low) / span)))] if span > 0 else SPARKS[3]
        for part in parts
    )


def _mean_busy(series: NodeSeries) -> list[float | None]:
    if not series.gpus:
        return []
    columns = zip(*(gpu.busy for gpu in series.gpus), strict=True)
    means = []
    for column in columns:
        known = [value for value in column if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _percent(milli: int | None) -> str:
    return "" if milli is None else f"{milli / 10:.0f}%"


def _place(job_id: str) -> float:
    """Elements follow their array: j7, j7.0, j7.1, j8."""
    number, index = in_order(job_id)
    return number + (index + 1) / 1e9
