"""The columns of `shoal ps`: what each shows of a job, and how it sorts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.cli.screen.show import Cell, Column, state_cell
from shoal.cli.verbs.ps import elapsed_ms, how_far, nodes_text, shape_text
from shoal.forms.failure import USAGE, Failure
from shoal.forms.units import duration_text, quoted
from shoal.model.ids import in_order
from shoal.model.job import DEFAULT_TENANT
from shoal.model.views import JobRow

Order = float | str | None  # None: it has no value, and comes last


class JobColumn(NamedTuple):
    column: Column
    what: str
    cell: Callable[[JobRow, int], str | Cell]
    order: Callable[[JobRow, int], Order]


def _moment(ms: int | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ms / 1000)) if ms else ""


def _clock(ms: int | None) -> Cell:
    return Cell(_moment(ms), pretty=_moment(ms).replace("T", " "))


def _labels(row: JobRow) -> str:
    return ",".join(f"{key}={value}" for key, value in row.labels.items())


def _place(row: JobRow) -> float:
    number, index = in_order(row.id)
    return number + (index + 1) / 1e9


def _gpus(row: JobRow) -> float:
    return (row.size or row.members) * row.gpus * (row.gpu_milli or 1000) / 1000


def _share(row: JobRow) -> Order:
    if row.array is not None:
        return row.array.ended / max(1, row.array.elements)
    if row.progress is None:
        return None
    return row.progress.step / (row.progress.steps_total or 10**12)


def _attempt(row: JobRow) -> Cell:
    return Cell(str(row.attempt or ""), "yellow" if row.attempt > 1 else "dim")


def _time(row: JobRow, now_ms: int) -> Cell:
    return Cell(duration_text(elapsed_ms(row, now_ms)), "dim")


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


COLUMNS: dict[str, JobColumn] = {
    "id": JobColumn(
        Column("ID"), "its id", lambda r, _: Cell(r.id, "bold"), lambda r, _: _place(r)
    ),
    "name": JobColumn(Column("NAME"), "its name", lambda r, _: r.name, lambda r, _: r.name or None),
    "user": JobColumn(
        Column("USER"), "who submitted it", lambda r, _: r.user, lambda r, _: r.user or None
    ),
    "tenant": JobColumn(
        Column("TENANT"), "its tenant", lambda r, _: r.tenant, lambda r, _: r.tenant
    ),
    "state": JobColumn(
        Column("STATE"),
        "waiting, running, failed ...",
        lambda r, _: state_cell(r.state),
        lambda r, _: r.state,
    ),
    "try": JobColumn(
        Column("TRY", right=True), "attempts", lambda r, _: _attempt(r), lambda r, _: r.attempt
    ),
    "priority": JobColumn(
        Column("PRIORITY", right=True),
        "its priority",
        lambda r, _: str(r.priority),
        lambda r, _: r.priority,
    ),
    "shape": JobColumn(
        Column("SHAPE", right=True),
        "members x GPUs of each",
        lambda r, _: shape_text(r),
        lambda r, _: _gpus(r),
    ),
    "gpus": JobColumn(
        Column("GPUS", right=True),
        "GPUs of all members",
        lambda r, _: f"{_gpus(r):g}",
        lambda r, _: _gpus(r),
    ),
    "nodes": JobColumn(
        Column("NODES"),
        "where it runs or ran",
        lambda r, _: nodes_text(r.nodes),
        lambda r, _: nodes_text(r.nodes) or None,
    ),
    "time": JobColumn(
        Column("TIME", right=True), "how long it has run, or waited", _time, elapsed_ms
    ),
    "submitted": JobColumn(
        Column("SUBMITTED"),
        "when",
        lambda r, _: _clock(r.submitted_ms),
        lambda r, _: r.submitted_ms,
    ),
    "started": JobColumn(
        Column("STARTED"),
        "when it last began to run",
        lambda r, _: _clock(r.running_ms),
        lambda r, _: r.running_ms,
    ),
    "ended": JobColumn(
        Column("ENDED"), "when", lambda r, _: _clock(r.finished_ms), lambda r, _: r.finished_ms
    ),
    "code": JobColumn(
        Column("CODE", right=True), "exit code", lambda r, _: _text(r.code), lambda r, _: r.code
    ),
    "progress": JobColumn(
        Column("PROGRESS"),
        "steps, loss, time left",
        lambda r, _: how_far(r),
        lambda r, _: _share(r),
    ),
    "labels": JobColumn(
        Column("LABELS"), "its labels", lambda r, _: _labels(r), lambda r, _: _labels(r) or None
    ),
    "why": JobColumn(
        Column("WHY", wraps=True),
        "why it waits, or is as it is",
        lambda r, _: r.why,
        lambda r, _: r.why or None,
    ),
    "command": JobColumn(
        Column("COMMAND", flexible=True),
        "its command",
        lambda r, _: r.command,
        lambda r, _: r.command,
    ),
}


def usual(rows: Sequence[JobRow], *, labels: bool = False) -> list[str]:
    """The columns if nobody chose some; those that would be empty are left out."""
    names = ["id", "name", "tenant", "state", "try", "shape", "nodes", "time", "progress"]
    names += ["labels", "command"] if labels else ["command"]
    if all(row.tenant == DEFAULT_TENANT for row in rows):
        names.remove("tenant")
    if not any(row.progress or row.array for row in rows):
        names.remove("progress")
    return names


def chosen(text: str) -> list[str]:
    """The columns in what somebody typed after -o."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in COLUMNS:
            raise _unknown("-o", name)
    if not names:
        raise Failure(f"-o: name columns, with commas; they are {', '.join(COLUMNS)}", USAGE)
    return names


def sorting(text: str) -> tuple[str, bool]:
    """The column of --sort, and whether the largest comes first."""
    name = text.removeprefix("-").lower()
    if name not in COLUMNS:
        raise _unknown("--sort", name)
    return name, text.startswith("-")


def _unknown(flag: str, name: str) -> Failure:
    known = ", ".join(COLUMNS)
    return Failure(f"{flag}: {quoted(name)} is not a column; they are {known}", USAGE)


def in_order_of(rows: Sequence[JobRow], by: str, now_ms: int) -> list[JobRow]:
    """Jobs without a value come last, either way."""
    name, down = sorting(by)
    order = COLUMNS[name].order
    known = [(order(row, now_ms), row) for row in rows]
    there = [pair for pair in known if pair[0] is not None]
    there.sort(key=lambda pair: pair[0], reverse=down)  # type: ignore[arg-type, return-value]
    return [row for _, row in there] + [row for value, row in known if value is None]


def table_of(
    rows: Sequence[JobRow], names: Sequence[str], now_ms: int
) -> tuple[list[Column], list[list[Cell]]]:
    found = [COLUMNS[name] for name in names]
    cells = [[_cell(one.cell(row, now_ms)) for one in found] for row in rows]
    return [one.column for one in found], cells


def _cell(value: str | Cell) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)
