"""Draws `shoal top` as lines that fill the terminal exactly."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli.screen.gpu_map import condensed, gpu_map, legend
from shoal.cli.screen.show import Cell, Column, bar
from shoal.cli.screen.tables import GAP, cells_of, cut, shown, whole_parts
from shoal.cli.screen.top_board import Board
from shoal.cli.screen.top_rows import COLUMNS, Seen
from shoal.forms.units import duration_text
from shoal.model.phrases import printable

if TYPE_CHECKING:
    from rich.text import Text

NAME_MIN = 16  # the last column is cut to this before others are left out
ROWS_MIN = 5  # the map leaves this many lines for rows
MAP_SHARE = 3  # at most one line of this many is the map's
KEYS = ("q quit", "? help", "/ filter", "enter logs", "c cancel", "j n s view", "< > sort")
HELP = (
    ("j  n  s", "jobs, nodes, services"),
    ("up down", "choose a line; also page up, page down, home, end"),
    ("enter", "the logs of the chosen job; q or escape leads back"),
    ("c", "cancel the chosen job, after a question"),
    ("/", "show only lines with these words: names, ids, users, tenants, nodes, states; escape"
    " shows all again"),
    ("< >", "sort by another column; r reverses the order"),
    ("m", "show or hide the map of the GPUs"),
    ("q", "quit"),
)  # fmt: skip
ABOUT_THE_MAP = (
    "On the map each GPU is a letter: the one beside its job, in the column MAP. The GPUs of the"
    " chosen job stand out. With thousands of GPUs each sign is a node or several: tenths of its"
    " GPUs that are in use, # if all are."
)


class Around(NamedTuple):
    """What is shown around the rows."""

    url: str
    name: str = ""  # of the chosen row; in the table it may be cut
    why: str = ""
    curve: str = ""
    since_s: float | None = None  # the controller is away since then
    trouble: str = ""


def draw(board: Board, seen: Seen, around: Around, size: tuple[int, int]) -> list[Text]:
    """One line per line of the terminal, none wider than it."""
    from rich.text import Text

    width, height = size
    keys = board.keys(seen)
    lines = _head(seen, around, width)
    if board.mode == "help":
        lines += [Text(text) for text in _help(width)]
        return _filled(lines, [Text("any key leads back", style="reverse")], size)
    lines += _map(board, seen, width, height)
    lines.append(Text())
    foot = _foot(board, keys, around, width)
    room = max(1, height - len(lines) - len(foot) - 1)
    first = max(0, min(board.cursor - room // 2, len(keys) - room))
    items, columns = getattr(seen, board.view), COLUMNS[board.view]
    cells = [[one.cell(seen, items[key]) for one in columns] for key in keys[first : first + room]]
    titles = _titles(board)
    fitting = widths(titles, cells, width)
    lines.append(_line([Cell(one.title, "bold dim") for one in titles], titles, fitting, False))
    for number, row in enumerate(cells, first):
        lines.append(_line(row, titles, fitting, number == board.cursor))
    if not keys:
        match = f" with {board.filter}" if board.filter else ""
        lines.append(Text(f"no {board.view}{match}", style="dim"))
    if len(keys) > room:
        foot[0].append(f"{first + 1}-{min(first + room, len(keys))} of {len(keys)}", "dim")
    return _filled(lines, foot, size)


def _help(width: int) -> list[str]:
    """Wrapped, so that a narrow terminal shows all of it."""
    room, lines = max(20, min(width, 80)), [""]
    for keys, what in HELP:
        indent = " " * (12 if room < 60 else 17)
        lines += wrap(f"  {keys}".ljust(len(indent)) + what, room, subsequent_indent=indent)
    return [*lines, "", *wrap(ABOUT_THE_MAP, room - 1, initial_indent="  ", subsequent_indent="  ")]


def _filled(lines: list[Text], foot: list[Text], size: tuple[int, int]) -> list[Text]:
    from rich.text import Text

    width, height = size
    foot = foot[-height:]
    lines = lines[: height - len(foot)]
    lines = [*lines, *[Text()] * (height - len(foot) - len(lines)), *foot]
    for number, line in enumerate(lines):
        if line.cell_len > width:
            lines[number] = line.copy()
            lines[number].truncate(width, overflow="ellipsis")
    return lines


def _head(seen: Seen, around: Around, width: int) -> list[Text]:
    from rich.text import Text

    status = seen.status
    up = duration_text(max(0, seen.now_ms - status.up_since_ms))
    title = Text(
        whole_parts((f"Shoal {status.version} at {around.url}", f"up {up}"), width), "bold"
    )
    if around.since_s is not None:
        clock = datetime.datetime.fromtimestamp(around.since_s).astimezone()
        told = f"no answer since {clock:%H:%M:%S}, trying again: {around.trouble}"
        title = Text(cut(printable(told), width), style="bold red")
    nodes = ", ".join(f"{count} {state}" for state, count in status.nodes.items() if count)
    gpus = Text("GPUs ")
    if status.gpus:
        room = max(8, min(40, width - 50))
        gpus.append(bar(status.gpus_held, status.gpus, room), style="green")
        gpus.append(f" {status.gpus_held} of {status.gpus} held, {status.gpus_free} free")
        if status.gpus_unusable:
            gpus.append(f", {status.gpus_unusable} unusable", style="red")
    else:
        gpus.append("none", style="dim")
    jobs = ", ".join(f"{count} {state}" for state, count in status.jobs.items() if count)
    return [title, gpus, Text(f"nodes {nodes or 'none'}; jobs {jobs or 'none'}")]


def _map(board: Board, seen: Seen, width: int, height: int) -> list[Text]:
    from rich.text import Text

    room = min(height // MAP_SHARE, height - ROWS_MIN - 8)
    if not board.map or room < 1:
        return []
    chosen = board.key if board.view == "jobs" else ""
    mark = (seen.number, chosen, width, room)
    if board.drawn_map[0] == mark:  # of a large cluster it costs more than all the rest
        return board.drawn_map[1]
    nodes = list(seen.nodes.values())
    lines = gpu_map(nodes, chosen, width, room)
    if lines and condensed(nodes, room, width):
        lines = lines[: room - 1] if len(lines) >= room > 1 else lines
    lines = [*lines, Text(legend(nodes, room, width), style="dim")] if lines else []
    board.drawn_map = (mark, lines)
    return lines


def _foot(board: Board, keys: Sequence[str], around: Around, width: int) -> list[Text]:
    from rich.text import Text

    place = Text()
    if board.mode == "filter" or board.filter:
        place.append(f"/{board.filter}", "bold")
        place.append("_" if board.mode == "filter" else "", "blink")
        place.append(f"  {len(keys)} match  ", "dim")
    meant = board.asked if board.mode == "ask" else board.key
    named = " ".join(part for part in (meant, around.name) if part)
    told = ": ".join(part for part in (named, around.why) if part)
    why = Text(printable(told), style="yellow")
    if board.message:
        why = Text(printable(board.message), style="bold")
    if board.mode == "ask":
        why = Text(printable(f"cancel {named}? y/n"), style="bold reverse")
    known = ("enter keep", "escape clear") if board.mode == "filter" else KEYS
    hints = Text(whole_parts(known, width), style="reverse")
    return [place, why, Text(around.curve, style="cyan"), hints]


def _titles(board: Board) -> list[Column]:
    """The columns of the view; an arrow marks the one that sorts the rows."""
    columns = [one.column for one in COLUMNS[board.view]]
    number = board.sort[board.view]
    if number is not None:
        arrow = "↑" if board.down[board.view] else "↓"
        columns[number] = columns[number]._replace(title=columns[number].title + arrow)
    return columns


def widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: int) -> list[int]:
    """The width of each column; 0 if there is no room for it. The last one is cut; then others are
    left out: empty ones, then from the right, the firm ones last. The first one always stays."""
    full = [
        max([cells_of(column.title), *(cells_of(shown(row[number])) for row in rows)])
        for number, column in enumerate(columns)
    ]
    last = len(columns) - 1
    room = [*full[:last], min(full[last], NAME_MIN)]

    def over() -> int:
        wide = [width for width in room if width]
        return sum(wide) + GAP * (len(wide) - 1) - terminal

    filled = [any(row[number].text for row in rows) for number in range(len(columns))]
    for number in sorted(range(1, last), key=lambda n: (filled[n], columns[n].firm, -n)):
        if over() > 0:
            room[number] = 0
    room[last] = min(full[last], max(0, room[last] - over()))
    room[0] = min(room[0], max(1, terminal))
    return room


def _line(cells: list[Cell], columns: Sequence[Column], room: list[int], chosen: bool) -> Text:
    from rich.text import Text

    line = Text()
    for cell, column, width in zip(cells, columns, room, strict=True):
        if not width:
            continue
        text = cut(shown(cell) if cell.text else "", width)
        pad = " " * (width - cells_of(text))
        line.append(" " * GAP if line else "")
        line.append(pad + text if column.right else text + pad, style=cell.style or "")
    if chosen:
        line.stylize("reverse")
    return line
