"""Lays a table out for a terminal: ids and words stay whole, and only free text at the end of a
line is ever cut.

If a table is too wide, its last column is cut first. A cell that is still longer than its column
gets the rest of the line, and its row goes on below. If there are more columns than fit side by
side, the rest of each row is on a second, indented line."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.model.phrases import printable

GAP = 2  # between two columns
CUT_MIN, WRAPPED_MIN = 16, 24  # a narrower column says too little
WORD = re.compile(r"\S+?,(?=[a-z])|\S+")
SHORT = 12  # a cell of this length is never on a line of its own
INDENT = 4  # of the second line of a row


class Column(NamedTuple):
    """`wraps`: its text may go over several lines, between words. `flexible`: free text that is cut
    if it is in the last column. A pipe gets everything."""

    title: str
    right: bool = False
    flexible: bool = False
    wraps: bool = False
    firm: bool = False  # `shoal top` leaves out others before it


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
    """The lines of the table, the titles first; none is wider than the terminal."""
    titles = [Cell(column.title, "bold dim", column.title or " ") for column in columns]
    texts = [[shown(cell) for cell in row] for row in rows]
    bands = _bands(columns, texts, max(terminal, 1))
    lines = _row_lines(titles, [column.title for column in columns], bands)
    for row, text in zip(rows, texts, strict=True):
        lines += _row_lines(row, text, bands)
    return lines


class _Place(NamedTuple):
    """Where a column stands."""

    number: int
    column: Column
    at: int
    width: int
    end: int  # of the terminal
    last: bool


def _bands(
    columns: Sequence[Column], texts: Sequence[Sequence[str]], terminal: int
) -> list[list[_Place]]:
    """The columns that stand side by side: one band, unless the terminal is narrow."""
    lengths = [
        sorted({cells_of(row[number]) for row in texts} | {_title(column)})
        for number, column in enumerate(columns)
    ]
    least = [
        _least(column, lengths[number], [row[number] for row in texts], number == len(columns) - 1)
        for number, column in enumerate(columns)
    ]
    bands: list[list[int]] = [[]]
    for number in range(len(columns)):
        room = terminal - (INDENT if len(bands) > 1 else 0)
        if bands[-1] and _sum(least[n] for n in [*bands[-1], number]) > room:
            bands.append([])
        bands[-1].append(number)
    found = []
    for place, band in enumerate(bands):
        indent = INDENT if place else 0
        widths = _shrunk(columns, band, lengths, least, terminal - indent)
        found.append(
            [
                _Place(n, columns[n], indent + start, width, terminal, n == len(columns) - 1)
                for n, start, width in zip(band, _starts(widths), widths, strict=True)
            ]
        )
    return found


def _title(column: Column) -> int:
    return max(1, cells_of(column.title))


def _least(column: Column, lengths: Sequence[int], texts: Sequence[str], last: bool) -> int:
    """How narrow the column may become."""
    whole = max(lengths[-1], _title(column))
    if column.wraps:
        word = max((cells_of(word) for text in texts for word in _words(text)), default=1)
        return max(_title(column), min(whole, max(WRAPPED_MIN, word)))
    if column.flexible and last:
        return max(_title(column), min(whole, CUT_MIN))
    return max(_title(column), min(whole, SHORT))


def _shrunk(
    columns: Sequence[Column],
    band: list[int],
    lengths: Sequence[Sequence[int]],
    least: Sequence[int],
    terminal: int,
) -> list[int]:
    """The widths of a band's columns. The last column shrinks first, if it may be cut, and then
    the widest one: to the next shorter of its cells, because one that does not fit has its line."""
    full = [max(lengths[n][-1], _title(columns[n])) for n in band]
    room = list(full)
    if columns[band[-1]].flexible and band[-1] == len(columns) - 1:
        room[-1] = max(least[band[-1]], room[-1] - max(0, _sum(room) - terminal))
    while (over := _sum(room) - terminal) > 0:
        left = [i for i, n in enumerate(band) if room[i] > least[n]]
        if not left:
            break
        widest = max(left, key=lambda i: room[i])
        number = band[widest]
        if columns[number].wraps or (widest == len(band) - 1 and columns[number].flexible):
            room[widest] = max(least[number], room[widest] - over)
        else:
            shorter = [one for one in lengths[number] if one < room[widest]]
            room[widest] = max(least[number], shorter[-1] if shorter else 0)
    for i, number in enumerate(band):  # what is left helps those that wrap or are cut
        if columns[number].wraps or columns[number].flexible:
            room[i] = min(full[i], room[i] + max(0, terminal - _sum(room)))
    return [min(width, max(1, terminal)) for width in room]


def _sum(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + GAP * (len(listed) - 1)


def _starts(widths: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for width in widths:
        starts.append(at)
        at += width + GAP
    return starts


def _row_lines(
    cells: Sequence[Cell], texts: Sequence[str], bands: list[list[_Place]]
) -> list[Line]:
    lines: list[Line] = []
    for band in bands:
        lines += _band_lines(cells, texts, band)
    return lines


def _band_lines(cells: Sequence[Cell], texts: Sequence[str], band: list[_Place]) -> list[Line]:
    lines: list[Line] = [[]]
    top = 0
    for place in band:
        parts = _parts(texts[place.number], place)
        style = cells[place.number].style
        fits = all(cells_of(part) <= place.width for part in parts)
        beside = all(place.at + cells_of(part) <= place.end for part in parts)
        if not fits and not beside and any(lines):
            top = len(lines)  # what stands to its left keeps its lines
        for number, part in enumerate(parts, top):
            while len(lines) <= number:
                lines.append([])
            length = cells_of(part)
            at = place.at if length > place.width else _aligned(place, length)
            lines[number].append(Piece(max(0, min(at, place.end - length)), part, style))
        if not fits:
            top = len(lines)
    return [line for line in lines if line]


def _aligned(place: _Place, length: int) -> int:
    return place.at + (place.width - length if place.column.right else 0)


def _parts(text: str, place: _Place) -> list[str]:
    """The lines of one cell. Only a word that is longer than the terminal is broken."""
    if cells_of(text) <= place.width:
        return [text]
    if place.column.wraps:
        words = _filled(text, place.width)
    elif place.last and place.column.flexible:
        return [cut(text, place.width)]
    else:
        words = _filled(text, place.end)
    return [piece for word in words for piece in _broken(word, place.end)]


def _words(text: str) -> list[str]:
    """A list without spaces, as j1,j2, is several words."""
    return WORD.findall(text)


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
    """Cut to this width, between words if the first one fits."""
    if cells_of(text) <= width:
        return text
    kept = ""
    for letter in text:
        if cells_of(kept) + cells_of(letter) > width - 1:
            break
        kept += letter
    whole = kept if text[len(kept)] == " " else kept.rpartition(" ")[0]
    return (whole or kept).rstrip(" ,;:") + "…"


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
