"""The map of `shoal top`: a letter for each GPU, by node; many nodes are condensed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cli.screen.tables import whole_parts
from shoal.model.feed import NodeLine
from shoal.model.ids import in_order

if TYPE_CHECKING:
    from rich.text import Text

LETTERS = "abcdefghijklmnopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWYZ"  # x is taken
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow")
FREE, LOST, CLOSED, OTHERS, SHARED, FULL = "·", "x", "-", "?", "&", "#"
AWAY = {"lost", "silent", "joining"}
GAP = "  "
NAME_MAX = 24


def letter(job: str) -> tuple[str, str]:
    """A job's letter and colour. Jobs of others have neither an id nor a letter."""
    if not job or job.startswith("@"):
        return OTHERS, "dim"
    number, index = in_order(job)
    at = number + max(0, index)
    return LETTERS[at % len(LETTERS)], STYLES[at % len(STYLES)]


def cells_of(node: NodeLine) -> list[tuple[str, str, str]]:
    """The sign, the colour and the job of each GPU."""
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
