"""`shoal ps`: the list of jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Option, flag, number, verb
from shoal.cli.finding_flags import filter_of, finding_flags

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.model.feed import JobLine
    from shoal.model.views import JobRow

LIMIT_MAX = 10_000
WHOLE = 1000  # thousandths of a GPU


@verb(
    flag("all_", "--all", "-a", help="Include finished jobs, newest first."),
    Option(
        "--limit",
        "-n",
        metavar="N",
        type=number(1, LIMIT_MAX),
        default=100,
        help="Show at most this many jobs. [100]",
    ),
    Option("--before", metavar="JOB", default="", help="The next page: what ended before it."),
    flag("--labels", help="Show the labels of the jobs."),
    Option("--array", metavar="JOB", default="", help="List the elements of this array."),
    *finding_flags(),
)
def ps(
    all_: bool,
    limit: int,
    before: str,
    array: str,
    labels: bool,
    json: bool,
    home: Path,
    **given: Any,
) -> None:
    """List the jobs.

    Waiting jobs are in the order of the queue. TIME is how long a job has been
    running or waiting, or how long it ran. TRY counts its attempts. SHAPE is
    members x GPUs per member: 4x8, 1x0.5 (half a GPU), 1x20G (20 GB of a GPU's
    memory), or 3/2..8x1 (an elastic gang with 3 members now). PROGRESS is shown
    if a job reports its steps, and for arrays: an array is one line. --array j7
    lists those of its elements that run or wait; with -a, those that ended, too.

    Flags that choose jobs can be combined; a job must match all of them.

    Examples:
      shoal ps                  running and waiting jobs
      shoal ps -a -n 20         also the last jobs that finished
      shoal ps --state failed --since 1d
      shoal ps -a --label run=a --name 'train-*' --labels
      shoal ps --array j7       the elements of j7 that run or wait
      shoal ps --json | jq -r '.[] | select(.state == "waiting") | .id'
    """
    import msgspec

    from shoal.cli import cluster
    from shoal.cli.screen import show

    wanted = filter_of(given)
    before = cluster.job_id(before) if before else ""
    with cluster.connect(home) as client:
        if array:
            array = cluster.job_id(array)
            cluster.on_job(client, array, lambda c: c.job(array))
            wanted = msgspec.structs.replace(wanted, array=array)
        rows = client.jobs(finished=all_, limit=limit, before=before, wanted=wanted)
    if json:
        show.as_json(rows)
        return
    if not rows:
        if wanted.given or before:
            more = "" if all_ or before or wanted.only_ended else "; finished jobs: add -a"
            show.note(f"no jobs match{more}")
            return
        show.note(
            "no jobs yet; try: shoal run -- echo hello"
            if all_
            else "no live jobs; to list finished jobs: shoal ps -a"
        )
        return
    print_jobs(rows, int(time.time() * 1000), labels=labels)
    if len(rows) == limit:
        last = rows[-1]
        page = f", or the next ones with --before {last.id}" if last.finished_ms else ""
        show.note(f"only {limit} jobs are shown; see more with -n {limit * 10}{page}")


def print_jobs(rows: list[JobRow], now_ms: int, waits: int = 1, *, labels: bool = False) -> None:
    """`waits`: on a terminal, print the reasons of this many waiting jobs below the table."""
    from shoal.cli.screen.show import Column, at_terminal, fitted, line, table
    from shoal.model.job import DEFAULT_TENANT

    tenants = any(row.tenant != DEFAULT_TENANT for row in rows)

    columns = [
        Column("ID", firm=True),
        Column("NAME"),
        Column("STATE", firm=True),
        Column("TRY", right=True, firm=True),
        Column("SHAPE", right=True, firm=True),
        Column("NODES"),
        Column("TIME", right=True, firm=True),
        Column("COMMAND", flexible=True),
    ]
    progress = any(row.progress or row.array for row in rows)
    if progress:
        columns.insert(-1, Column("PROGRESS", flexible=True))
    if tenants:
        columns.insert(2, Column("TENANT"))
    cells = [_cells(row, now_ms, tenants, progress) for row in rows]
    if labels:
        columns.insert(-1, Column("LABELS"))
        for row, line_ in zip(rows, cells, strict=True):
            line_.insert(-1, ",".join(f"{key}={value}" for key, value in row.labels.items()))
    table(columns, cells)
    waiting = [row for row in rows if row.state == "waiting"] if at_terminal() else []
    for row in waiting[:waits]:
        line(fitted(f"{row.id} waits: {row.why}"), "yellow dim")
    for row in rows if at_terminal() else []:
        if row.idle_since_ms is not None:
            line(fitted(f"{row.id} {row.why}"), "yellow dim")
    for row in [row for row in rows if row.nap is not None][:waits] if at_terminal() else []:
        line(fitted(f"{row.id} {nap_text(row, now_ms)}"), "blue")


def _cells(row: JobRow, now_ms: int, tenants: bool, progress: bool) -> list[str | Cell]:
    from shoal.cli.screen.show import Cell, state_cell
    from shoal.forms.units import duration_text

    cells: list[str | Cell] = [
        Cell(row.id, "bold"),
        row.name,
        state_cell(row.state),
        Cell(str(row.attempt or ""), "yellow" if row.attempt > 1 else "dim"),
        shape_text(row),
        nodes_text(row.nodes),
        Cell(duration_text(elapsed_ms(row, now_ms)), "dim"),
        row.command,
    ]
    if progress:
        cells.insert(-1, how_far(row))
    if tenants:
        cells.insert(2, row.tenant)
    return cells


def nap_text(row: JobRow, now_ms: int) -> str:
    """'asleep for 5m: put to sleep by ann; wakes when it is used, or by: shoal wake j3'"""
    from shoal.forms.units import duration_text, memory_text

    assert row.nap is not None, "the caller has looked"
    told = [f"{row.state} for {duration_text(max(0, now_ms - row.nap.since_ms))}"]
    if row.nap.host_mb:
        told.append(f"{memory_text(row.nap.host_mb)} of its GPUs' memory on its nodes")
    return f"{', '.join(told)}: {row.why}"


def how_far(row: JobRow) -> str:
    from shoal.cli.screen.array_words import summary
    from shoal.cli.screen.words import progress_text

    if row.array is not None:
        return summary(row.array)
    return progress_text(row.progress) if row.progress else ""


def shape_text(row: JobRow | JobLine) -> str:
    """Members x GPUs per member: '4x8', '2x0.5', '1x20G', '3/2..8x1' (elastic, 3 members now)."""
    members = str(row.members)
    if row.members_max > row.members:
        members = f"{row.size}/" if row.size else ""
        members += f"{row.members}..{row.members_max}"
    return f"{members}x{gpus_text(row)}"


def gpus_text(row: JobRow | JobLine) -> str:
    from shoal.forms.units import memory_text

    if not row.gpus or row.gpu_milli == WHOLE:
        return str(row.gpus)
    return f"{row.gpu_milli / WHOLE:g}" if row.gpu_milli else memory_text(row.gpu_memory_mb)


def nodes_text(nodes: list[str]) -> str:
    """Up to four names, else three and the number of the others; always one word."""
    return ",".join(nodes) if len(nodes) <= 4 else f"{','.join(nodes[:3])}+{len(nodes) - 3}"


def elapsed_ms(row: JobRow, now_ms: int) -> int:
    """How long the job ran, has been running, or has been waiting."""
    ran = row.running_ms is not None and row.state != "waiting"
    begin = row.running_ms if ran and row.running_ms is not None else row.submitted_ms
    end = row.nap.since_ms if row.nap is not None else now_ms  # sleep is not run time
    return max((row.finished_ms or end) - begin, 0)
