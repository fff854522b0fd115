"""`shoal status`: the whole cluster on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.model.views import StatusView

JOBS_SHOWN = 10
EVENTS_SHOWN = 5
BAR_WIDTH = 24


def status(json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Show the whole cluster on one screen.

    How many nodes, GPUs and CPUs are there and in use, the first jobs of the
    queue, and what happened last. --json prints the numbers only.

    Examples:
      shoal status
      shoal status --json | jq .gpus_held
      watch -n 1 shoal status
    """
    from shoal.cli import reach, show

    with reach.connect(home) as client:
        view = client.status()
        if json:
            show.as_json(view)
            return
        jobs = client.jobs(limit=JOBS_SHOWN)
        last = client.events(after=-EVENTS_SHOWN, limit=EVENTS_SHOWN).events
        url = client.url
    _print_summary(view, url)
    if jobs:
        from shoal.cli.ps import print_jobs

        show.line("")
        print_jobs(jobs, view.now_ms)
        more = sum(view.jobs.values()) - len(jobs)
        if more > 0:
            show.line(f"... and {more} more: shoal ps", "dim")
    if last:
        from shoal.cli.events import print_event

        show.line("")
        for record in last:
            print_event(record, json=False)


def _print_summary(view: StatusView, url: str) -> None:
    from shoal.cli.show import line
    from shoal.cli.units import duration_text
    from shoal.model.resources import cpus_text

    up = duration_text(view.now_ms - view.up_since_ms)
    starts = f", controller start {view.epoch}" if view.epoch > 1 else ""
    line(f"Shoal {view.version} at {url}, up {up}{starts}; the page: shoal page", "bold")
    line(f"nodes  {_counts(view.nodes) or 'none yet'}")
    line(f"GPUs   {_share(view.gpus_held, view.gpus, str(view.gpus_held), str(view.gpus))}")
    held, cpus = view.cpu_milli_held, view.cpu_milli
    line(f"CPUs   {_share(held, cpus, cpus_text(held), cpus_text(cpus))}")
    totals = f"{view.submitted} submitted, {view.finished} finished since the beginning"
    line(f"jobs   {_counts(view.jobs) or 'none live'}; {totals}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _share(used: int, total: int, used_text: str, total_text: str) -> str:
    from shoal.cli.show import at_terminal, bar

    text = f"{used_text} of {total_text} in use"
    return f"{bar(used, total, BAR_WIDTH)}  {text}" if at_terminal() and total else text
