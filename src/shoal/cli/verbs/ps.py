"""`shoal ps`: the list of jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cli.command import Option, filter_of, finding_flags, flag, job_word, number, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.client import Client
    from shoal.model.finding import JobFilter
    from shoal.model.views import JobRow

LIMIT_MAX = 10_000
WATCH_S, WATCH_MIN_S, WATCH_MAX_S = "2", 0.2, 3600.0


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
    Option("--before", metavar="JOB", type=job_word, help="The next page: what ended before it."),
    flag("--labels", help="Show the labels of the jobs."),
    Option("--array", metavar="JOB", type=job_word, help="List the elements of this array."),
    Option(
        "--columns",
        "-o",
        metavar="COLUMNS",
        default="",
        help="Show these columns, in this order; -o help lists them.",
    ),
    Option(
        "--sort", metavar="COLUMN", default="", help="Sort by a column; -COLUMN: largest first."
    ),
    Option("--csv", metavar="FILE", type=Path, help="Write all columns, or those of -o, to it."),
    Option(
        "--watch",
        "-w",
        metavar="[SECONDS]",
        is_flag=False,
        flag_value=WATCH_S,
        default="",
        help="Draw the table again every few seconds, in place. [2]",
    ),
    *finding_flags(),
)
def ps(
    all_: bool,
    limit: int,
    before: str | None,
    array: str | None,
    labels: bool,
    columns: str,
    sort: str,
    csv: Path | None,
    watch: str,
    json: bool,
    home: Path,
    **given: Any,
) -> None:
    """List jobs.

    Waiting jobs are in the order of the queue. TIME is how long a job has been
    running or waiting, or how long it ran. TRY counts its attempts. SHAPE is
    members x GPUs per member: 4x8, 1x0.5 (half a GPU), 1x20G (20 GB of a GPU's
    memory), or 3/2..8x1 (an elastic gang with 3 members now). PROGRESS is shown
    if a job reports its steps, and for arrays: an array is one line. --array j7
    lists those of its elements that run or wait; with -a, those that ended, too.

    Flags that choose jobs can be combined; a job must match all of them.
    --watch draws the table again until you press q; it waits for a controller
    that restarts, and ends after a minute without one.

    A narrow terminal shows fewer columns and shortens names; pipes, --csv and
    --json get everything.

    Examples:
      shoal ps                  running and waiting jobs
      shoal ps -a -n 20         also the last jobs that finished
      shoal ps --state failed --since 1d
      shoal ps -a --label run=a --name 'train-*' --labels
      shoal ps --array j7       the elements of j7 that run or wait
      shoal ps -o id,user,gpus,why --sort -gpus
      shoal ps -a -n 1000 --csv jobs.csv
      shoal ps --watch 5 --user ada
      shoal ps --json | jq -r '.[] | select(.state == "waiting") | .id'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import job_columns, show
    from shoal.model.columns import COLUMNS

    if columns == "help":
        for name, one in COLUMNS.items():
            print(f"{name:<10}  {one.about}")
        return
    if columns and json:
        raise Failure("-o: is for the table; with --json, choose fields with jq", USAGE)
    names = job_columns.chosen(columns) if columns else []
    if sort:
        job_columns.sorting(sort)
    every_s = _seconds(watch)
    if csv is not None and (json or every_s):
        raise Failure("--csv: writes a file, once; not with --json or --watch", USAGE)
    asked = Asked(filter_of(given), all_, limit, "", sort)
    with cluster.connect(home) as client:
        if before:
            asked = asked._replace(before=cluster.job_id(client, before))
        if array:
            asked = asked._replace(
                wanted=_of_array(client, cluster.job_id(client, array), asked.wanted)
            )
        if every_s:
            _watch(home, asked, names, labels, json, every_s)
            return
        rows = _look(client, asked)
    if csv is not None:
        _write_csv(csv, rows, names)
        show.line(f"wrote {csv}", "green")
        return
    if json:
        show.as_json(rows)
        return
    if not rows:
        _say_none(asked)
        return
    print_jobs(rows, int(time.time() * 1000), labels=labels, names=names)
    if len(rows) == limit:
        last = rows[-1]
        page = f", or the next ones with --before {last.id}" if last.finished_ms else ""
        show.note(f"only {limit} jobs are shown; see more with -n {limit * 10}{page}")


def _write_csv(path: Path, rows: list[JobRow], names: list[str]) -> None:
    import csv

    from shoal.cli.screen.job_columns import csv_of

    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(csv_of(rows, names, int(time.time() * 1000)))
    except OSError as error:
        raise Failure(f"--csv: {path}: {error.strerror or error}") from None


