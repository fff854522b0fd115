"""`shoal top`: the cluster live, with keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, verb

if TYPE_CHECKING:
    from shoal.cli.screen.live import Live
    from shoal.cli.screen.top_board import Board
    from shoal.cli.screen.top_rows import Seen
    from shoal.client import Client

JOBS_READ = 500
ROWS_PRINTED = 1000


@verb(Option("--view", metavar="VIEW", default="jobs", help="jobs, nodes or services. [jobs]"))
def top(view: str, json: bool, home: Path) -> None:
    """Watch jobs, nodes and services live.

    Each GPU is a letter on the map: that of its job, in the column MAP. Up and
    down choose a job; below the table you see why it waits, and its curve.
    Enter shows its logs, c cancels it after a question, / shows only lines with
    the words that you type (names, ids, users, nodes, states). j, n and s
    choose jobs, nodes or services; < and > sort. ? lists all keys, q quits.
    While the controller is away, the last picture stays. Without a terminal,
    top prints once.

    Examples:
      shoal top
      shoal top --view nodes
      shoal top --view nodes | sort -k 3
      shoal top --json | jq '.status.gpus_free'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.top_board import Board
    from shoal.cli.screen.top_rows import COLUMNS
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import quoted

    board = Board()
    if view not in COLUMNS:
        raise Failure(f"--view: {quoted(view)} is not one of {', '.join(COLUMNS)}", USAGE)
    board.view = view
    if json or not show.at_terminal():
        with cluster.connect(home) as client:
            show.as_json(_whole(client, view)) if json else _print(client, board)
        return
    from shoal.cli.screen.top_loop import watch

    watch(home, board)


def _whole(client: Client, view: str) -> dict[str, object]:
    """With only what the view needs."""
    found: dict[str, object] = {"status": client.status(), "jobs": [], "nodes": []}
    found |= {"services": [], "samples": {}}
    if view == "jobs":
        found["jobs"] = client.jobs(limit=JOBS_READ)
    elif view == "nodes":
        found |= {"nodes": client.nodes(), "samples": client.samples()}
    else:
        found["services"] = client.services()
    return found


def _print(client: Client, board: Board) -> None:
    from shoal.cli.screen.live import Live
    from shoal.cli.screen.show import table
    from shoal.cli.screen.top_rows import COLUMNS

    live = Live(lambda: client, lambda: None)
    live.read(client)
    seen = seen_of(live)
    if board.view == "nodes":
        seen.samples = client.samples()
    elif board.view == "services":
        seen.services = {one.name: one for one in client.services()}
    columns, items = COLUMNS[board.view], getattr(seen, board.view)
    keys = board.keys(seen)[:ROWS_PRINTED]
    rows = [[one.cell(seen, items[key]) for one in columns] for key in keys]
    table([one.column for one in columns], rows)


def seen_of(live: Live) -> Seen:
    from shoal.cli.screen.top_rows import Seen, places_of

    assert live.status is not None, "something was read"
    return Seen(
        status=live.status,
        now_ms=live.now_ms,
        number=live.number,
        jobs=live.jobs,
        nodes=live.nodes,
        places=places_of(live.nodes),
    )
