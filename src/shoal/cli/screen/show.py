"""Output: tables and colors on a terminal, plain aligned lines in a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.screen.tables import Cell as Cell
from shoal.cli.screen.tables import Column as Column
from shoal.cli.screen.tables import Piece, cells_of, cut, lay_out
from shoal.cli.screen.tables import wrapped as wrapped
from shoal.model.phrases import printable

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
    "away": "cyan",
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


def at_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def at_keyboard() -> bool:
    """Whether somebody can type."""
    return sys.stdin is not None and sys.stdin.isatty()


def agreed(question: str) -> None:
    """Whoever types says yes; otherwise the command ends."""
    from shoal.forms.failure import Failure

    print(f"{question} [yes/no] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failure("nothing was changed")


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def state_cell(state: str) -> Cell:
    return Cell(state, STATE_STYLES.get(state, ""))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    if at_terminal():
        _print_table(columns, cells)
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


def _print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    from rich.text import Text

    lines = lay_out(columns, rows, shutil.get_terminal_size().columns)
    console().print(Text("\n").join(map(rich_line, lines)), soft_wrap=True)


def rich_line(pieces: Sequence[Piece]) -> Text:
    from rich.text import Text

    text, at = Text(), 0
    for piece in pieces:
        text.append(" " * (piece.at - at))
        text.append(piece.text, style=piece.style or "")
        at = piece.at + cells_of(piece.text)
    return text


def fitted(text: str) -> str:
    """Cut to one line of the terminal, between words; a pipe gets all of it."""
    if not at_terminal():
        return text
    columns = shutil.get_terminal_size().columns
    return cut(text, columns)


def line(text: str, style: str = "") -> None:
    """On stdout; a terminal gets the style, and long lines wrapped between words."""
    if not at_terminal():
        print(printable(text))
        return
    from rich.text import Text

    for part in lines_of(text):
        if style:
            console().print(Text(part, style=style), soft_wrap=True)
        else:
            print(part)


def lines_of(text: str) -> list[str]:
    """As many lines of the terminal as it takes."""
    return wrapped(printable(text), shutil.get_terminal_size().columns)


# Erases the status line, if there is one, before a note is printed.
before_note: Callable[[], None] | None = None


def note(text: str) -> None:
    """On stderr, so that stdout stays clean for scripts; wrapped between words on a terminal."""
    if before_note is not None:
        before_note()
    lines = lines_of(text) if sys.stderr.isatty() else [printable(text)]
    print("\n".join(lines), file=sys.stderr, flush=True)


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
