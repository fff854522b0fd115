"""Output: tables and colours on a terminal, plain aligned lines in a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STATE_STYLES = {
    "running": "green",
    "starting": "cyan",
    "waiting": "yellow",
    "dozing": "blue",
    "asleep": "blue",
    "waking": "cyan",
    "stopping": "magenta",
    "succeeded": "green dim",
    "failed": "red",
    "cancelled": "dim",
    "timed-out": "red",
    "ready": "green",
    "joining": "cyan",
    "silent": "yellow",
    "suspect": "yellow",
    "lost": "red bold",
    "cordoned": "yellow",
    "quarantined": "red",
    "draining": "magenta",
    "drained": "magenta",
    "removed": "dim",
    "rolling": "cyan",
    "idle": "dim",
    "failing": "red",
    "down": "red",
}


GAP = 2  # between two columns
SHORTENED_MIN, WRAPPED_MIN = 8, 24  # a narrower column is useless


class Column(NamedTuple):
    """On a narrow terminal a column is cut. If it `wraps`, its lines wrap; if it is `firm`, it is
    cut last. A pipe gets everything."""

    title: str
    right: bool = False
    flexible: bool = False
    wraps: bool = False
    firm: bool = False


class Cell(NamedTuple):
    """A pipe gets `text`; a terminal gets `pretty` if there is one."""

    text: str
    style: str = ""
    pretty: str = ""


def printable(text: str) -> str:
    """Control characters and line ends become visible escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def at_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def at_keyboard() -> bool:
    """Whether somebody can type."""
    return sys.stdin is not None and sys.stdin.isatty()


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def state_cell(state: str) -> Cell:
    return Cell(state, STATE_STYLES.get(state, ""))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    if at_terminal():
        _rich_table(columns, cells)
    else:
        for line in plain_lines([[Cell(column.title) for column in columns], *cells], columns):
            print(line)


def plain_lines(rows: Sequence[Sequence[Cell]], columns: Sequence[Column]) -> list[str]:
    """Aligned with spaces. An empty cell is a dash, so every line has the same number of words."""
    texts = [[printable(cell.text) or "-" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    lines = []
    for row in texts:
        words = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(words).rstrip())
    return lines


def _rich_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold dim")
    room = widths(columns, rows, shutil.get_terminal_size().columns)
    shown = [number for number, width in enumerate(room) if width]
    for number in shown:
        column = columns[number]
        grid.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
            width=room[number],
        )
    for row in rows:
        grid.add_row(*[rich_text(row[number]) for number in shown])
    console().print(grid)


def widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: int) -> list[int]:
    """The width of each column; 0 if there is no room for it. Columns that are not firm shrink, the
    widest first. Then whole columns go, from the right, the firm ones last. The first column always
    stays."""
    full = [
        max([len(column.title), *(len(rich_text(row[number]).plain) for row in rows)])
        for number, column in enumerate(columns)
    ]
    room = list(full)

    def over() -> int:
        shown = [width for width in room if width]
        return sum(shown) + GAP * (len(shown) - 1) - terminal

    soft = [number for number, column in enumerate(columns) if number and not column.firm]
    while over() > 0 and (left := [n for n in soft if room[n] > _least(columns[n])]):
        room[max(left, key=lambda n: room[n])] -= 1
    kept = sorted(range(1, len(columns)), key=lambda n: (columns[n].firm, -n))
    for number in kept:
        if over() > 0:
            room[number] = 0
    room[0] = min(room[0], max(1, terminal))
    for number, column in enumerate(columns):  # use the room of dropped columns
        if room[number] and (column.flexible or column.wraps):
            room[number] = min(full[number], room[number] + max(0, -over()))
    return room


def _least(column: Column) -> int:
    return max(len(column.title), WRAPPED_MIN if column.wraps else SHORTENED_MIN)


def fitted(text: str) -> str:
    """Cut to one line of the terminal, between words; a pipe gets all of it."""
    if not at_terminal():
        return text
    columns = shutil.get_terminal_size().columns
    if len(text) <= columns:
        return text
    cut = text[: max(1, columns - 1)]
    whole = cut if text[len(cut)] == " " else cut.rpartition(" ")[0]
    return (whole if len(whole) > len(cut) // 2 else cut).rstrip(" ,;:") + "…"


def rich_text(cell: Cell) -> Text:
    from rich.text import Text

    return Text(cell.pretty or printable(cell.text) or "-", style=cell.style or "")


def line(text: str, style: str = "") -> None:
    """On stdout; a terminal gets the style, and long lines wrapped between words."""
    if not at_terminal():
        print(printable(text))
        return
    from rich.text import Text

    for part in wrapped(printable(text), shutil.get_terminal_size().columns):
        if style:
            console().print(Text(part, style=style), soft_wrap=True)
        else:
            print(part)


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters, each indented as the first; no word is broken."""
    if len(text) <= columns:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


# Erases the status line, if there is one, before a note is printed.
before_note: Callable[[], None] | None = None


def note(text: str) -> None:
    """One line on stderr, so that stdout stays clean for scripts."""
    if before_note is not None:
        before_note()
    print(printable(text), file=sys.stderr, flush=True)


class Spinner:
    """What the command is doing now: one line that changes on a terminal, else lines on stderr.
    Nothing when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._last = ""

    def __call__(self, text: str) -> None:
        if self._quiet or text == self._last:
            return
        self._last = text
        if self._live:
            print(f"\r\x1b[K{printable(text)} ...", end="", file=sys.stderr, flush=True)
        else:
            note(text)

    def __enter__(self) -> Spinner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def as_json(value: Any, *, lines: bool = False) -> None:
    """`lines`: one object per line, for output that continues."""
    import msgspec

    data = msgspec.json.encode(value)
    print((data if lines else msgspec.json.format(data, indent=2)).decode(), flush=lines)


def bar(used: float, total: float, width: int) -> str:
    """A bar that is empty only at 0 and full only at `total`."""
    if total <= 0:
        return ""
    filled = round(width * used / total)
    if used > 0:
        filled = max(filled, 1)
    if used < total:
        filled = min(filled, width - 1)
    return "■" * filled + "□" * (width - filled)
