"""`shoal check`: measure nodes by hand, as the cluster does when it suspects one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.health import Stand
    from shoal.model.views import CheckView

PROBE_S_MAX = 60.0
ANSWER_S_MAX = 120.0
WAIT_S = 20.0


def check(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NODE...]", help="Node ids, e.g. n1 n2; all of them if none."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Measure this machine itself, without a cluster.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> int:
    """Measure nodes, and compare them with others of their kind.

    CPU, memory, disk and clock, and on GPUs the rate of matrix products and
    copies, errors, throttling and clocks: a few seconds for each node, beside
    what runs there. Ends with 1 if a node fails.

    Examples:
      shoal check n3
      shoal check
      shoal check --here --json | jq .figures
    """
    from shoal.forms.failure import USAGE, Failure

    if here:
        if nodes:
            raise Failure("--here: measures this machine, so name no node", USAGE)
        return _check_here(json)
    return _check_nodes(nodes or [], json, home)


def _check_here(json: bool) -> int:
    """In a process of its own: what it loads, and what a broken driver does, stays there."""
    import subprocess
    import sys

    import msgspec

    from shoal.cli.screen import show
    from shoal.core.health.baseline import Fleet, judge
    from shoal.forms.failure import Failure
    from shoal.model.health import CheckResult
    from shoal.model.resources import Kind
    from shoal.model.views import CheckView

    command = [sys.executable, "-m", "shoal.probes.probe", "--id", "here"]
    with show.Progress(quiet=json) as progress:
        progress("measuring this machine, a few seconds")
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


def _check_nodes(texts: list[str], json: bool, home: Path) -> int:
    """All are asked first, so that they measure at the same time."""
    from shoal.cli import reach
    from shoal.cli.screen import show

    asked = list(dict.fromkeys(reach.node_id(text) for text in texts))
    with reach.connect(home) as client, show.Progress(quiet=json) as progress:
        names = asked or [node.id for node in client.nodes() if node.health == "ready"]
        if not names:
            show.note("no node is ready to be measured")
        begun = [_ask(client, name) for name in names]
        views = []
        for number, view in enumerate(begun):
            progress(f"measuring: {number} of {len(begun)} are done")
            views.append(_answer(client, view))
    if json:
        show.as_json(views)
    else:
        for number, view in enumerate(views):
            if number:
                show.line("")
            print_check(view)
    return 0 if all(view.verdict is not None and view.verdict.passed for view in views) else 1


def _ask(client: Client, node: str) -> CheckView:
    from shoal.cli.reach import NOT_FOUND, no_such_node
    from shoal.client import ShoalError

    try:
        return client.check(node)
    except ShoalError as error:
        if error.status == NOT_FOUND and all(known.id != node for known in client.nodes()):
            raise no_such_node(client, node) from None
        raise


def _answer(client: Client, view: CheckView) -> CheckView:
    """As far as it is known when the time is up: no verdict then."""
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
    load = ", beside running jobs" if view.busy else ""
    line(f"{view.node}: {word}, {view.verdict.why} ({view.took_ms / 1000:.1f} s{load})", style)
    if view.verdict.stands:
        columns = [
            Column("FIGURE"),
            Column("HERE", right=True),
            Column("USUAL", right=True),
            Column("LIMIT", right=True),
            Column("BESIDE"),
        ]
        table(columns, [_cells(stand) for stand in view.verdict.stands])
    for note in view.notes:
        line(f"note: {note}", "dim")


def _cells(stand: Stand) -> list[str | Cell]:
    from shoal.cli.screen.show import Cell

    beside = ""
    if stand.usual is not None:
        beside = f"{stand.of} checks of its own" if stand.own else f"{stand.of} of its kind"
    return [
        stand.figure,
        Cell(str(stand.value), "red bold" if stand.low else ""),
        "" if stand.usual is None else str(stand.usual),
        "" if stand.limit is None else str(stand.limit),
        beside,
    ]
