"""`shoal nodes`, and the operator's wishes for them: cordon, drain, uncordon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.node import NodeIntent
    from shoal.model.views import Done, NodeView

NodesArgument = Annotated[
    list[str], typer.Argument(metavar="NODE...", help="Node ids, e.g. n1 n2.")
]
GPU_CELLS_MAX = 16


def nodes(json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """List the nodes and what is in use on them.

    GPUS, CPUS and MEMORY are used/total; 1.5 GPUs used may be three halves of
    three. A node that is not ready says why, and so does one that is suspect of
    being slow or faulty, or in quarantine for it.

    Examples:
      shoal nodes
      shoal nodes --json | jq '[.[] | .gpus_free] | add'
    """
    from shoal.cli import reach
    from shoal.cli.screen import show

    with reach.connect(home) as client:
        views = sorted(client.nodes(), key=natural)
    if json:
        show.as_json(views)
    elif views:
        print_nodes(views)
    else:
        show.note("no node has joined yet")


def cordon(nodes: NodesArgument, json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Start nothing new on nodes; what runs there goes on.

    Use it before looking into a node. Open it again with `shoal uncordon`.

    Examples:
      shoal cordon n3
      shoal cordon n3 n4
    """
    _intend(nodes, "cordoned", json, home)


def drain(nodes: NodesArgument, json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Move jobs away from nodes, and start nothing new on them.

    Jobs that may restart are stopped and queued again for other nodes; those
    with `restart: never` are left to finish. Open the node again with `shoal
    uncordon`.

    Examples:
      shoal drain n3
      shoal drain n3 && shoal nodes
    """
    _intend(nodes, "draining", json, home)


def uncordon(
    nodes: NodesArgument, json: JsonOption = False, home: HomeOption = DEFAULT_HOME
) -> None:
    """Open nodes for jobs again.

    It undoes `shoal cordon` and `shoal drain`, and ends a quarantine.

    Examples:
      shoal uncordon n3
      shoal uncordon n1 n2 n3 n4
    """
    _intend(nodes, "open", json, home)


def _intend(texts: list[str], intent: str, json: bool, home: Path) -> None:
    from shoal.cli import reach
    from shoal.cli.screen.several import each
    from shoal.model.node import NodeIntent

    asked = list(dict.fromkeys(reach.node_id(text) for text in texts))
    with reach.connect(home) as client:
        each(asked, lambda node: _set(client, node, NodeIntent(intent)), f"is {intent}", json)


def _set(client: Client, node: str, intent: NodeIntent) -> Done:
    from shoal.cli.reach import NOT_FOUND, no_such_node
    from shoal.client import ShoalError

    try:
        return client.set_intent(node, intent)
    except ShoalError as error:
        if error.status == NOT_FOUND:
            raise no_such_node(client, node) from None
        raise


def natural(view: NodeView) -> list[tuple[int, str]]:
    """n2 before n10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", view.id)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def print_nodes(views: list[NodeView]) -> None:
    from shoal.cli.screen.show import Column, table

    columns = [
        Column("ID"),
        Column("STATE"),
        Column("PLACE"),
        Column("GPUS"),
        Column("CPUS", right=True),
        Column("MEMORY", right=True),
        Column("JOBS", flexible=True),
    ]
    models = any(view.gpu_model for view in views)
    if models:
        columns.insert(4, Column("MODEL"))
    table(columns, [_cells(view, models) for view in views])


def _cells(view: NodeView, models: bool) -> list[str | Cell]:
    from shoal.cli.screen.show import Cell, bar, state_cell
    from shoal.forms.units import memory_text
    from shoal.model.resources import cpus_text

    used = view.gpus - view.gpu_milli_free / 1000
    cpus = cpus_text(view.cpu_milli - view.cpu_milli_free)
    memory = memory_text(view.memory_mb - view.memory_mb_free)
    gpus = Cell(f"{used:g}/{view.gpus}", "green" if used else "dim")
    if view.gpus:
        cells = bar(used, view.gpus, min(view.gpus, GPU_CELLS_MAX))
        gpus = gpus._replace(pretty=f"{cells} {used:g}/{view.gpus}")
    jobs = ",".join(view.jobs)
    if view.health == "ready" and view.standing == "suspect":
        jobs = f"{jobs} (suspect: {view.why})".strip()
    elif (view.health != "ready" or view.standing != "ok") and view.why:
        jobs = f"{jobs} ({view.why})".strip()
    row: list[str | Cell] = [
        Cell(view.id, "bold"),
        state_cell(view.state),
        Cell(view.place, "dim"),
        gpus,
        f"{cpus}/{cpus_text(view.cpu_milli)}",
        f"{memory}/{memory_text(view.memory_mb)}",
        jobs,
    ]
    if models:
        row.insert(4, view.gpu_model)
    return row