class Asked(NamedTuple):
    """Which jobs are wanted, and in which order."""

    wanted: JobFilter
    finished: bool
    limit: int
    before: str
    sort: str


def _of_array(client: Client, array: str, wanted: JobFilter) -> JobFilter:
    import msgspec

    from shoal.cli import cluster

    cluster.on_job(client, array, lambda c: c.job(array))
    return msgspec.structs.replace(wanted, array=array)


def _look(client: Client, asked: Asked) -> list[JobRow]:
    """To sort, all jobs that match are needed."""
    from shoal.cli.screen.job_columns import in_order_of

    rows = client.jobs(
        finished=asked.finished,
        limit=LIMIT_MAX if asked.sort else asked.limit,
        before=asked.before,
        wanted=asked.wanted,
    )
    if asked.sort:
        rows = in_order_of(rows, asked.sort, int(time.time() * 1000))
    return rows[: asked.limit]


def _say_none(asked: Asked) -> None:
    from shoal.cli.screen import show

    if asked.wanted.given or asked.before:
        shown = asked.finished or asked.before or asked.wanted.only_ended
        show.note("no jobs match" if shown else "no jobs match; finished jobs: add -a")
        return
    show.note(
        "no jobs yet; try: shoal run -- echo hello"
        if asked.finished
        else "no active jobs; to list finished jobs: shoal ps -a"
    )


def _seconds(text: str) -> float:
    """How often to look again; 0: only once."""
    from shoal.forms.units import quoted

    if not text:
        return 0.0
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        raise Failure(f"--watch: {quoted(text)} is not a number of seconds", USAGE) from None
    if not WATCH_MIN_S <= seconds <= WATCH_MAX_S:
        raise Failure(f"--watch: must be {WATCH_MIN_S:g} to {WATCH_MAX_S:g} seconds", USAGE)
    return seconds


def _watch(
    home: Path, asked: Asked, names: list[str], labels: bool, json: bool, every_s: float
) -> None:
    """Each look connects if it must: the next controller may be at another address."""
    from shoal.cli import cluster
    from shoal.cli.screen import job_columns, paint, show
    from shoal.model.resources import plural

    def rows() -> list[JobRow]:
        with cluster.connect(home) as client:
            return _look(client.lent(patience_s=0), asked)

    if json:
        with cluster.Retry(home) as retry:
            while True:
                show.as_json(retry(lambda client: _look(client, asked)), lines=True)
                time.sleep(every_s)

    def look() -> paint.Picture:
        found, now_ms = rows(), int(time.time() * 1000)
        told = f"{plural(len(found), 'job')}, every {every_s:g}s"
        return paint.Picture(*job_columns.table_of(found, names, now_ms, labels=labels), told)

    paint.watch(look, every_s)


def print_jobs(
    rows: list[JobRow],
    now_ms: int,
    waits: int = 1,
    *,
    labels: bool = False,
    names: Sequence[str] = (),
) -> None:
    """`waits`: on a terminal, print the reasons of this many waiting jobs below the table.
    `names`: the columns, if somebody chose them."""
    from shoal.cli.screen.job_columns import table_of
    from shoal.cli.screen.show import at_terminal, fitted, line, table

    table(*table_of(rows, names, now_ms, labels=labels))
    if names:
        return
    waiting = [row for row in rows if row.state == "waiting"] if at_terminal() else []
    for row in waiting[:waits]:
        line(fitted(f"{row.id} waits: {row.why}"), "yellow dim")
    for row in rows if at_terminal() else []:
        if row.idle_since_ms is not None:
            line(fitted(f"{row.id} {row.why}"), "yellow dim")
    for row in [row for row in rows if row.nap is not None][:waits] if at_terminal() else []:
        line(fitted(f"{row.id} {nap_text(row, now_ms)}"), "blue")


def nap_text(row: JobRow, now_ms: int) -> str:
    """'asleep for 5m: put to sleep by ann; wakes when it is used, or by: shoal wake j3'"""
    from shoal.model.durations import duration_text
    from shoal.model.resources import memory_text

    assert row.nap is not None, "the caller has looked"
    told = [f"{row.state} for {duration_text(max(0, now_ms - row.nap.since_ms))}"]
    if row.nap.host_mb:
        told.append(f"{memory_text(row.nap.host_mb)} of its GPUs' memory on its nodes")
    return f"{', '.join(told)}: {row.why}"
