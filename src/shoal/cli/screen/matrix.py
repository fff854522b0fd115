"""The network as a picture in a terminal: one cell per pair of nodes, or groups beside groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median

from shoal.cli.screen.show import Cell
from shoal.model.fabric import FabricView

NODES_MAX = 60  # more are shown by their groups
LABEL_MAX = 12
SAME, FAILED, UNKNOWN, MORE = "·", "x", " ", "+"
# Above this part of the usual rate, in tenths, a cell says only that it is more.
MORE_TENTHS = 15
# From weak to usual, for eyes of every kind: orange is weak, blue is usual.
SHADES = (
    (FAILED, "bold white on #7f2704"),
    ("0123", "black on #fd8d3c"),
    ("4567", "black on #fdd0a2"),
    ("89", "white on #2171b5"),
    (MORE, "white on #08306b"),
)

Rates = dict[tuple[str, str], int | None]  # by both orders of names; None: they could not meet
Line = list[Cell]


def rates_of(view: FabricView) -> Rates:
    """The slower direction counts, as in every collective."""
    found: Rates = {}
    for link in view.links:
        rate = None if link.fault else min(link.mbs, link.back_mbs)
        known = found.get((link.a, link.b))
        if known is not None and (rate is None or rate > known):
            continue
        found[link.a, link.b] = found[link.b, link.a] = rate
    return found


def groups_of(view: FabricView) -> dict[str, list[str]]:
    """The nodes of the tour by the place that was found; those without one come last, as ''."""
    found: dict[str, list[str]] = {}
    for node in sorted(view.nodes, key=_natural):
        found.setdefault(view.places.get(node, ""), []).append(node)
    return dict(sorted(found.items(), key=lambda one: (not one[0], _natural(one[0]))))


def _natural(name: str) -> list[tuple[int, str]]:
    """So that n10 comes after n9."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.findall(r"\d{1,18}|\D+|\d+", name)
    ]


def digit(rate: int | None, usual: int) -> str:
    if rate is None:
        return FAILED
    tenths = rate * 10 // usual if usual else 0
    return str(min(9, tenths)) if tenths < MORE_TENTHS else MORE


def style(sign: str) -> str:
    return next((look for signs, look in SHADES if sign in signs), "")


def usual_of(view: FabricView, rates: Rates) -> int:
    """The median of the links, if the tour itself does not say what is usual."""
    return view.usual_mbs or int(median([rate for rate in rates.values() if rate] or [0]))


def matrix(view: FabricView, columns: int) -> list[Line]:
    """Empty if it does not fit. A row is numbered as its column is."""
    groups, rates = list(groups_of(view).values()), rates_of(view)
    nodes = [node for group in groups for node in group]
    if not 2 <= len(nodes) <= NODES_MAX:
        return []
    label = min(LABEL_MAX, max(len(node) for node in nodes))
    digits = len(str(len(nodes)))
    left = label + 1 + digits + 1
    gaps = len(groups) - 1
    room = columns - left
    wide = 2 if 2 * len(nodes) + gaps <= room else 1
    between = " " if wide * len(nodes) + gaps <= room else ""
    if wide * len(nodes) + len(between) * gaps > room:
        return []
    lines = _heads(groups, digits, left, wide, between)
    usual, number = usual_of(view, rates), 0
    for place, group in enumerate(groups):
        if place and between and wide > 1:
            lines.append([])
        for node in group:
            number += 1
            line = [Cell(f"{_short(node, label):<{label}} {number:>{digits}} ")]
            for other, peers in enumerate(groups):
                line += [Cell(between)] if other and between else []
                line += [_cell(node, peer, rates, usual, wide) for peer in peers]
            lines.append(line)
    return lines


def _cell(node: str, peer: str, rates: Rates, usual: int, wide: int) -> Cell:
    if node == peer:
        return Cell(SAME.rjust(wide))
    if (node, peer) not in rates:
        return Cell(UNKNOWN.rjust(wide))
    sign = digit(rates[node, peer], usual)
    return Cell(sign.rjust(wide), style(sign))


def _heads(
    groups: Sequence[Sequence[str]], digits: int, left: int, wide: int, between: str
) -> list[Line]:
    """The number of each column, its digits below each other."""
    lines: list[Line] = []
    for power in range(digits - 1, -1, -1):
        text, number = " " * left, 0
        for place, group in enumerate(groups):
            text += between if place else ""
            for _ in group:
                number += 1
                shown = str(number // 10**power % 10) if number >= 10**power else ""
                text += shown.rjust(wide)
        lines.append([Cell(text.rstrip(), "dim")])
    return lines


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def between_groups(view: FabricView) -> list[tuple[str, str, list[int], int]]:
    """Each two groups, and each group with itself: the rates, lowest first, and how many links
    failed."""
    groups, rates = groups_of(view), rates_of(view)
    names = list(groups)
    found = []
    for number, one in enumerate(names):
        for other in names[number:]:
            links = [
                rates[a, b]
                for a in groups[one]
                for b in groups[other]
                if (a, b) in rates and (one != other or a < b)
            ]
            if links:
                known = sorted(rate for rate in links if rate is not None)
                found.append((one, other, known, len(links) - len(known)))
    return found


def plain(line: Iterable[Cell]) -> str:
    return "".join(cell.text for cell in line).rstrip()
