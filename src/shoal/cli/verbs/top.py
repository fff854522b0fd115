"""`shoal top`: the cluster live, with keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, verb

if TYPE_CHECKING:
    from shoal.cli.screen.top_board import Board, Seen
    from shoal.client import Client
    from shoal.model.series import JobSeries, NodeSeries, ServiceSeries

JOBS_READ = 500
ROWS_PRINTED = 1000
REFRESH_S = 1.0


@verb(Option("--view", metavar="VIEW", default="jobs", help="jobs, nodes or services. [jobs]"))
def top(view: str, json: bool, home: Path) -> None:
    """Watch jobs, nodes and services live.

    Keys: j, n and s choose jobs, nodes or services. Up and down move the
    cursor; below the table you see the reason and the curve of the selected
    line. < and > sort by another column, r reverses the order, q quits.
    Without a terminal it prints once.

    Examples:
      shoal top
      shoal top --view nodes
      shoal top --view nodes | sort -k 3
      shoal top --json | jq '.status.gpus_free'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.top_board import COLUMNS, Board
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import quoted

    board = Board()
    if view not in COLUMNS:
        raise Failure(f"--view: {quoted(view)} is not one of {', '.join(COLUMNS)}", USAGE)
    board.view = view
    with cluster.connect(home) as client:
        seen = look(client, board)
        if json:
            show.as_json(seen)
        elif not show.at_terminal():
            _print(board, seen)
        else:
            _watch(client, board, seen)


def look(client: Client, board: Board) -> Seen:
    from shoal.cli.screen.top_board import Seen

    status = client.status()
    if board.view == "jobs":
        return Seen(status=status, jobs=client.jobs(limit=JOBS_READ))
    if board.view == "nodes":
        return Seen(status=status, nodes=client.nodes(), samples=client.samples())
    return Seen(status=status, services=client.services())


def _print(board: Board, seen: Seen) -> None:
    from shoal.cli.screen.show import table
    from shoal.cli.screen.top_board import COLUMNS

    table(COLUMNS[board.view], [row.cells for row in board.rows(seen)[:ROWS_PRINTED]])


def _watch(client: Client, board: Board, seen: Seen) -> None:
    import time

    from rich.console import Group
    from rich.live import Live

    from shoal.cli.screen.keys import Keys
    from shoal.cli.screen.show import console
    from shoal.cli.screen.top_board import detail
    from shoal.cli.screen.top_screen import draw
    from shoal.client import ShoalError, Unreachable

    screen = console()
    trouble, due, curve = "", time.monotonic() + REFRESH_S, None
    with Keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as live:
        while not board.over:
            size = screen.size
            text = detail(curve, size.width)
            lines = draw(board, seen, trouble, text, (size.width, size.height), client.url)
            live.update(Group(*lines), refresh=True)
            key = keys.wait(max(0.0, due - time.monotonic()))
            if key and not board.press(key) and time.monotonic() < due:
                continue
            try:
                seen = look(client, board)
                curve = _curve(client, board, seen)
                trouble = ""
            except Unreachable as error:
                trouble = str(error)
            except ShoalError as error:
                trouble = error.message
            due = time.monotonic() + REFRESH_S


def _curve(
    client: Client, board: Board, seen: Seen
) -> JobSeries | NodeSeries | ServiceSeries | None:
    """The curve of the selected row."""
    rows = board.rows(seen)
    if not rows:
        return None
    key = rows[board.cursor].key
    if board.view == "jobs":
        return client.job_series(key)
    return client.node_series(key) if board.view == "nodes" else client.service_series(key)
