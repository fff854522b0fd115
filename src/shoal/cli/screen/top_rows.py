"""The columns of `shoal top` for jobs, nodes and services, how they sort, and its map of GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shoal.cli.screen.alarms import ASLEEP
from shoal.cli.screen.show import Cell, Column, state_cell
from shoal.cli.screen.tables import whole_parts
from shoal.forms.units import duration_text
from shoal.model.columns import nodes_text, place_of, shape_text
from shoal.model.feed import JobLine, NodeLine
from shoal.model.ids import in_order
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import GpuSample, NodeSample
from shoal.model.views import ServiceView, StatusView

if TYPE_CHECKING:
    from rich.text import Text


HOT_C = 85


class Seen(msgspec.Struct, kw_only=True):
    """One look at the cluster. `number` grows when it changes."""

    status: StatusView
    now_ms: int
    number: int = 0
    jobs: dict[str, JobLine] = {}
    nodes: dict[str, NodeLine] = {}
    services: dict[str, ServiceView] = {}
    samples: dict[str, NodeSample] = {}
    places: dict[str, list[str]] = {}  # the nodes of each job


def places_of(nodes: dict[str, NodeLine]) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for node in nodes.values():
        for job in (*(held.job for held in node.held), *node.asleep):
            if job:
                found.setdefault(job, {})[node.id] = None
    return {job: sorted(there, key=natural) for job, there in found.items()}


class Shown(NamedTuple):
    """One column. `order`: numbers sort before words."""

    column: Column
    cell: Callable[[Seen, Any], Cell]
    order: Callable[[Seen, Any], float | str]


# -- jobs ------------------------------------------------------------------------------------


def elapsed_ms(seen: Seen, job: JobLine) -> int:
    begin = job.running_ms if job.state != "waiting" else 0
    return max(0, (job.nap_ms or seen.now_ms) - (begin or job.submitted_ms))


def _where(seen: Seen, job: JobLine) -> str:
    return f"at {job.cluster}" if job.cluster else nodes_text(seen.places.get(job.id, []))


def _left_ms(job: JobLine) -> int | None:
    known = job.step_us and job.steps
    return max(0, job.steps - job.step) * job.step_us // 1000 if known else None


def _step(job: JobLine) -> Cell:
    if job.elements:
        return Cell(f"{job.done}/{job.elements}")
    text = f"{job.step}/{job.steps}" if job.steps else str(job.step or "")
    return Cell(text, "red" if job.slow else "")


def _left(job: JobLine) -> str:
    left_ms = _left_ms(job)
    return "" if left_ms is None else duration_text(left_ms)


def _map_cell(job: JobLine) -> Cell:
    active = job.gpus and job.size and job.state != "asleep"
    return Cell(*letter(job.id)) if active else Cell("")


def _use(seen: Seen, job: JobLine) -> float | None:
    """How busy its GPUs are, in per cent, where a driver tells."""
    found = [gpu.busy_milli for gpu, _ in _own_gpus(seen, job) if gpu.busy_milli is not None]
    return sum(found) / len(found) / 10 if found else None


def _memory(seen: Seen, job: JobLine) -> float | None:
    """How full the memory of its GPUs is, in per cent; of shared ones it has only a part."""
    found = [
        gpu.memory_milli
        for gpu, milli in _own_gpus(seen, job)
        if gpu.memory_milli is not None and milli == WHOLE_GPU_MILLI
    ]
    return sum(found) / len(found) / 10 if found else None


def _own_gpus(seen: Seen, job: JobLine) -> Iterator[tuple[GpuSample, int]]:
    for name in seen.places.get(job.id, ()) if job.gpus and seen.samples else ():
        sample, node = seen.samples.get(name), seen.nodes.get(name)
        for held in node.held if node is not None and sample is not None else ():
            if held.job == job.id and sample is not None:
                some = [sample.gpus[gpu] for gpu in held.gpus if gpu < len(sample.gpus)]
                yield from ((gpu, held.milli) for gpu in some)


JOBS = (
    Shown(Column("JOB", rank=1), lambda _, j: Cell(j.id, "bold"), lambda _, j: place_of(j.id)),
    Shown(Column("MAP", rank=1), lambda _, j: _map_cell(j), lambda _, j: -j.size * j.gpus),
    Shown(Column("STATE", rank=1), lambda _, j: state_cell(j.state), lambda _, j: j.state),
    Shown(
        Column("SHAPE", right=True, rank=1),
        lambda _, j: Cell(shape_text(j)),
        lambda _, j: -(j.size or j.members) * j.gpus,
    ),
    Shown(
        Column("GPU", right=True),
        lambda s, j: _percent(_use(s, j)),
        lambda s, j: -(_use(s, j) or -1.0),
    ),
    Shown(
        Column("MEM", right=True),
        lambda s, j: _percent(_memory(s, j)),
        lambda s, j: -(_memory(s, j) or -1.0),
    ),
    Shown(
        Column("TIME", right=True, rank=1),
        lambda s, j: Cell(duration_text(elapsed_ms(s, j)), "dim"),
        lambda s, j: -elapsed_ms(s, j),
    ),
    Shown(Column("STEP", right=True, rank=1), lambda _, j: _step(j), lambda _, j: -j.step),
    Shown(
        Column("LOSS", right=True, rank=1),
        lambda _, j: Cell("" if j.loss is None else f"{j.loss:.4g}"),
        lambda _, j: float("inf") if j.loss is None else j.loss,
    ),
    Shown(Column("USER"), lambda _, j: Cell(j.user), lambda _, j: j.user),
    Shown(
        Column("NODES"),
        lambda s, j: Cell(_where(s, j)),
        lambda s, j: _where(s, j),
    ),
    Shown(
        Column("LEFT", right=True),
        lambda _, j: Cell(_left(j), "dim"),
        lambda _, j: float("inf") if _left_ms(j) is None else float(_left_ms(j) or 0),
    ),
    Shown(Column("TENANT"), lambda _, j: Cell(j.tenant), lambda _, j: j.tenant),
    Shown(Column("NAME", flexible=True, rank=2), lambda _, j: Cell(j.name), lambda _, j: j.name),
)

# -- nodes -----------------------------------------------------------------------------------


def held_of(node: NodeLine) -> int:
    return len({gpu for held in node.held for gpu in held.gpus})


def _gpus(seen: Seen, node: NodeLine, name: str) -> list[int]:
    sample = seen.samples.get(node.id)
    values = [getattr(gpu, name) for gpu in sample.gpus] if sample else []
    return [value for value in values if value is not None]


def _busy(seen: Seen, node: NodeLine) -> float | None:
    shares = _gpus(seen, node, "busy_milli")
    return sum(shares) / len(shares) / 10 if shares else None


def _percent(value: float | None) -> Cell:
    return Cell("" if value is None else f"{value:.0f}%")


def _sample(seen: Seen, node: NodeLine, name: str) -> float | None:
    sample = seen.samples.get(node.id)
    value = getattr(sample, name) if sample else None
    return None if value is None else value / 10


def _heat(seen: Seen, node: NodeLine) -> Cell:
    found = _gpus(seen, node, "temperature_c")
    return Cell(f"{max(found)}C", "red" if max(found) > HOT_C else "") if found else Cell("")


def jobs_on(node: NodeLine) -> list[str]:
    found = dict.fromkeys((*(held.job for held in node.held), *node.asleep))
    return [job for job in found if job]


def _power(seen: Seen, node: NodeLine) -> Cell:
    found = _gpus(seen, node, "power_w")
    return Cell(f"{sum(found)}W" if found else "")


NODES = (
    Shown(Column("NODE", rank=1), lambda _, n: Cell(n.id, "bold"), lambda _, n: n.id),
    Shown(Column("STATE", rank=1), lambda _, n: state_cell(n.state), lambda _, n: n.state),
    Shown(
        Column("GPUS", right=True, rank=1),
        lambda _, n: Cell(f"{held_of(n)}/{n.gpus}"),
        lambda _, n: -held_of(n),
    ),
    Shown(
        Column("BUSY", right=True, rank=1),
        lambda s, n: _percent(_busy(s, n)),
        lambda s, n: -(_busy(s, n) or 0.0),
    ),
    Shown(
        Column("POWER", right=True, rank=1),
        _power,
        lambda s, n: -sum(_gpus(s, n, "power_w")),
    ),
    Shown(
        Column("TEMP", right=True, rank=1),
        _heat,
        lambda s, n: -max(_gpus(s, n, "temperature_c"), default=0),
    ),
    Shown(
        Column("CPU", right=True, rank=1),
        lambda s, n: _percent(_sample(s, n, "cpu_milli")),
        lambda s, n: -(_sample(s, n, "cpu_milli") or 0.0),
    ),
    Shown(
        Column("MEMORY", right=True, rank=1),
        lambda s, n: _percent(_sample(s, n, "memory_milli")),
        lambda s, n: -(_sample(s, n, "memory_milli") or 0.0),
    ),
    Shown(Column("PLACE"), lambda _, n: Cell(n.place, "dim"), lambda _, n: n.place),
    Shown(
        Column("JOBS", flexible=True, rank=2),
        lambda _, n: Cell(",".join(jobs_on(n)), pretty=", ".join(jobs_on(n))),
        lambda _, n: -len(jobs_on(n)),
    ),
)

# -- services --------------------------------------------------------------------------------


def _ready(one: ServiceView) -> Cell:
    missing = one.ready < one.wanted and one.state not in ASLEEP
    return Cell(f"{one.ready}/{one.wanted}", "red" if missing else "")


SERVICES = (
    Shown(Column("SERVICE", rank=1), lambda _, v: Cell(v.name, "bold"), lambda _, v: v.name),
    Shown(Column("STATE", rank=1), lambda _, v: state_cell(v.state), lambda _, v: v.state),
    Shown(
        Column("READY", right=True, rank=1),
        lambda _, v: _ready(v),
        lambda _, v: v.ready - v.wanted,
    ),
    Shown(
        Column("RPS", right=True, rank=1),
        lambda _, v: Cell(f"{v.requests_per_s:.1f}"),
        lambda _, v: -v.requests_per_s,
    ),
    Shown(
        Column("FAILED", right=True, rank=1),
        lambda _, v: Cell(f"{v.failed_per_s:.1f}", "red" if v.failed_per_s else "dim"),
        lambda _, v: -v.failed_per_s,
    ),
    Shown(
        Column("MEAN-MS", right=True, rank=1),
        lambda _, v: Cell(f"{v.response_ms}"),
        lambda _, v: -v.response_ms,
    ),
    Shown(
        Column("IN-FLIGHT", right=True),
        lambda _, v: Cell(f"{v.in_flight}"),
        lambda _, v: -v.in_flight,
    ),
    Shown(
        Column("QUEUED", right=True, rank=1),
        lambda _, v: Cell(f"{v.queued}", "yellow" if v.queued else ""),
        lambda _, v: -v.queued,
    ),
    Shown(
        Column("VERSION", right=True), lambda _, v: Cell(f"{v.version}"), lambda _, v: -v.version
    ),
    Shown(
        Column("URL", flexible=True, rank=2), lambda _, v: Cell(v.url, "dim"), lambda _, v: v.url
    ),
)

COLUMNS: dict[str, tuple[Shown, ...]] = {"jobs": JOBS, "nodes": NODES, "services": SERVICES}


def words_of(seen: Seen, view: str, key: str) -> str:
    """What a filter looks at, in lower case."""
    if view == "jobs":
        job = seen.jobs[key]
        there = seen.places.get(key, [])
        parts = [job.id, job.name, job.user, job.tenant, job.state, job.service, *there]
    elif view == "nodes":
        node = seen.nodes[key]
        parts = [node.id, node.state, node.place, node.labels, node.model, *jobs_on(node)]
    else:
        service = seen.services[key]
        parts = [service.name, service.state, service.url]
    return " ".join(parts).lower()


# The map of `shoal top`: a letter for each GPU, by node; many nodes are condensed.


LETTERS = "abcdefghijklmnopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWYZ"  # x is taken
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow")
FREE, LOST, CLOSED, OTHERS, SHARED, FULL = "·", "x", "-", "?", "&", "#"
AWAY = {"lost", "silent", "joining"}
GAP = "  "
NAME_MAX = 24


def letter(job: str) -> tuple[str, str]:
    """A job's letter and color. Jobs of others have neither an id nor a letter."""
    if not job or job.startswith("@"):
        return OTHERS, "dim"
    number, index = in_order(job)
    at = number + max(0, index)
    return LETTERS[at % len(LETTERS)], STYLES[at % len(STYLES)]


