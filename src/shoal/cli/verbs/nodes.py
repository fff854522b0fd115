"""`shoal nodes`, and what an operator can do with them: cordon, drain, uncordon."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, verb
from shoal.cli.moments import AT, IN

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.views import Done, NodeView

NODES = Argument("nodes", "NODE...", "Node ids, e.g. n1 n2.", nargs=-1, required=True)
WHY = Option("--why", metavar="TEXT", help="A reason, for the node's history.")
GPU_CELLS_MAX = 16


@verb(
    Option(
        "--where",
        metavar="CONDITION",
        multiple=True,
        help="Only nodes whose labels meet this, e.g. pool=a100,zone!=b.",
    ),
    flag("--labels", help="Show labels and taints, too. A taint begins with !."),
)
def nodes(where: tuple[str, ...], labels: bool, json: bool, home: Path) -> None:
    """List the nodes and what is in use on them.

    GPUS, CPUS and MEMORY show used/total. 1.5 GPUs in use may be half of each
    of three GPUs. A node shows why it is not ready, or why it is suspected to
    be slow or faulty, or why it is in quarantine; and when it ends, if that is
    known. The last lines name limits that a node cannot enforce, and nodes
    with GPUs that cannot put jobs to sleep, and why.
    During an upgrade, VERSION shows which Shoal each node runs.

    Examples:
      shoal nodes
      shoal nodes --where pool=a100,zone!=b --labels
      shoal nodes --json | jq '[.[] | .gpus_free] | add'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    conditions = _conditions(where)
    with cluster.connect(home) as client:
        known = sorted(client.nodes(), key=natural)
    views = [view for view in known if _meets(view, conditions)]
    if json:
        show.as_json(views)
    elif views:
        print_nodes(views, labels)
    elif known:
        show.note(f"no node has {' and '.join(conditions)}; see: shoal nodes --labels")
    else:
        show.note("no node has joined yet")


def _conditions(where: tuple[str, ...]) -> tuple[str, ...]:
    from shoal.forms import readers
    from shoal.forms.failure import USAGE, BadField, Failure

    try:
        return tuple(readers.conditions("where", list(where))) if where else ()
    except BadField as error:
        raise Failure(str(error), USAGE) from None


def _meets(view: NodeView, conditions: tuple[str, ...]) -> bool:
    from shoal.model.labels import NODE, meets, words_of

    words = words_of({**view.labels, NODE: view.id})
    return all(meets(condition, words) for condition in conditions)


@verb(NODES, WHY)
def cordon(nodes: tuple[str, ...], why: str | None, json: bool, home: Path) -> int:
    """Start nothing new on nodes; running jobs continue.

    Use it before you work on a node. Open the node again with `shoal uncordon`.

    Examples:
      shoal cordon n3
      shoal cordon n3 n4 --why "a fan is loud"
    """
    return _intend(nodes, "cordoned", json, home, why or "")


@verb(NODES, AT, IN, WHY)
def drain(
    nodes: tuple[str, ...],
    at: str | None,
    in_: str | None,
    why: str | None,
    json: bool,
    home: Path,
) -> int:
    """Move jobs off nodes, and start nothing new on them.

    Jobs that may restart are stopped and queued for other nodes. Jobs with
    `restart: never` keep running until they finish. Open the node again with
    `shoal uncordon`.

    With --at or --in, the nodes are free at that time: until then only jobs
    start there that are expected to be done by then or save their work, and
    the others move just before. `shoal uncordon` takes it back.

    Examples:
      shoal drain n3 --why "new memory"
      shoal drain n3 n4 --at 18:30
      shoal drain n3 --in 8h
    """
    from shoal.cli.moments import ms_from_now
    from shoal.model.durations import duration_text

    in_ms = ms_from_now(at, in_)
    if not in_ms:
        return _intend(nodes, "draining", json, home, why or "")
    done = f"will be drained in {duration_text(in_ms)}"
    said = why or ""
    return _on_each(
        nodes, lambda client, node: client.drain_in(node, in_ms, said), done, json, home
    )


