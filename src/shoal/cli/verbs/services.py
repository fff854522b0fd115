"""`shoal services` and `shoal service`: list, show, roll back and stop services."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, flag, verb

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.events import Recorded
    from shoal.model.views import ReplicaView, ServiceView

EVENTS_READ = 1000  # this many of the newest events are searched for the service's own
EVENTS_SHOWN = 12


@verb()
def services(json: bool, home: Path) -> None:
    """List the services and their load.

    READY shows the replicas that get requests / the replicas wanted now.
    LATENCY is the time until an answer begins. QUEUED counts the requests that
    wait in the gateway, including those that wait for a first replica.

    Examples:
      shoal services
      shoal services --json | jq -r '.[] | select(.state != "ready") | .why'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        views = sorted(client.services(), key=lambda view: view.name)
    if json:
        show.as_json(views)
    elif not views:
        show.note("there are no services; start one with: shoal serve NAME -- COMMAND")
    else:
        print_services(views)


@verb(
    Argument("name", "NAME", "A service, e.g. chat."),
    flag("--stop", help="Finish the open requests, then end the service."),
    flag("--rollback", help="Roll out the version before again."),
)
def service(name: str, stop: bool, rollback: bool, json: bool, home: Path) -> None:
    """Show one service with its replicas, roll it back, or stop it.

    It shows the service's load, its replicas and its last events. NODE lists the
    nodes of all members; the first one answers. With --stop
    the service gets no new requests, answers the open ones, and ends. The
    command does not wait for that. With --rollback the last other version that
    was ready is rolled out as a new one. The number of replicas stays.

    Examples:
      shoal service chat
      shoal service chat --rollback
      shoal service chat --json | jq '.replicas[] | {job, state, in_flight}'
      shoal service chat --stop
    """
    from shoal.cli import cluster
    from shoal.forms.failure import USAGE, Failure

    if stop and rollback:
        raise Failure("--rollback: cannot be combined with --stop; give one of them", USAGE)
    asked = cluster.service_name(name)
    if stop:
        _stop(asked, home, json)
    elif rollback:
        _roll_back(asked, home, json)
    else:
        show_service(asked, home, json)


def show_service(name: str, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = cluster.on_service(client, name, lambda c: c.service(name))
        records = [] if json else _last_events(client, view)
    if json:
        show.as_json(view)
    else:
        _print_whole(view, records, int(time.time() * 1000))


def _stop(name: str, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        done = cluster.on_service(client, name, lambda c: c.stop_service(name))
    if json:
        show.as_json(done)
    else:
        show.line(f"{name}: {done.note}" if done.note else f"{name} is being stopped")


def _roll_back(name: str, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = cluster.on_service(client, name, lambda c: c.roll_back_service(name))
    if json:
        show.as_json(view)
    else:
        show.line(f"{name} goes back: version {view.version} is being rolled out")


def _last_events(client: Client, view: ServiceView) -> list[Recorded]:
    """The newest events of the service and of its present replicas."""
    from shoal.model.events import JobEvent, ServiceEvent

    jobs = {replica.job for replica in view.replicas}
    found = []
    for record in client.events(after=-EVENTS_READ, limit=EVENTS_READ, notable=True).events:
        event = record.event
        if isinstance(event, ServiceEvent):
            about = event.service == view.name
        else:
            about = isinstance(event, JobEvent) and event.job in jobs
        if about:
            found.append(record)
    return found[-EVENTS_SHOWN:]


def print_services(views: list[ServiceView]) -> None:
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    columns = [
        Column("NAME"),
        Column("STATE"),
        Column("READY", right=True),
        Column("VERSION", right=True),
        Column("RPS", right=True),
        Column("LATENCY", right=True),
        Column("IN-FLIGHT", right=True),
        Column("QUEUED", right=True),
        Column("URL"),
    ]
    rows: list[list[str | Cell]] = [
        [
            Cell(view.name, "bold"),
            state_cell(view.state),
            f"{view.ready}/{view.wanted}",
            str(view.version),
            f"{view.requests_per_s:.1f}",
            latency_text(view.response_ms, view.requests_per_s),
            str(view.in_flight),
            str(view.queued),
            view.url,
        ]
        for view in views
    ]
    table(columns, rows)
    for view in views:
        if view.state not in ("ready", "idle", "asleep") and view.why:
            _print_why(view.name, view.why)


def _print_why(name: str, why: str) -> None:
    from shoal.cli.screen.show import line

    line(f"{name}: {why}", "dim")


def latency_text(response_ms: int, requests_per_s: float) -> str:
    """A dash if there were no requests to measure."""
    return f"{response_ms}ms" if response_ms or requests_per_s else "-"


def _print_whole(view: ServiceView, records: list[Recorded], now_ms: int) -> None:
    from shoal.cli.screen.show import STATE_STYLES, line
    from shoal.cli.screen.words import replicas_text
    from shoal.model.phrases import command_text

    line(f"{view.name} is {view.state}", STATE_STYLES.get(view.state, "") + " bold")
    if view.why:
        line(f"  {view.why}")
    if view.browser_url not in ("", view.url):
        line(f"  {view.browser_url} (in a browser)")
    if view.url:
        line(f"  {view.url}")
    spec = view.spec
    members = spec.replica.members
    of = (f" of {members} members", " each") if members > 1 else ("", "")
    what = f"{replicas_text(spec.scale)}{of[0]} with {spec.replica.demand}{of[1]}"
    line(f"  version {view.version}: {what}: {command_text(spec.replica.command)}")
    latency = latency_text(view.response_ms, view.requests_per_s)
    failed = f", {view.failed_per_s:.1f}/s failed" if view.failed_per_s else ""
    line(
        f"  {view.ready} of {view.wanted} ready; {view.requests_per_s:.1f} requests/s, "
        f"latency {latency}, {view.in_flight} in flight, {view.queued} queued{failed}"
    )
    if view.replicas:
        line("")
        _print_replicas(view.replicas)
    if records:
        line("")
        _print_events(records, now_ms)


def _print_replicas(replicas: list[ReplicaView]) -> None:
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    columns = [
        Column("JOB"),
        Column("STATE"),
        Column("NODE"),
        Column("ADDRESS"),
        Column("VERSION", right=True),
        Column("RPS", right=True),
        Column("LATENCY", right=True),
        Column("IN-FLIGHT", right=True),
        Column("WHY", wraps=True),
    ]
    rows: list[list[str | Cell]] = [
        [
            Cell(replica.job, "bold"),
            state_cell(replica.state),
            ",".join(dict.fromkeys(replica.nodes)) or replica.node,
            Cell(replica.address, "dim"),
            str(replica.version),
            f"{replica.requests_per_s:.1f}",
            latency_text(replica.response_ms, replica.requests_per_s),
            str(replica.in_flight),
            replica.why + engine_text(replica),
        ]
        for replica in replicas
    ]
    table(columns, rows)


def engine_text(replica: ReplicaView) -> str:
    engine = replica.engine
    if engine is None:
        return ""
    cache = f"{engine.cache_milli // 10} % of its cache in use"
    return f"; its engine runs {engine.running}, {engine.waiting} wait, {cache}"


def _print_events(records: list[Recorded], now_ms: int) -> None:
    from shoal.cli.screen.show import Cell, Column, table
    from shoal.forms.units import duration_text

    rows: list[list[str | Cell]] = [
        [Cell(f"{duration_text(now_ms - record.event.at_ms)} ago", "dim"), record.event.sentence()]
        for record in records
    ]
    table([Column("WHEN", right=True), Column("WHAT", wraps=True)], rows)
