"""`shoal schedule` and `shoal workflow`: jobs at certain times, and jobs that wait for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.command import Argument, Option, RunVerb, Verb, flags_of, verb
from shoal.forms.failure import USAGE, Failure
from shoal.forms.fields import JOB

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.client import Client
    from shoal.model.schedule import ScheduleView
    from shoal.model.workflow import WorkflowView


ACTIONS = ("add", "list", "show", "pause", "resume", "run", "remove")
HEADING = "When it is due"
CRON = Option("--cron", metavar="CRON", help="Minute hour day month weekday.", heading=HEADING)
TIMEZONE = Option(
    "--timezone", metavar="ZONE", help="E.g. Europe/Berlin. [UTC]", heading=HEADING, default=""
)
OVERLAP = Option(
    "--overlap",
    metavar="RULE",
    type=click.Choice(["skip", "allow"]),
    help="If the last run has not ended: skip or allow. [skip]",
    heading=HEADING,
    default="skip",
)
MISSED = Option(
    "--missed",
    metavar="RULE",
    type=click.Choice(["run", "skip"]),
    help="If no controller was there: run once, or skip. [run]",
    heading=HEADING,
    default="run",
)
FILE = Option("-f", "--file", metavar="FILE", help="A job file or workflow file to run.")


class ScheduleVerb(RunVerb):
    """Flags may come before and after the action and the name, up to the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags: list[str] = []
        lead: list[str] = []
        rest = list(args)
        for _ in range(2):
            words = self.words(ctx, rest)
            flags += _without_end(rest[: len(rest) - len(words)])
            lead += words[:1]
            rest = words[1:]
        command = self.words(ctx, rest)
        flags += _without_end(rest[: len(rest) - len(command)])
        ctx.allow_interspersed_args = False
        return Verb.parse_args(self, ctx, [*flags, "--", *lead, *command])


def _without_end(part: list[str]) -> list[str]:
    return part[:-1] if part and part[-1] == "--" else part