@verb(NODES)
def uncordon(nodes: tuple[str, ...], json: bool, home: Path) -> int:
    """Open nodes for jobs again.

    This undoes `shoal cordon` and `shoal drain`, also one that is planned, and
    ends a quarantine.

    Examples:
      shoal uncordon n3
      shoal uncordon n1 n2 n3 n4
    """
    return _intend(nodes, "open", json, home)


def _intend(texts: tuple[str, ...], intent: str, json: bool, home: Path, why: str = "") -> int:
    from shoal.model.node import NodeIntent

    wish = NodeIntent(intent)
    done = f"is {intent}"
    return _on_each(
        texts, lambda client, node: client.set_intent(node, wish, why), done, json, home
    )


def _on_each(
    texts: tuple[str, ...],
    act: Callable[[Client, str], Done],
    done: str,
    json: bool,
    home: Path,
) -> int:
    from shoal.cli import cluster
    from shoal.cli.each import each

    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client:
        return each(
            asked,
            lambda node: cluster.on_node(client, node, lambda client: act(client, node)),
            done,
            json,
        )


def natural(view: NodeView) -> list[tuple[int, str]]:
    """n2 before n10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", view.id)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def print_nodes(views: list[NodeView], labels: bool = False) -> None:
    from shoal.cli.screen.show import Column, table

    columns = [
        Column("ID"),
        Column("STATE"),
        Column("PLACE"),
        Column("GPUS"),
        Column("CPUS", right=True),
        Column("MEMORY", right=True),
        Column("JOBS", wraps=True),
    ]
    models = any(view.gpu_model for view in views)
    if models:
        columns.insert(4, Column("MODEL"))
    rows = [_cells(view, models) for view in views]
    if len({view.version for view in views if view.health == "ready"}) > 1:  # during an upgrade
        columns.insert(2, Column("VERSION"))
        for view, cells in zip(views, rows, strict=True):
            cells.insert(2, view.version or "before 0.6")
    if labels:
        columns.insert(-1, Column("LABELS"))
        for view, cells in zip(views, rows, strict=True):
            cells.insert(-1, labels_text(view))
    table(columns, rows)
    _print_unenforced(views)


def ends_text(in_ms: int, why: str) -> str:
    from shoal.model.durations import duration_text

    when = f"ends in {duration_text(in_ms)}" if in_ms > 0 else "its end has come"
    return f"{when}: {why}" if why else when


def sleepers_text(view: NodeView) -> str:
    from shoal.forms.units import memory_text

    held = f", {memory_text(view.sleepers_mb)} of memory for them" if view.sleepers_mb else ""
    return f"{view.sleepers} asleep{held}"


def labels_text(view: NodeView) -> str:
    """A taint is marked by an exclamation mark."""
    pairs = [f"{key}={value}" for key, value in sorted(view.labels.items())]
    return " ".join([*pairs, *(f"!{taint}" for taint in view.taints)])


def _print_unenforced(views: list[NodeView]) -> None:
    from shoal.cli.screen.show import line
    from shoal.model.node import unenforced_lines

    there = {view.id: view.unenforced for view in views if view.health != "lost"}
    for text in unenforced_lines(there):
        line(f"not enforced {text}", "dim")
    cannot = {view.id: [view.sleep_why] for view in views if view.gpus and view.sleep_why}
    for text in unenforced_lines({**dict.fromkeys(there, ()), **cannot}):
        line(f"jobs cannot sleep {text}", "dim")


def _place(view: NodeView) -> str:
    """As it was typed in, and as it was measured."""
    measured = f"{view.measured_place} (measured)" if view.measured_place else ""
    return ", ".join(filter(None, (view.place, measured)))


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
    if view.sleepers:
        jobs = f"{jobs} ({sleepers_text(view)})".strip()
    if view.ends_in_ms is not None:
        jobs = f"{jobs} ({ends_text(view.ends_in_ms, view.ends_why)})".strip()
    if view.weak_links:
        jobs = f"{jobs} ({'; '.join(view.weak_links)})".strip()
    row: list[str | Cell] = [
        Cell(view.id, "bold"),
        state_cell(view.state),
        Cell(_place(view), "dim"),
        gpus,
        f"{cpus}/{cpus_text(view.cpu_milli)}",
        f"{memory}/{memory_text(view.memory_mb)}",
        jobs,
    ]
    if models:
        row.insert(4, view.gpu_model)
    return row
