"""The state of `shoal top`: which rows are shown, what the keys do, and how it is drawn."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cli.screen.show import Cell, Column, bar
from shoal.cli.screen.tables import GAP, cells_of, cut, shown, whole_parts, widths
from shoal.cli.screen.top_rows import (
    COLUMNS,
    Seen,
    condensed,
    gpu_map,
    legend,
    natural,
    words_of,
)
from shoal.cli.screen.words import unusable_text
from shoal.forms.units import duration_text
from shoal.model.columns import place_of
from shoal.model.phrases import printable
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries

if TYPE_CHECKING:
    from rich.text import Text


VIEWS = {"j": "jobs", "n": "nodes", "s": "services"}
PAGE = 10
FILTER_MAX = 100
SPARKS = "▁▂▃▄▅▆▇█"


class Board:
    """`sort` is a column, or None for the usual order. `mode`: table, filter (somebody types one),
    ask (whether to cancel) or help."""

    def __init__(self) -> None:
        self.view = "jobs"
        self.mode = "table"
        self.sort: dict[str, int | None] = dict.fromkeys(COLUMNS)
        self.down: dict[str, bool] = dict.fromkeys(COLUMNS, False)
        self.filter = ""
        self.cursor = 0
        self.chosen = ""  # the row that somebody moved to: the cursor stays on it
        self.map = True
        self.asked = ""  # the job that somebody may cancel: the rows move on while they think
        self.message = ""
        self.over = False
        self.drawn_map: tuple[object, list[Any]] = (None, [])
        self._known: tuple[object, list[str]] = (None, [])

    def press(self, key: str) -> str:
        """What is left to do: "logs" of the chosen job, "cancel" of the asked one, or nothing."""
        if key == "ctrl-c":
            self.over = True
            return ""
        self.message = ""
        if self.mode == "filter":
            self._type(key)
        elif self.mode == "ask":
            self.mode = "table"
            if key in ("y", "Y"):
                return "cancel"
            self.message = "not cancelled"
        elif self.mode == "help":
            self.mode = "table"
        else:
            return self._command(key)
        return ""

    def _type(self, key: str) -> None:
        if key in ("enter", "escape", "up", "down"):
            self.mode = "table"
            self.filter = "" if key == "escape" else self.filter
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif key == "ctrl-u":
            self.filter = ""
        elif len(key) == 1 and len(self.filter) < FILTER_MAX:
            self.filter += key
            self.cursor, self.chosen = 0, ""

    def _command(self, key: str) -> str:
        moves = {"up": -1, "k": -1, "down": 1, "page-up": -PAGE, "page-down": PAGE, " ": PAGE}
        if key == "q":
            self.over = True
        elif key in VIEWS:
            self.view, self.cursor, self.chosen = VIEWS[key], 0, ""
        elif key in moves:
            self._move(self.cursor + moves[key])
        elif key in ("home", "g"):
            self._move(0)
        elif key in ("end", "G"):
            self._move(len(self._known[1]))
        elif key in ("left", "right", "<", ">", "r"):
            self._order(key)
        elif key == "/":
            self.mode = "filter"
        elif key == "escape":
            self.filter = ""
        elif key == "?":
            self.mode = "help"
        elif key == "m":
            self.map = not self.map
        elif key == "enter" and self.view == "jobs":
            return "logs"
        elif key == "c" and self.view == "jobs":
            self.mode, self.asked = ("ask" if self.key else "table"), self.key
        return ""

    def _move(self, to: int) -> None:
        keys = self._known[1]
        self.cursor = max(0, min(to, len(keys) - 1))
        self.chosen = keys[self.cursor] if keys else ""

    def _order(self, key: str) -> None:
        sort, columns = self.sort[self.view], len(COLUMNS[self.view])
        if key == "r":
            self.down[self.view] = not self.down[self.view]
        elif key in ("right", ">"):
            self.sort[self.view] = 0 if sort is None else (sort + 1 if sort + 1 < columns else None)
        else:
            self.sort[self.view] = columns - 1 if sort is None else (sort - 1 if sort else None)

    @property
    def key(self) -> str:
        """The row that the cursor is on; "" if there is none."""
        keys = self._known[1]
        return keys[self.cursor] if keys else ""

    def keys(self, seen: Seen) -> list[str]:
        """The rows that match, in order; puts the cursor onto one of them."""
        mark = (seen.number, self.view, self.sort[self.view], self.down[self.view], self.filter)
        if self._known[0] != mark:
            self._known = (mark, self._ordered(seen))
        keys = self._known[1]
        if self.chosen and keys[self.cursor : self.cursor + 1] != [self.chosen]:
            if self.chosen in keys:
                self.cursor = keys.index(self.chosen)
            else:
                self.chosen = ""
        self.cursor = max(0, min(self.cursor, len(keys) - 1))
        return keys

    def _ordered(self, seen: Seen) -> list[str]:
        found: Sequence[str] = list(getattr(seen, self.view))
        words = self.filter.lower().split()
        if words:
            texts = {key: words_of(seen, self.view, key) for key in found}
            found = [key for key in found if all(word in texts[key] for word in words)]
        keys = sorted(found, key=lambda key: _usual(seen, self.view, key))
        column = self.sort[self.view]
        if column is not None:
            items, order = getattr(seen, self.view), COLUMNS[self.view][column].order
            keys.sort(key=lambda key: _sortable(order(seen, items[key])))
        return keys[::-1] if self.down[self.view] else keys


def _usual(seen: Seen, view: str, key: str) -> tuple[Any, ...]:
    """Jobs that have nodes before those that wait; each in the order they were submitted."""
    if view == "jobs":
        return seen.jobs[key].state == "waiting", place_of(key)
    return tuple(natural(key))


def _sortable(value: float | str) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, value, "")


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


# Draws `shoal top` as lines that fill the terminal exactly.


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
    texts = [[shown(cell) if cell.text else "" for cell in row] for row in cells]
    fitting = widths(titles, texts, width)
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
        room = max(8, min(40, width - 60))
        gpus.append(bar(status.gpus_held, status.gpus, room), style="green")
        gpus.append(f" {status.gpus_held} of {status.gpus} in use, {status.gpus_free} free")
        gpus.append(unusable_text(status), style="red")
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
