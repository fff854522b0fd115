"""`shoal check --network`: the network between nodes, measured, shown as a picture, and saved."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shoal.cli import cluster
from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column
from shoal.client.transport import ShoalError
from shoal.core.features.fabric.halves import halves_text
from shoal.forms.failure import USAGE, Failure
from shoal.model.durations import duration_text
from shoal.model.fabric import FabricView, rate_text, size_text
from shoal.model.resources import plural

if TYPE_CHECKING:
    from shoal.client import Client


WAIT_S = 2.0  # between two lines of progress
ANSWER_S_MORE = 60.0  # beyond the tour's own limit
NOT_FOUND = 404
NODES_SHOWN = 12
WEAK_SHOWN = 30
GROUPS_MAX = 12  # the widest table of groups that is shown as a whole


def check_network(
    texts: tuple[str, ...], collectives: bool, save: str, json: bool, home: Path
) -> int:
    if save:
        if not collectives:
            raise Failure(
                "--save: a plan needs an all-reduce of the network; add --collectives", USAGE
            )
        refuse_early(save)
    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client, show.Spinner(quiet=json) as progress:
        view = _measured(client, asked, collectives, progress)
    if json:
        show.as_json(view)
    else:
        print_network(view)
    if save:
        save_network(view, save)
    return 1 if view.weak or _silent(view) or _failed(view) else 0


def check_halves(texts: tuple[str, ...], json: bool, home: Path) -> int:
    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client, show.Spinner(quiet=json) as progress:
        view = _measured(client, asked, False, progress, halves=True)
    if json:
        show.as_json(view)
    else:
        for half in view.halves:
            show.line(halves_text(half), "red bold" if half.problem else "")
            show.line(f"  {_listed(half.one)} | {_listed(half.other)}", "dim")
        for note in [*view.errors, *view.notes]:
            show.line(f"note: {note}", "dim")
    return 1 if any(half.problem for half in view.halves) else 0


def _measured(
    client: Client,
    asked: list[str],
    collectives: bool,
    progress: show.Spinner,
    *,
    halves: bool = False,
) -> FabricView:
    try:
        view = client.check_network(asked, collectives=collectives, halves=halves)
    except ShoalError as error:
        if error.status == NOT_FOUND:
            for name in asked:
                cluster.require_node(client, name)
        raise
    for note in view.notes:
        show.note(note)
    limit_s = max(0, view.until_ms - view.begun_ms) / 1000 + ANSWER_S_MORE
    began = time.monotonic()
    while view.ended_ms is None:
        if (spent_s := time.monotonic() - began) > limit_s:
            raise Failure(f"the tour has not ended within {limit_s:.0f} s; see: shoal nodes")
        nodes = len(view.nodes)
        how = f"meet in {plural(nodes - 1 + nodes % 2, 'round')}" if not halves else "measure"
        progress(
            f"{plural(nodes, 'node')} {how}: "
            f"{view.answered} of {nodes} have answered after {spent_s:.0f} s"
        )
        try:
            view = client.tour(view.id, wait_s=WAIT_S)
        except ShoalError as error:
            if error.status != NOT_FOUND:
                raise
            raise Failure(
                "the controller restarted during the tour, which is lost; measure again"
            ) from None
    return view


def _silent(view: FabricView) -> list[str]:
    return [node for node in view.nodes if node not in view.heard_from]


def _failed(view: FabricView) -> bool:
    return any(link.fault for link in view.links) or bool(view.errors)


def print_network(view: FabricView) -> None:
    rates = rates_of(view)
    usual = usual_of(view, rates)
    took = duration_text((view.ended_ms or view.begun_ms) - view.begun_ms)
    links = plural(sum(map(bool, rates.values())) // 2, "link")
    word = f"{plural(len(view.nodes), 'node')}, {links} measured in {took}"
    if usual:
        word += f"; usual: {rate_text(usual)}, {view.usual_latency_us} µs"
    show.line(word, "bold")
    if view.verdict:
        show.line(view.verdict, "green" if not view.outliers and not _silent(view) else "red bold")
    columns = shutil.get_terminal_size().columns
    picture = matrix(view, columns)
    for one in picture:
        _print(one)
    if picture:
        show.line(
            "a digit is tenths of the usual rate; +: at least half more, x: no connection", "dim"
        )
    else:
        _print_groups(view, usual)
    _print_weak(view)
    _print_places(view)
    _print_collectives(view)
    if view.busy:
        show.line(f"jobs ran during the tour on {_listed(view.busy)}", "dim")
    for note in [*view.errors, *view.notes]:
        show.line(f"note: {note}", "dim")


def _print(line: list[Cell]) -> None:
    if not show.at_terminal():
        print(plain(line))
        return
    from rich.text import Text

    text = Text()
    for cell in line:
        text.append(cell.text, style=cell.style or "")
    show.console().print(text, soft_wrap=True)


def _print_groups(view: FabricView, usual: int) -> None:
    """Only the medians between groups; with many groups, only the slowest."""
    found = between_groups(view)
    if not found:
        return
    found.sort(key=lambda one: median(one[2]) if one[2] else -1)
    many = len(groups_of(view)) > GROUPS_MAX
    rows: list[list[str | Cell]] = []
    for one, other, known, failed in found[: 3 * GROUPS_MAX] if many else found:
        middle = int(median(known)) if known else 0
        rows.append(
            [
                one or "?",
                other or "?",
                str(len(known) + failed),
                Cell(rate_text(middle), "" if middle * 2 >= usual else "yellow"),
                rate_text(known[0]) if known else "",
                str(failed) if failed else "",
            ]
        )
    titles = ("GROUP", "GROUP", "LINKS", "MEDIAN", "LOWEST", "FAILED")
    show.table([Column(title, right=number > 1) for number, title in enumerate(titles)], rows)
    if many:
        show.line(f"the slowest {len(rows)} of {len(found)} pairs of groups", "dim")


def _print_weak(view: FabricView) -> None:
    silent = _silent(view)
    if silent:
        show.line(f"no answer from {_listed(silent)}; see: shoal nodes", "red bold")
    for text in view.outliers[:WEAK_SHOWN]:
        show.line(text, "red bold")
    if (more := len(view.outliers) - WEAK_SHOWN) > 0:
        show.line(f"and {more} more; --json shows all", "red bold")


def _print_places(view: FabricView) -> None:
    groups = {place: nodes for place, nodes in groups_of(view).items() if place}
    if len(groups) < 2:
        return
    show.line(f"{len(groups)} groups of nodes that are near each other:")
    for place, nodes in list(groups.items())[: 2 * GROUPS_MAX]:
        show.line(f"  {place}: {_listed(nodes)}")
    show.line("gangs are placed by these groups with `place: measured` in the policy", "dim")


def _print_collectives(view: FabricView) -> None:
    if not view.collectives:
        return
    rows: list[list[str | Cell]] = [
        [
            one.name,
            size_text(one.size_bytes),
            str(one.ranks),
            f"{one.took_us / 1000:.2f} ms",
            rate_text(one.algorithm_mbs),
            rate_text(one.bus_mbs),
            one.backend,
        ]
        for one in sorted(view.collectives, key=lambda one: (one.name, one.ranks, one.size_bytes))
    ]
    titles = ("COLLECTIVE", "SIZE", "RANKS", "TIME", "ALGORITHM", "BUS", "BACKEND")
    show.table([Column(title, right=0 < number < 6) for number, title in enumerate(titles)], rows)


def _listed(nodes: list[str]) -> str:
    more = len(nodes) - NODES_SHOWN
    text = ", ".join(nodes[:NODES_SHOWN])
    return f"{text} and {more} more" if more > 0 else text


# The network as a picture in a terminal: one cell per pair of nodes, or groups beside groups.


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


# `shoal check --save FILE`: what was measured, as a hardware file for `shoal plan`.


def save_here(path: str) -> None:
    """The GPUs of this machine."""
    from shoal.plan.library import hardware, toml
    from shoal.probes.hardware import NotMeasurable, measure

    refuse_early(path)
    try:
        measured = measure()
    except NotMeasurable as why:
        raise Failure(f"--save: {why}") from None
    _write(path, toml(measured, hardware(), time.strftime("%Y-%m-%d")))


def save_network(view: FabricView, path: str) -> None:
    """The network between nodes, from the collectives of a tour."""
    from shoal.plan.library import fabric_toml

    text = fabric_toml(view.collectives, view.usual_latency_us, time.strftime("%Y-%m-%d"))
    if not text:
        raise Failure("--save: no all-reduce was measured; see the notes")
    _write(path, text)


def refuse_early(path: str) -> None:
    """Before a minute of measuring."""
    if not Path(path).absolute().parent.is_dir():
        raise Failure(f"--save: {path}: there is no folder {Path(path).absolute().parent}")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise Failure(f"--save: {path}: {error.strerror}") from None
    show.note(f"wrote {path}; use it with: shoal plan --hardware {path} ...")
