"""Draws `shoal top` as lines that fill the terminal exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cli.screen.show import Cell, bar, printable
from shoal.cli.screen.top_board import TITLES, Board, Row, Seen, Title
from shoal.forms.units import duration_text

if TYPE_CHECKING:
    from rich.text import Text

HEAD_LINES = 4  # cluster, GPUs, jobs, an empty line
FOOT_LINES = 4  # position, reason, curve, keys
NAME_WIDTH_MAX = 20
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
    widths = column_widths(TITLES[board.view], rows, width)
    lines = [*_head(seen, trouble, width, url), Text()]
    lines.append(_titles(board, widths))
    for number, row in enumerate(shown, first):
        lines.append(_line(row.cells, TITLES[board.view], widths, number == board.cursor))
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


def column_widths(titles: Sequence[Title], rows: Sequence[Row], width: int) -> list[int]:
    """What each column needs; what is too much is taken from the last, then from right to left,
    so that the first columns can always be read."""
    needs = []
    for number, title in enumerate(titles):
        longest = max((len(row.cells[number].text) for row in rows), default=0)
        most = longest if title.flexible else min(longest, NAME_WIDTH_MAX)
        needs.append(max(len(title.text) + 1, most))  # the arrow of a sort is a character
    over = sum(needs) + 2 * (len(needs) - 1) - width
    for number in range(len(needs) - 1, 0, -1):
        if over <= 0:
            break
        least = 0 if over > needs[number] else 4
        cut = min(over, needs[number] - least)
        if needs[number] - cut < 4:
            over -= needs[number] + 2  # too narrow to say anything: left out
            needs[number] = 0
        else:
            needs[number] -= cut
            over -= cut
    return needs


def _titles(board: Board, widths: list[int]) -> Text:
    cells = []
    for number, title in enumerate(TITLES[board.view]):
        mark = ""
        if board.sort[board.view] == number:
            mark = "↑" if board.down[board.view] else "↓"
        cells.append(Cell(title.text + mark, "bold" if mark else "bold dim"))
    return _line(cells, TITLES[board.view], widths, chosen=False)


def _line(cells: list[Cell], titles: Sequence[Title], widths: list[int], chosen: bool) -> Text:
    from rich.text import Text

    line = Text()
    for cell, title, width in zip(cells, titles, widths, strict=True):
        if not width:
            continue
        text = printable(cell.text) if cell.text else ""
        if len(text) > width:
            text = text[: width - 1] + "…"
        text = text.rjust(width) if title.right else text.ljust(width)
        line.append("  " if line else "")
        line.append(text, style=cell.style or "")
    if chosen:
        line.stylize("reverse")
    return line
