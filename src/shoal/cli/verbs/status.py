"""The whole cluster on one screen: status, top (live) and supply (where its nodes come from)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, verb

if TYPE_CHECKING:
    from shoal.cli.screen.top_board import Board
    from shoal.cli.screen.top_loop import Live
    from shoal.cli.screen.top_rows import Seen
    from shoal.client import Client
    from shoal.model.supply import OrderView, SuppliesView, SupplyView
    from shoal.model.views import HeadView, JobRow, NodeView, ServiceView, StatusView


JOBS_SHOWN = 10
EVENTS_SHOWN = 5
SERVICES_SHOWN = 3
ALARMS_SHOWN = 3
WAITS_SHOWN = 3
BAR_WIDTH = 24
BAR_ROOM = 70  # a narrower terminal needs its columns for the words


@verb()
def status(json: bool, home: Path) -> None:
    """Show the whole cluster on one screen.

    Problems come first, if there are any. Then follow the nodes, GPUs and CPUs
    in use, the services, the first jobs, what waiting jobs wait for, and the
    last events. --json prints only the numbers. For a live view use `shoal top`,
    for one job `shoal why`.

    Examples:
      shoal status
      shoal status --json | jq .gpus_held
      watch -n 1 shoal status
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.status()
        if json:
            show.as_json(view)
            return
        from shoal.calls.lines import EventLines

        jobs = client.jobs(limit=JOBS_SHOWN)
        services = client.services()
        healthy = set(view.nodes) <= {"ready", "cordoned", "draining", "drained", "joining"}
        nodes = [] if healthy else client.nodes()
        last = cluster.read_as(
            EventLines, client.events, after=-EVENTS_SHOWN, limit=EVENTS_SHOWN, notable=True
        ).events
        heads = client.heads()
        url = client.url
    printed = _print_summary(view, url, heads)
    printed += _print_alarms(view, nodes, services, jobs)
    printed += _print_services(services)
    shown = EVENTS_SHOWN if not show.at_terminal() else _events_fitting(printed)
    _print_queue(view, jobs, printed + min(len(last), shown) + bool(last))
    if last:
        from shoal.cli.verbs.explain import print_event

        show.line("")
        for record in last[-shown:]:
            print_event(record, json=False, fit=True)


def _lines() -> int:
    """Of the terminal, without the one for the next prompt."""
    import shutil

    return shutil.get_terminal_size(fallback=(80, 24)).lines - 1


