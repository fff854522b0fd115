"""`shoal check`: measure nodes by hand, as the cluster does with a suspect node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, verb

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.health import Stand
    from shoal.model.views import CheckView

PROBE_S_MAX = 60.0
ANSWER_S_MAX = 120.0
WAIT_S = 20.0
OF_WAY = {
    "network": ("collectives", "halves"),
    "storage": ("job", "needs_read", "checkpoint", "every"),
}


def _text(name: str, metavar: str, help: str, heading: str) -> Option:  # noqa: A002
    return Option(name, metavar=metavar, default="", help=help, heading=heading)


@verb(
    Argument("nodes", "[NODE...]", "Node ids, e.g. n1 n2. [all nodes]", nargs=-1),
    flag("--here", help="Measure this machine itself, without a cluster."),
    flag("--network", help="Measure the network between the nodes instead.", heading="Network"),
    flag(
        "--collectives",
        help="Measure all-reduce, all-gather and all-to-all, too, with torch.",
        heading="Network",
    ),
    flag(
        "--halves",
        help="Measure halves of the nodes against each other at the same moment instead.",
        heading="Network",
    ),
    Option(
        "--save",
        metavar="FILE",
        default="",
        help="With --here or --network: write a hardware file for `shoal plan`.",
    ),
    Option(
        "--storage",
        metavar="PATH|URL",
        default=None,
        help="Measure this storage from the nodes instead.",
        heading="Storage",
    ),
    _text("--job", "JOB", "Compare it with what this job saves, and how often.", "Storage"),
    _text("--needs-read", "RATE", "The rate of the job's data, e.g. 2GB/s.", "Storage"),
    _text("--checkpoint", "SIZE", "The size of a checkpoint, e.g. 500GB.", "Storage"),
    _text("--every", "TIME", "The time between two checkpoints, e.g. 10m.", "Storage"),
)
def check(
    nodes: tuple[str, ...], here: bool, json: bool, home: Path, **given: str | bool | None
) -> int:
    """Benchmark nodes and compare them with similar ones.

    It measures CPU, memory, disk and clock. On GPUs it measures the speed of
    matrix products and copies, errors, throttling and clocks. Each node takes a
    few seconds, while its jobs keep running.

    With --network, it measures latency and bandwidth between the nodes, and
    shows weak links and the groups that it found. With --halves, it measures
    what half of the nodes and half of each rack send to the other half at the
    same moment. With --storage, it measures what the nodes can write and read
    at a path or URL, alone and together.

    The exit code is 1 if a node fails, a link is weak, or the storage does not
    feed the job.

    Examples:
      shoal check n3
      shoal check --here --json | jq .figures
      shoal check --network
      shoal check --network n1 n2 n3 n4 --collectives
      shoal check --network --halves
      shoal check --here --save hardware.toml
      shoal check --storage /data
      shoal check --storage s3://bucket/runs --checkpoint 500GB --every 10m
    """
    return _chosen(nodes, here, json, home, given)


def _chosen(
    nodes: tuple[str, ...], here: bool, json: bool, home: Path, given: dict[str, str | bool | None]
) -> int:
    from shoal.forms.failure import USAGE, Failure

    if given["storage"] == "":  # a variable that is not set
        raise Failure("--storage: is empty; name a path or a URL", USAGE)
    ways = [name for name in ("network", "storage") if given[name]] + ["here"] * here
    if len(ways) > 1:
        raise Failure(f"--{ways[0]}: cannot be combined with --{ways[1]}", USAGE)
    for way, names in OF_WAY.items():
        for name in names:
            if given[name] and way not in ways:
                shown = name.replace("_", "-")
                raise Failure(f"--{shown}: belongs to --{way}; add it", USAGE)
    if given["save"] and not given["network"] and not here:
        raise Failure("--save: needs --here (its GPUs) or --network; add one of them", USAGE)
    if given["network"]:
        from shoal.cli.checks.network import check_halves, check_network

        if given["halves"]:
            for name in ("collectives", "save"):
                if given[name]:
                    raise Failure(f"--halves: cannot be combined with --{name}", USAGE)
            return check_halves(nodes, json, home)
        return check_network(nodes, bool(given["collectives"]), str(given["save"]), json, home)
    if given["storage"]:
        from shoal.cli.checks.storage import Wanted, check_storage

        wanted = Wanted(*(str(given[name]) for name in OF_WAY["storage"]))
        return check_storage(str(given["storage"]), nodes, wanted, json, home)
    if here:
        if nodes:
            raise Failure("--here: measures this machine; leave out the node names", USAGE)
        if given["save"]:
            from shoal.cli.checks.network import save_here

            save_here(str(given["save"]))
            return 0
        return _check_here(json)
    return _check_nodes(nodes, json, home)


def _check_here(json: bool) -> int:
    """In a process of its own, so that a broken driver cannot harm this one."""
    import subprocess
    import sys

    import msgspec

    from shoal.cli.screen import show
    from shoal.core.books.baseline import Fleet, judge
    from shoal.forms.failure import Failure
    from shoal.model.health import CheckResult
    from shoal.model.resources import Kind
    from shoal.model.views import CheckView

    command = [sys.executable, "-m", "shoal.probes.probe", "--id", "here"]
    with show.Spinner(quiet=json) as progress:
        progress("measuring this machine; this takes a few seconds")
        try:
            run = subprocess.run(command, capture_output=True, timeout=PROBE_S_MAX, check=False)
            result = msgspec.json.decode(run.stdout, type=CheckResult)
        except subprocess.TimeoutExpired:
            raise Failure(f"the probe did not end within {PROBE_S_MAX:.0f} s") from None
        except msgspec.DecodeError:
            last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise Failure(f"the probe ended with code {run.returncode}: {last}") from None
    verdict = judge(Fleet(), "here", Kind(0, 0, 0), result)
    if json:
        show.as_json(result)
    else:
        view = CheckView(
            node="here", id="here", took_ms=result.took_ms, verdict=verdict, notes=result.notes
        )
        print_check(view)
    return 0 if verdict.passed else 1


def _check_nodes(texts: tuple[str, ...], json: bool, home: Path) -> int:
    """Ask all nodes first, so that they measure at the same time."""
    from shoal.cli import cluster
    from shoal.cli.screen import show

    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client, show.Spinner(quiet=json) as progress:
        names = asked or [node.id for node in client.nodes() if node.health == "ready"]
        if not names:
            show.note("no node is ready")
        begun = [_begin(client, name) for name in names]
        views = []
        for number, view in enumerate(begun):
            progress(f"measuring: {number} of {len(begun)} done")
            views.append(_answer(client, view))
    if json:
        show.as_json(views)
    else:
        for number, view in enumerate(views):
            if number:
                show.line("")
            print_check(view)
    return 0 if all(view.verdict is not None and view.verdict.passed for view in views) else 1


def _begin(client: Client, node: str) -> CheckView:
    from shoal.cli.cluster import on_node

    return on_node(client, node, lambda c: c.check(node))


def _answer(client: Client, view: CheckView) -> CheckView:
    """The result, or a view without a verdict when the time is up."""
    deadline = time.monotonic() + ANSWER_S_MAX
    while view.verdict is None and time.monotonic() < deadline:
        view = client.check_result(view.node, view.id, wait_s=WAIT_S)
    return view


def print_check(view: CheckView) -> None:
    from shoal.cli.screen.show import Column, line, table

    if view.verdict is None:
        line(f"{view.node}: no answer within {ANSWER_S_MAX:.0f} s; see: shoal nodes", "yellow")
        return
    word, style = ("ok", "green") if view.verdict.passed else ("FAILED", "red bold")
    load = ", while jobs ran" if view.busy else ""
    line(f"{view.node}: {word}, {view.verdict.why} ({view.took_ms / 1000:.1f} s{load})", style)
    if view.verdict.stands:
        columns = [
            Column("FIGURE"),
            Column("HERE", right=True),
            Column("USUAL", right=True),
            Column("LIMIT", right=True),
            Column("COMPARED-WITH"),
        ]
        table(columns, [_cells(stand) for stand in view.verdict.stands])
    for note in view.notes:
        line(f"note: {note}", "dim")


def _cells(stand: Stand) -> list[str | Cell]:
    from shoal.cli.screen.show import Cell

    beside = ""
    if stand.usual is not None:
        beside = f"{stand.of} earlier checks" if stand.own else f"{stand.of} similar nodes"
    return [
        stand.figure,
        Cell(str(stand.value), "red bold" if stand.low else ""),
        "" if stand.usual is None else str(stand.usual),
        "" if stand.limit is None else str(stand.limit),
        beside,
    ]
