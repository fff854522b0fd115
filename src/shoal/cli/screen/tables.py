"""Lays a table out for a terminal: each row is one line, and no line is wider than the terminal.

If a table is too wide, free text is cut first, then the longest names: in the middle, because their
ends tell them apart. If that is not enough, columns are left out, the least important first. A pipe
and `--json` get everything."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.model.phrases import printable

GAP = 2  # between two columns
WRAPPED_MIN = 24  # a narrower column of sentences is mostly white
SHORT = 12  # most ids and states are shorter, and are never cut
FREE = 16  # free text is cut to this before a name is
HEAD_SHARE = 0.6  # of a name that is cut in the middle


class Column(NamedTuple):
    """`wraps`: its text may go over several lines, between words. `flexible`: free text, which is
    cut first. `whole`: cut only if it takes half the terminal, because people copy it. `rank`:
    columns with the lowest are left out first, and of those the rightmost."""

    title: str
    right: bool = False
    flexible: bool = False
    wraps: bool = False
    whole: bool = False
    rank: int = 0


class Cell(NamedTuple):
    """A pipe gets `text`; a terminal gets `pretty` if there is one."""

    text: str
    style: str = ""
    pretty: str = ""


class Piece(NamedTuple):
    at: int
    text: str
    style: str


Line = list[Piece]


def shown(cell: Cell) -> str:
    return cell.pretty or printable(cell.text) or "-"


def cells_of(text: str) -> int:
    """How many columns of the terminal it takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: int) -> list[Line]:
    """The lines of the table, the titles first."""
    titles = [Cell(column.title, "bold dim", column.title or " ") for column in columns]
    texts = [[shown(cell) for cell in row] for row in rows]
    places = _places(columns, widths(columns, texts, terminal))
    lines = _row_lines(titles, [column.title for column in columns], places)
    for row, text in zip(rows, texts, strict=True):
        lines += _row_lines(row, text, places)
    return lines


def widths(columns: Sequence[Column], texts: Sequence[Sequence[str]], terminal: int) -> list[int]:
    """The width of each column; 0: there is no room for it. The first one always stays."""
    full = [
        max([_title(column), *(cells_of(row[number]) for row in texts)])
        for number, column in enumerate(columns)
    ]
    least = [_least(column, width, terminal) for column, width in zip(columns, full, strict=True)]
    kept = _kept(columns, texts, least, terminal)
    room = [full[number] if number in kept else 0 for number in range(len(columns))]
    for number in reversed(range(len(columns))):
        if columns[number].flexible and room[number]:
            over = max(0, _sum(room) - terminal)
            room[number] = max(least[number], min(room[number], FREE), room[number] - over)
    while _sum(room) > terminal:
        wide = [number for number in kept if room[number] > least[number]]
        if not wide:
            break
        room[max(wide, key=lambda number: room[number])] -= 1
    room[0] = min(room[0], max(1, terminal))
    return room


def _title(column: Column) -> int:
    return max(1, cells_of(column.title))


def _least(column: Column, full: int, terminal: int) -> int:
    """How narrow the column may become; a number is never cut."""
    if column.right:
        return full
    enough = WRAPPED_MIN if column.wraps else terminal // 2 if column.whole else SHORT
    return min(full, max(_title(column), enough))


def _kept(
    columns: Sequence[Column], texts: Sequence[Sequence[str]], least: list[int], terminal: int
) -> list[int]:
    """Those that have room, without the empty ones if there is too little."""
    filled = [any(row[number] not in ("", "-") for row in texts) for number in range(len(columns))]
    kept = list(range(len(columns)))
    for number in sorted(kept[1:], key=lambda n: (filled[n] or not texts, columns[n].rank, -n)):
        if _sum(least[n] for n in kept) <= terminal:
            break
        kept.remove(number)
    return kept


def _sum(room: Iterable[int]) -> int:
    wide = [width for width in room if width]
    return sum(wide) + GAP * (len(wide) - 1)


class _Place(NamedTuple):
    """Where a column stands."""

    number: int
    column: Column
    at: int
    width: int


def _places(columns: Sequence[Column], room: Sequence[int]) -> list[_Place]:
    places, at = [], 0
    for number, (column, width) in enumerate(zip(columns, room, strict=True)):
        if width:
            places.append(_Place(number, column, at, width))
            at += width + GAP
    return places


def _row_lines(cells: Sequence[Cell], texts: Sequence[str], places: list[_Place]) -> list[Line]:
    lines: list[Line] = [[]]
    for place in places:
        for number, part in enumerate(_parts(texts[place.number], place)):
            if len(lines) <= number:
                lines.append([])
            pad = place.width - cells_of(part) if place.column.right else 0
            lines[number].append(Piece(place.at + pad, part, cells[place.number].style))
    return lines


def _parts(text: str, place: _Place) -> list[str]:
    """The lines of one cell."""
    if cells_of(text) <= place.width:
        return [text]
    if not place.column.wraps:
        return [cut(text, place.width)]
    return [piece for part in _filled(text, place.width) for piece in _broken(part, place.width)]


WORD = re.compile(r"\S+?,(?=[a-z])|\S+")  # a list without spaces, as j1,j2, is several words


def _filled(text: str, width: int) -> list[str]:
    lines, line, end = [], "", 0
    for match in WORD.finditer(text):
        gap, end = text[end : match.start()], match.end()
        if line and cells_of(line + gap + match[0]) > width:
            lines.append(line)
            line, gap = "", ""
        line += (gap if line else "") + match[0]
    return [*lines, line]


def _broken(text: str, width: int) -> list[str]:
    pieces, piece = [], ""
    for letter in text:
        if piece and cells_of(piece) + cells_of(letter) > width:
            pieces.append(piece)
            piece = ""
        piece += letter
    return [*pieces, piece]


def cut(text: str, width: int) -> str:
    """Cut to this width: a name in its middle, a sentence between words if the first one fits."""
    if cells_of(text) <= width:
        return text
    if width >= SHORT and not re.search(r"[\s,]", text):
        end = _first(text[::-1], int((width - 1) * (1 - HEAD_SHARE)))[::-1]
        return f"{_first(text, width - 1 - cells_of(end))}…{end}"
    kept = _first(text, width - 1)
    whole = kept if text[len(kept)] == " " else kept.rpartition(" ")[0]
    return (whole if len(whole) > len(kept) * HEAD_SHARE else kept).rstrip(" ,;:") + "…"


def _first(text: str, width: int) -> str:
    kept = ""
    for letter in text:
        if cells_of(kept) + cells_of(letter) > width:
            break
        kept += letter
    return kept


def whole_parts(parts: Sequence[str], width: int) -> str:
    """As many of them as there is room for, and the first one."""
    while len(parts) > 1 and cells_of("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters, each indented as the first; no word is broken."""
    if cells_of(text) <= columns:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