def cells_of(node: NodeLine) -> list[tuple[str, str, str]]:
    """The sign, the color and the job of each GPU."""
    if node.state in AWAY:
        free = (LOST, "red", "")
    else:
        free = (FREE, "dim", "") if node.state == "ready" else (CLOSED, "yellow", "")
    cells = [free] * node.gpus
    for held in node.held:
        sign, style = letter(held.job)
        for gpu in held.gpus:
            if gpu < len(cells):
                shared = bool(cells[gpu][2])
                cells[gpu] = (SHARED if shared else sign, style, held.job or OTHERS)
    return cells


def gpu_map(nodes: Sequence[NodeLine], chosen: str, width: int, room: int) -> list[Text]:
    """At most `room` lines. `chosen`: the job whose GPUs stand out."""
    shown = [node for node in nodes if node.gpus]
    shown.sort(key=lambda node: natural(node.id))
    if not shown or room < 1 or width < 8:
        return []
    draw = _each_node if _lines_needed(shown, width) > room else _each_gpu
    return draw(shown, chosen, width, room)


def natural(name: str) -> list[tuple[int, str]]:
    """n2 before n10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part[:18]), "") if part.isdigit() else (0, part) for part in parts]


def legend(nodes: Sequence[NodeLine], room: int, width: int) -> str:
    """What the signs mean, as far as they are on the map."""
    cells = [cell for node in nodes[:500] for cell in cells_of(node)]
    signs = {cell[0] for cell in cells}
    words = {FREE: "free", LOST: "away", CLOSED: "closed", OTHERS: "others'", SHARED: "shared"}
    told = [f"{sign} {word}" for sign, word in words.items() if sign in signs]
    if any(job and sign not in (OTHERS, SHARED) for sign, _, job in cells):
        told.insert(0, "a-Z jobs")
    if condensed(nodes, room, width):
        told = ["0-9 tenths in use", f"{FULL} all", f"{LOST} away", "a sign for each node or more"]
    return whole_parts(told, width)


def condensed(nodes: Sequence[NodeLine], room: int, width: int) -> bool:
    found = [node for node in nodes if node.gpus]
    return bool(found) and _lines_needed(found, width) > room


def _entry(nodes: Sequence[NodeLine]) -> tuple[int, int]:
    name = min(NAME_MAX, max(len(node.id) for node in nodes))
    return name, name + 1 + max(node.gpus for node in nodes)


def _lines_needed(nodes: Sequence[NodeLine], width: int) -> int:
    _, entry = _entry(nodes)
    return -(-len(nodes) // max(1, (width + len(GAP)) // (entry + len(GAP))))


def _each_gpu(nodes: Sequence[NodeLine], chosen: str, width: int, _room: int) -> list[Text]:
    from rich.text import Text

    name, entry = _entry(nodes)
    count = max(1, (width + len(GAP)) // (entry + len(GAP)))
    lines = []
    for first in range(0, len(nodes), count):
        line = Text()
        for node in nodes[first : first + count]:
            line.append(GAP if line else "")
            line.append(f"{node.id[:name]:<{name}} ", "" if node.state == "ready" else "yellow")
            for sign, style, job in cells_of(node):
                line.append(sign, f"{style} reverse" if job and job == chosen else style)
            line.append(" " * (entry - name - 1 - node.gpus))
        lines.append(line)
    return lines


def _each_node(nodes: Sequence[NodeLine], chosen: str, width: int, room: int) -> list[Text]:
    """A sign for each node, or for several; each line begins with the name of its first node."""
    from rich.text import Text

    name = min(NAME_MAX, max(len(node.id) for node in nodes))
    wide = max(1, width - name - 1)
    each = -(-len(nodes) // (wide * room))
    per_line = wide * each
    lines = []
    for first in range(0, len(nodes), per_line):
        line = Text(f"{nodes[first].id[:name]:<{name}} ")
        for at in range(first, min(first + per_line, len(nodes)), each):
            line.append(*_together(nodes[at : at + each], chosen))
        lines.append(line)
    return lines


def _together(nodes: Sequence[NodeLine], chosen: str) -> tuple[str, str]:
    gpus = held = 0
    mine = False
    for node in nodes:
        gpus += node.gpus
        taken = {gpu for one in node.held for gpu in one.gpus}
        held += len(taken)
        mine = mine or any(one.job == chosen for one in node.held if chosen)
    look = " reverse" if mine else ""
    if all(node.state in AWAY for node in nodes):
        return LOST, "red" + look
    if not held:
        closed = all(node.state != "ready" for node in nodes)
        return (CLOSED, "yellow" + look) if closed else (FREE, "dim" + look)
    if held >= gpus:
        return FULL, "green" + look
    return str(10 * held // gpus), "cyan" + look
