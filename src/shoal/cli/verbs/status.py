"""`shoal status`: the whole cluster on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import verb

if TYPE_CHECKING:
    from shoal.model.views import HeadView, JobRow, NodeView, ServiceView, StatusView

JOBS_SHOWN = 10
EVENTS_SHOWN = 5
SERVICES_SHOWN = 5
ALARMS_SHOWN = 5
BAR_WIDTH = 24


@verb()
def status(json: bool, home: Path) -> None:
    """Show the whole cluster on one screen.

    Problems come first, if there are any. Then follow the nodes, GPUs and CPUs
    in use, the services, the first jobs, what waiting jobs wait for, and the
    last events. Unusable GPUs belong to nodes that are lost, closed or in
    quarantine. --json prints only the numbers. For a live view use `shoal top`,
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
        jobs = client.jobs(limit=JOBS_SHOWN)
        services = client.services()
        healthy = set(view.nodes) <= {"ready", "cordoned", "draining", "drained", "joining"}
        nodes = [] if healthy else client.nodes()
        last = client.events(after=-EVENTS_SHOWN, limit=EVENTS_SHOWN, notable=True).events
        heads = client.heads()
        url = client.url
    _print_summary(view, url, heads)
    printed = _print_alarms(view, nodes, services, jobs)
    _print_services(services)
    _print_queue(
        view,
        jobs[
            : _room_for_jobs(
                len(services),
                printed
                + len(view.waits)
                + bool(view.caps)
                + len(view.unenforced)
                + len(view.supply)
                + bool(heads),
            )
        ],
    )
    if last:
        from shoal.cli.verbs.events import print_event

        show.line("")
        for record in last:
            print_event(record, json=False, fit=True)


def _room_for_jobs(services: int, alarms: int) -> int:
    """The lines of the terminal that the other parts leave for jobs."""
    import shutil

    lines = shutil.get_terminal_size(fallback=(80, 24)).lines
    others = 5 + alarms + (min(services, SERVICES_SHOWN) + 3 if services else 0) + EVENTS_SHOWN + 1
    return max(2, min(JOBS_SHOWN, lines - others - 4))


def _print_summary(view: StatusView, url: str, heads: list[HeadView]) -> None:
    from shoal.cli.screen.show import fitted, line
    from shoal.forms.units import duration_text
    from shoal.model.resources import cpus_text, plural

    up = duration_text(view.now_ms - view.up_since_ms)
    starts = f", {plural(view.restarts, 'restart')}" if view.restarts else ""
    line(fitted(f"Shoal {view.version} at {url}, up {up}{starts}; the page: shoal page"), "bold")
    if heads:
        line(fitted(f"heads  {', '.join(f'{head.name} ({head.role})' for head in heads)}"))
    line(fitted(f"nodes  {_counts(view.nodes) or 'none yet'}"))
    gpus = _share(view.gpus_held, view.gpus, str(view.gpus_held), str(view.gpus))
    unusable = f", {view.gpus_unusable} unusable" if view.gpus_unusable else ""
    line(f"GPUs   {gpus}, {view.gpus_free} free{unusable}")
    held, cpus = view.cpu_milli_held, view.cpu_milli
    line(f"CPUs   {_share(held, cpus, cpus_text(held), cpus_text(cpus))}")
    totals = f"; {view.submitted} submitted, {view.finished} finished in total"
    known = totals if view.submitted is not None else ""
    line(fitted(f"jobs   {_counts(view.jobs) or 'none live'}{known}"))
    for text in view.supply:
        line(fitted(f"supply {text}"))
    if view.caps:
        line(fitted(f"limits {'; '.join(view.caps)}"))
    for text in view.unenforced:
        line(fitted(f"not enforced {text}"), "dim")


def _print_alarms(
    view: StatusView, nodes: list[NodeView], services: list[ServiceView], jobs: list[JobRow]
) -> int:
    """Returns the number of lines printed."""
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


def _print_services(services: list[ServiceView]) -> None:
    if not services:
        return
    from shoal.cli.screen.show import line
    from shoal.cli.verbs.services import print_services

    line("")
    print_services(services[:SERVICES_SHOWN])
    if len(services) > SERVICES_SHOWN:
        line(f"... and {len(services) - SERVICES_SHOWN} more: shoal services", "dim")


def _print_queue(view: StatusView, jobs: list[JobRow]) -> None:
    if not jobs:
        return
    from shoal.cli.screen.show import fitted, line
    from shoal.cli.verbs.ps import print_jobs

    line("")
    print_jobs(jobs, view.now_ms, waits=0)
    more = sum(view.jobs.values()) - len(jobs)
    if more > 0:
        line(f"... and {more} more: shoal ps", "dim")
    for text in view.waits:
        line(fitted(text), "yellow dim")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _share(used: int, total: int, used_text: str, total_text: str) -> str:
    from shoal.cli.screen.show import at_terminal, bar

    text = f"{used_text} of {total_text} in use"
    return f"{bar(used, total, BAR_WIDTH)}  {text}" if at_terminal() and total else text