@verb(
    Argument("words", "[ACTION] [NAME] [COMMAND...]", "What to do. [list]", nargs=-1),
    CRON,
    TIMEZONE,
    OVERLAP,
    MISSED,
    FILE,
    *flags_of(JOB),
    cls=ScheduleVerb,
)
def schedule(
    words: tuple[str, ...],
    cron: str | None,
    timezone: str,
    overlap: str,
    missed: str,
    file: str | None,
    json: bool,
    home: Path,
    **flags: Any,
) -> None:
    """Run a command, job file or workflow on a schedule.

    add NAME sets a schedule, or changes it; its jobs take the flags of `shoal run`.
    list and show print the next five runs; pause, resume, run (now) and remove
    do what they say.

    --cron has five fields: minute, hour, day of the month, month, day of the week
    (0 or SUN is Sunday); or six, with seconds first. `*`, `1-5`, `*/15`, `1,15` and
    names work, as do @hourly, @daily, @weekly, @monthly and @yearly. A time that
    clocks skip is due when the gap ends; a time that comes twice is due once.

    Each run is a job with SHOAL_SCHEDULE and SHOAL_SCHEDULED_AT in its environment.
    Times that passed without a controller are reported, and one run makes up for
    all of them. See docs/workflows.md.

    Examples:
      shoal schedule add nightly --cron "0 3 * * *" --timezone Europe/Berlin -g 1 \\
        -- python eval.py
      shoal schedule add weekly --cron @weekly -f flow.yaml
      shoal schedule list
      shoal schedule show nightly
      shoal schedule pause nightly
      shoal schedule run nightly
      shoal schedule remove nightly
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    action, name, *command = (*words, *("list", "")[len(words) :])
    if action not in ACTIONS:
        known = ", ".join(ACTIONS)
        raise Failure(f"unknown command 'shoal schedule {action[:40]}'; use one of {known}", USAGE)
    if bool(name) != (action != "list"):
        raise Failure(f"{action}: {'needs' if action != 'list' else 'takes no'} NAME", USAGE)
    tenant = str(flags.get("tenant") or "")
    with cluster.connect(home) as client:
        if action == "add":
            add(client, name, command, file, (cron, timezone, overlap, missed), flags, json)
        elif action == "list":
            _list(client.schedules(), json)
        elif action == "show":
            _show(client.schedule(name, tenant=tenant), json)
        else:
            done = _act(client, action, name, tenant)
            if json:
                show.as_json(done)
            else:
                text = f"runs as {done.id}" if action == "run" else f"is {action}d"
                show.line(f"{name} {text}" if not done.note else f"{name}: {done.note}", "green")


def _act(client: Client, action: str, name: str, tenant: str) -> Any:
    acts: dict[str, Any] = {
        "pause": client.pause_schedule,
        "resume": client.resume_schedule,
        "run": client.run_schedule,
        "remove": client.remove_schedule,
    }
    return acts[action](name, tenant=tenant)


def add(
    client: Client,
    name: str,
    command: list[str],
    file: str | None,
    when: tuple[str | None, str, str, str],
    flags: dict[str, Any],
    json: bool,
) -> None:
    from shoal.cli.request import assemble_jobs, packed_jobs
    from shoal.cli.screen import show
    from shoal.model.schedule import Missed, Overlap, ScheduleSpec

    cron, timezone, overlap, missed = when
    if not cron:
        raise Failure("--cron: is missing; write e.g. --cron '0 3 * * *'", USAGE)
    jobs, pack, flow = assemble_jobs([file, *command] if file else command, flags, name)
    view = client.set_schedule(
        ScheduleSpec(
            name=name,
            cron=cron,
            timezone=timezone,
            overlap=Overlap(overlap),
            missed=Missed(missed),
            jobs=packed_jobs(client, jobs, pack, None if json else show.note),
            workflow=flow,
        )
    )
    if json:
        show.as_json(view)
    else:
        show.line(f"{view.name} is set; next runs:", "bold")
        for at_ms in view.next_ms:
            show.line(f"  {_when(at_ms, view.timezone)}")


def _list(found: list[ScheduleView], json: bool) -> None:
    from shoal.cli.screen import show

    if json:
        show.as_json(found)
        return
    if not found:
        show.note("no schedules; see: shoal schedule --help")
        return
    columns = [
        show.Column("NAME", rank=1),
        show.Column("CRON", rank=1),
        show.Column("ZONE"),
        show.Column("STATE", rank=1),
        show.Column("NEXT"),
        show.Column("LAST"),
        show.Column("RUNS", right=True),
        show.Column("COMMAND", flexible=True),
    ]
    rows: list[list[str | show.Cell]] = [
        [
            show.Cell(one.name, "bold"),
            one.cron,
            one.timezone,
            one.state,
            _when(one.next_ms[0], one.timezone) if one.next_ms else "",
            f"{one.last_job} {one.last_state}".strip(),
            str(one.runs),
            one.command,
        ]
        for one in found
    ]
    show.table(columns, rows)
    for one in found:
        if one.why:
            show.note(f"{one.name}: {one.why}")


def _show(view: ScheduleView, json: bool) -> None:
    from shoal.cli.screen import show

    if json:
        show.as_json(view)
        return
    show.line(f"{view.name}: {view.cron} {view.timezone}, {view.state}", "bold")
    show.line(f"  runs {view.command}")
    who = f" by {view.user}" if view.user else ""
    show.line(f"  tenant {view.tenant}{who}; overlap: {view.overlap}; missed: {view.missed_rule}")
    show.line(f"  {view.runs} runs, {view.missed} missed, {view.skipped} left out")
    if view.last_job:
        when = _when(view.last_ms, view.timezone)
        show.line(f"  last: {view.last_job} {view.last_state}, due {when}")
    if view.why:
        show.line(f"  {view.why}", "yellow")
    for at_ms in view.next_ms:
        show.line(f"  next: {_when(at_ms, view.timezone)}")


def _when(at_ms: int, zone: str) -> str:
    """In the zone of the schedule."""
    from datetime import datetime

    from shoal.cron import BadCron, zone_of

    try:
        place = zone_of(zone)
    except BadCron:  # this machine does not know it
        place = zone_of("")
    return datetime.fromtimestamp(at_ms // 1000, place).strftime("%Y-%m-%d %H:%M:%S %Z")


# `shoal workflow`: the jobs of a workflow, what they wait for, and how they are.


WHEN_WORDS = {"ok": "", "any": " (any end)", "fail": " (failed)"}


@verb(Argument("workflow", "ID", "The id of the workflow: that of its first job, e.g. j7."))
def workflow(workflow: str, json: bool, home: Path) -> None:
    """Show the jobs of a workflow as a graph.

    A workflow is a file of named jobs that wait for each other. `shoal run`
    submits all of them or none. Its id is the id of its first job.

    Examples:
      shoal workflow j7             after: shoal run flow.yaml
      shoal workflow j7 --json | jq '.nodes[] | {name, state}'
      shoal cancel --workflow j7
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.workflow(cluster.job_id(client, workflow))
    if json:
        show.as_json(view)
        return
    print_workflow(view)


def print_workflow(view: WorkflowView) -> None:
    """Indented by how many jobs come before, and in that order."""
    from shoal.cli.screen import show

    names = {node.id: node.name for node in view.nodes}
    before: dict[str, list[str]] = {node.id: [] for node in view.nodes}
    words: dict[str, list[str]] = {node.id: [] for node in view.nodes}
    for edge in view.edges:
        if edge.before in names:
            before[edge.after].append(edge.before)
        name = names.get(edge.before, edge.before)
        words[edge.after].append(f"{name}{WHEN_WORDS.get(edge.when, '')}")
    depths = depths_of(before)
    rows: list[list[str | show.Cell]] = [
        [
            f"{'  ' * depths[node.id]}{node.name}",
            show.Cell(node.id, "bold"),
            show.state_cell(node.state),
            ", ".join(words[node.id]),
            node.why,
        ]
        for node in sorted(view.nodes, key=lambda node: depths[node.id])
    ]
    columns = [
        show.Column("JOB", rank=1),
        show.Column("ID", rank=1),
        show.Column("STATE", rank=1),
        show.Column("AFTER"),
        show.Column("WHY", wraps=True),
    ]
    show.table(columns, rows)


def depths_of(before: dict[str, list[str]]) -> dict[str, int]:
    """How many jobs come before each one, along the longest way; there is no circle."""
    depths: dict[str, int] = {}
    left = dict(before)
    while left:
        ready = [job for job, first in left.items() if all(one in depths for one in first)]
        for job in ready or list(left):
            depths[job] = 1 + max((depths.get(one, 0) for one in left[job]), default=-1)
            del left[job]
    return depths
