"""`shoal sweep`: the trials of a sweep side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, job_word, number, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.client import Client
    from shoal.model.trials import Trial, TrialsView

LIMIT_MAX, PAGE = 10_000, 1_000
HOUR_MS = 3_600_000
METRICS_SHOWN = 3  # beside the one that says which is the best; a file has all of them


@verb(
    Argument("job", "JOB", "Id or name of a sweep or an array, e.g. j7.", type=job_word),
    Option("--best", metavar="METRIC", default="", help="The metric to compare by. [loss]"),
    flag("highest", "--max", help="The highest value is the best; without it, the lowest."),
    Option(
        "--sort",
        metavar="COLUMN",
        default="",
        help="A variable, a metric, last.METRIC, index, state, step, gpu_time or cost;"
        " -COLUMN: largest first.",
    ),
    Option(
        "--limit",
        "-n",
        metavar="N",
        type=number(1, LIMIT_MAX),
        default=20,
        help="Show at most this many trials. [20]",
    ),
    Option("--csv", metavar="FILE", type=Path, help="Write all trials and metrics to it."),
)
def sweep(
    job: str,
    best: str,
    highest: bool,
    sort: str,
    limit: int,
    csv: Path | None,
    json: bool,
    home: Path,
) -> None:
    """Compare the trials of a sweep, and show the best.

    One line for each trial: its variables, the best value of the metric and the
    step it was reached at, its last value, other metrics, and what it cost. The
    best trials come first. Trials report metrics as in docs/training.md.

    Examples:
      shoal sweep j7
      shoal sweep j7 --best accuracy --max
      shoal sweep j7 --sort lr
      shoal sweep j7 --csv trials.csv
      shoal sweep j7 --json | jq -r .best
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    if csv is not None and json:
        raise Failure("--csv: writes a file; not with --json", USAGE)
    with cluster.connect(home) as client:
        array = cluster.job_id(client, job)
        wanted = LIMIT_MAX if csv is not None else limit

        def look(client: Client) -> TrialsView:
            view = client.trials(
                array, by=best, highest=highest or None, sort=sort, limit=min(wanted, PAGE)
            )
            while len(view.trials) < min(wanted, view.total):
                more = client.trials(
                    array,
                    by=view.by,
                    highest=view.highest,
                    sort=sort,
                    offset=len(view.trials),
                    limit=min(wanted - len(view.trials), PAGE),
                ).trials
                if not more:
                    break
                view.trials += more
            return view

        view = cluster.on_job(client, array, look)
        if best and view.by not in view.metrics:
            known = f"the trials report {', '.join(view.metrics)}" if view.metrics else "none is"
            raise Failure(f"--best: no trial has reported {best}; {known}")
        leader = _best(client, view)
    if csv is not None:
        _write(csv, view)
        show.line(f"wrote {csv}", "green")
    elif json:
        show.as_json(view)
    else:
        _print(view, leader)


def _best(client: Client, view: TrialsView) -> Trial | None:
    found = next((one for one in view.trials if one.id == view.best), None)
    if found is None and view.best:  # sorted by another column, it is on another page
        found = client.trials(view.id, by=view.by, highest=view.highest, limit=1).trials[0]
    return found


def _print(view: TrialsView, leader: Trial | None) -> None:
    from shoal.cli.screen.show import Cell, Column, line, note, state_cell, table

    others = [name for name in view.metrics if name != view.by][:METRICS_SHOWN]
    by = [f"BEST {view.by}", "AT STEP", "LAST"] if view.by in view.metrics else []
    spent = ["GPU-HOURS"] if view.gpu_ms else []
    spent += [f"COST ({view.currency})"] if view.cost is not None else []
    right = [*by, *others, "STEP", *spent]
    columns = [Column("TRIAL"), Column("STATE"), *(Column(name) for name in view.variables)]
    columns += [Column(name, right=True) for name in right]
    rows = []
    for trial in view.trials:
        is_best = leader is not None and trial.id == leader.id
        row = [Cell(trial.id, "green bold" if is_best else "bold", f"{trial.id} ★" * is_best)]
        row += [state_cell(trial.state)]
        row += [Cell(trial.values[name]) for name in view.variables]
        row += [Cell(text) for text in _figures(view, trial, others, spent)]
        rows.append(row)
    table(columns, rows)
    if leader is not None:
        values = " ".join(f"{name}={value}" for name, value in leader.values.items())
        best, step = _reached(view, leader, view.by)
        line(f"best: {leader.id} ({values}) with {view.by} {best} at step {step}", "green")
    shown = f"{len(view.trials)} of {view.total:,} trials"
    if len(view.trials) < view.total:
        note(f"{shown} are shown; see more with -n {min(LIMIT_MAX, len(view.trials) * 10)}")
    if view.left_out:
        note(f"{view.left_out:,} trials beyond the first {view.total:,} are left out")


def _figures(view: TrialsView, trial: Trial, others: list[str], spent: list[str]) -> Iterator[str]:
    if view.by in view.metrics:
        own = trial.metrics.get(view.by)
        yield from _reached(view, trial, view.by)
        yield short(own.last if own else None)
    for name in others:
        extent = trial.metrics.get(name)
        yield short(extent.last if extent else None)
    yield str(trial.step or "")
    if spent:
        yield f"{trial.gpu_ms / HOUR_MS:.2f}"
    if len(spent) > 1:
        yield "" if trial.cost is None else f"{trial.cost:.2f}"


def _reached(view: TrialsView, trial: Trial, name: str) -> tuple[str, str]:
    """The best value of a metric, and its step."""
    extent = trial.metrics.get(name)
    if extent is None or extent.low is None:
        return "", ""
    step = extent.high_step if view.highest else extent.low_step
    return short(extent.best(highest=view.highest)), str(step)


def short(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _write(path: Path, view: TrialsView) -> None:
    import csv

    head = ["trial", "index", "state", *view.variables]
    for name in view.metrics:
        head += [f"best {name}", f"step of best {name}", f"last {name}"]
    head += ["step", "gpu_hours", "cost", "currency"]
    rows: list[list[object]] = []
    for trial in view.trials:
        row: list[object] = [trial.id, trial.index, trial.state, *trial.values.values()]
        for name in view.metrics:
            extent = trial.metrics.get(name)
            row += [*_reached(view, trial, name), short(extent.last if extent else None)]
        cost = "" if trial.cost is None else trial.cost
        rows.append([*row, trial.step, trial.gpu_ms / HOUR_MS, cost, view.currency])
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([head, *rows])
    except OSError as error:
        raise Failure(f"--csv: {path}: {error.strerror or error}") from None
