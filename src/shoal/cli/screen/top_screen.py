"""Draws `shoal top` as lines that fill the terminal exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cli.screen.show import Cell, Column, bar, printable
from shoal.cli.screen.tables import GAP, cells_of, shown
from shoal.cli.screen.top_board import COLUMNS, Board, Seen
from shoal.forms.units import duration_text

if TYPE_CHECKING:
    from rich.text import Text

HEAD_LINES = 4  # cluster, GPUs, jobs, an empty line
NAME_MIN = 16  # the last column
FOOT_LINES = 4  # position, reason, curve, keys
KEYS = "q quit  j jobs  n nodes  s services  up/down move  < > sort  r reverse"


def draw(
    board: Board, seen: Seen, trouble: str, detail: str, size: tuple[int, int], url: str
) -> list[Text]:
    """One line per line of the terminal, none wider than it."""
    from rich.text import Text

    width, height = size
    rows = board.rows(seen)
    room = max(1, height - HEAD_LINES - FOOT_LINES - 1)
    first = max(0, min(board.cursor - room // 2, len(rows) - room))
    shown = rows[first : first + room]
    columns = _columns(board)
    fitting = widths(columns, [row.cells for row in rows], width)
    lines = [*_head(seen, trouble, width, url), Text()]
    titles = [Cell(column.title, "bold dim") for column in columns]
    lines.append(_line(titles, columns, fitting, chosen=False))
    for number, row in enumerate(shown, first):
        lines.append(_line(row.cells, columns, fitting, number == board.cursor))
    if not rows:
        lines.append(Text(f"no {board.view}", style="dim"))
    lines = lines[: HEAD_LINES + 1 + room]
    lines += [Text()] * (height - FOOT_LINES - len(lines))
    more = f"{first + 1}-{first + len(shown)} of {len(rows)}" if len(rows) > room else ""
    why = rows[board.cursor].why if rows else ""
    key = f"{rows[board.cursor].key}: " if why else ""
    lines += [
        Text(more, style="dim"),
        Text(printable(key + why), style="yellow"),
        Text(detail, style="cyan"),
        Text(KEYS, style="reverse dim"),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines[:height]


def _head(seen: Seen, trouble: str, width: int, url: str) -> list[Text]:
    from rich.text import Text

    status = seen.status
    up = duration_text(status.now_ms - status.up_since_ms)
    title = Text(f"Shoal {status.version} at {url}, up {up}", style="bold")
    if trouble:
        title = Text(printable(trouble), style="bold red")
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


def _columns(board: Board) -> list[Column]:
    """The columns of the view; an arrow marks the one that sorts the rows."""
    columns = list(COLUMNS[board.view])
    number = board.sort[board.view]
    if number is not None:
        arrow = "↑" if board.down[board.view] else "↓"
        columns[number] = columns[number]._replace(title=columns[number].title + arrow)
    return columns


def widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: int) -> list[int]:
    """The width of each column; 0 if there is no room for it. The last one is cut; then others are
    left out, from the right, the firm ones last. The first two stay."""
    full = [
        max([cells_of(column.title), *(cells_of(shown(row[number])) for row in rows)])
        for number, column in enumerate(columns)
    ]
    last = len(columns) - 1
    room = [*full[:last], min(full[last], NAME_MIN)]

    def over() -> int:
        wide = [width for width in room if width]
        return sum(wide) + GAP * (len(wide) - 1) - terminal

    for number in sorted(range(1, last), key=lambda n: (columns[n].firm, -n)):
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
        text = printable(cell.text) if cell.text else ""
        if len(text) > width:
            text = text[: width - 1] + "…"
        text = text.rjust(width) if column.right else text.ljust(width)
        line.append("  " if line else "")
        line.append(text, style=cell.style or "")
    if chosen:
        line.stylize("reverse")
    return line
