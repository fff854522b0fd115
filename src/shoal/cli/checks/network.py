"""`shoal check --network`: the network between nodes, measured and shown."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shoal.cli import cluster
from shoal.cli.checks.hardware_file import refuse_early, save_network
from shoal.cli.screen import show
from shoal.cli.screen.matrix import between_groups, groups_of, matrix, plain, rates_of, usual_of
from shoal.cli.screen.show import Cell, Column
from shoal.client.transport import ShoalError
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


def _measured(
    client: Client, asked: list[str], collectives: bool, progress: show.Spinner
) -> FabricView:
    try:
        view = client.check_network(asked, collectives=collectives)
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
        progress(
            f"{plural(nodes, 'node')} meet in {plural(nodes - 1 + nodes % 2, 'round')}: "
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
    if not view.outliers and not silent and view.links:
        show.line("no link is weak", "green")


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