def _events_fitting(printed: int) -> int:
    """Jobs need the larger part of what is left."""
    return max(2, min(EVENTS_SHOWN, (_lines() - printed) // 3))


def _print_summary(view: StatusView, url: str, heads: list[HeadView]) -> int:
    """Returns the number of lines printed, as the others do."""
    from shoal.cli.screen.show import fitted, line
    from shoal.cli.screen.words import unusable_text
    from shoal.forms.units import duration_text
    from shoal.model.resources import cpus_text, plural

    up = duration_text(view.now_ms - view.up_since_ms)
    starts = f", {plural(view.restarts, 'restart')}" if view.restarts else ""
    held, cpus = view.cpu_milli_held, view.cpu_milli
    gpus = _share(view.gpus_held, view.gpus, str(view.gpus_held), str(view.gpus))
    ended = "" if view.finished is None else f", {view.finished} finished"
    lines = [f"nodes   {_counts(view.nodes) or 'none yet'}"]
    lines += [f"GPUs    {gpus}, {view.gpus_free} free{unusable_text(view)}"]
    lines += [f"CPUs    {_share(held, cpus, cpus_text(held), cpus_text(cpus))}"]
    lines += [f"jobs    {_counts(view.jobs) or 'none active'}{ended}"]
    if heads:
        lines.append(f"heads   {', '.join(f'{head.name} ({head.role})' for head in heads)}")
    lines += [f"supply  {text}" for text in view.supply]
    lines += [f"limits  {'; '.join(view.caps)}"] if view.caps else []
    line(fitted(f"Shoal {view.version} at {url}, up {up}{starts}; page: shoal page"), "bold")
    for text in lines:
        line(fitted(text))
    for text in view.unenforced:
        line(fitted(f"not enforced {text}"), "dim")
    return 1 + len(lines) + len(view.unenforced)


def _print_alarms(
    view: StatusView, nodes: list[NodeView], services: list[ServiceView], jobs: list[JobRow]
) -> int:
    from shoal.cli.screen.alarms import alarms
    from shoal.cli.screen.show import fitted, line

    found = alarms(view, nodes, services, jobs)
    if not found:
        return 0
    line("")
    for alarm in found[:ALARMS_SHOWN]:
        line(fitted(f"! {alarm.text}; see: {alarm.see}"), "red")
    if len(found) > ALARMS_SHOWN:
        line(f"! and {len(found) - ALARMS_SHOWN} more", "red")
    return min(len(found), ALARMS_SHOWN + 1) + 1


def _print_services(services: list[ServiceView]) -> int:
    if not services:
        return 0
    from shoal.cli.screen.show import line
    from shoal.cli.verbs.services import print_services

    line("")
    print_services(services[:SERVICES_SHOWN], reasons=False)
    if len(services) > SERVICES_SHOWN:
        line(f"... and {len(services) - SERVICES_SHOWN} more: shoal services", "dim")
    return min(len(services), SERVICES_SHOWN + 1) + 2


def _print_queue(view: StatusView, jobs: list[JobRow], others: int) -> None:
    """`others`: lines of the screen that other parts need."""
    if not jobs:
        return
    from shoal.cli.screen.show import at_terminal, fitted, line
    from shoal.cli.verbs.ps import print_jobs

    waits = view.waits[:WAITS_SHOWN]
    room = _lines() - others - len(waits) - 3  # a blank line, the titles, the count of the rest
    shown = jobs[: max(2, room)] if at_terminal() else jobs
    line("")
    print_jobs(shown, view.now_ms, waits=0)
    more = sum(view.jobs.values()) - len(shown)
    if more > 0:
        line(f"... and {more} more: shoal ps", "dim")
    for text in waits:
        line(fitted(text), "yellow dim")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _share(used: int, total: int, used_text: str, total_text: str) -> str:
    import shutil

    from shoal.cli.screen.show import at_terminal, bar

    text = f"{used_text} of {total_text} in use"
    wide = at_terminal() and shutil.get_terminal_size().columns >= BAR_ROOM
    return f"{bar(used, total, BAR_WIDTH)}  {text}" if wide and total else text


# `shoal top`: the cluster live, with keys.


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
    from shoal.cli.screen.show import table
    from shoal.cli.screen.top_loop import Live
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


# `shoal supply`: where nodes come from, and what was ordered.


@verb()
def supply(json: bool, home: Path) -> None:
    """Show where nodes come from, and what was ordered.

    The policy names supplies: kinds of nodes that Slurm, Kubernetes or Ray
    brings when jobs wait for them. NODES is how many have joined, COMING how
    many were asked for, MOST how many there may be. Each order is shown with
    the supplier's own name for it (a Slurm job id, a pod) and what it waits for.

    Examples:
      shoal supply
      shoal supply --json | jq '.orders[] | select(.phase == "pending")'
      shoal policy set elastic.yaml
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.supply()
    if json:
        show.as_json(view)
        return
    if not view.supplies:
        show.note("the policy has no supply; see: shoal policy show, and docs/supply.md")
        return
    _print_supplies(view)
    if view.orders:
        show.line("")
        titles = ("ORDER", "SUPPLY", "PHASE", "JOINED", "AGE", "HANDLE", "REASON")
        show.table(
            [show.Column(title, wraps=title in ("STATE", "REASON")) for title in titles],
            [_order_row(order, view.now_ms) for order in view.orders],
        )


def _print_supplies(view: SuppliesView) -> None:
    from shoal.cli.screen import show

    priced = any(one.price for one in view.supplies)
    money = [f"{view.currency or 'COST'}/H"] if priced else []
    titles = ["SUPPLY", "ENGINE", "NODES", "COMING", "MOST", *money, "EACH", "STATE"]
    show.table(
        [show.Column(title, wraps=title in ("STATE", "REASON")) for title in titles],
        [_supply_row(one, priced=priced) for one in view.supplies],
    )


def _supply_row(one: SupplyView, *, priced: bool) -> list[str]:
    from shoal.forms.supply import price_text

    least = f"{one.least}-" if one.least else ""
    cost = price_text(one.cost) + (f" of {price_text(one.ceiling)}" if one.ceiling else "")
    return [
        one.name,
        one.engine,
        str(one.nodes),
        str(one.coming),
        f"{least}{one.most}",
        *([cost] if priced else []),
        one.kind,
        one.state,
    ]


def _order_row(order: OrderView, now_ms: int) -> list[str]:
    from shoal.forms.units import duration_text

    nodes = f"{len(order.joined)} of {len(order.nodes)}"
    return [
        order.id,
        order.supply,
        order.phase,
        nodes,
        duration_text(now_ms - order.at_ms),
        order.handle or "-",
        order.reason or order.why,
    ]
