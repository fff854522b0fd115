"""The columns of jobs as `shoal ps` shows them: a table on a terminal, or a file of CSV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from shoal.cli.screen.show import Cell, Column, state_cell
from shoal.forms.failure import USAGE, Failure
from shoal.forms.units import quoted
from shoal.model.columns import COLUMNS, Kind, Value, column_of
from shoal.model.columns import Column as JobColumn
from shoal.model.durations import duration_text
from shoal.model.job import DEFAULT_TENANT
from shoal.model.views import JobRow

RIGHT = (Kind.NUMBER, Kind.DURATION)
LAID_OUT = {
    "shape": Column("SHAPE", right=True),
    "command": Column("COMMAND", flexible=True),
    "progress": Column("PROGRESS", flexible=True),
}
# What a narrow terminal shows longest, unless somebody chose the columns.
RANKS = {"id": 3, "name": 3, "state": 3, "time": 2, "shape": 2, "progress": 2, "nodes": 1}
RANKS |= {"labels": 1, "gpu_memory": -1, "try": -2}
DRAWN: dict[str, Callable[[str], Cell]] = {
    "id": lambda text: Cell(text, "bold"),
    "state": state_cell,
    "try": lambda text: Cell("" if text == "0" else text, "dim" if text in "01" else "yellow"),
}


def usual(rows: Sequence[JobRow], *, labels: bool = False) -> list[str]:
    """The columns if nobody chose some; those that would be empty are left out."""
    names = ["id", "name", "tenant", "state", "try", "shape", "gpu_use", "gpu_memory"]
    names += ["cluster", "nodes", "time", "progress"]
    names += ["labels", "command"] if labels else ["command"]
    if all(row.tenant == DEFAULT_TENANT for row in rows):
        names.remove("tenant")
    for name, field in (("gpu_use", "gpu_busy_milli"), ("gpu_memory", "gpu_used_mb")):
        if all(getattr(row, field) is None for row in rows):
            names.remove(name)
    if not any(row.away for row in rows):
        names.remove("cluster")
    if not any(row.progress or row.array for row in rows):
        names.remove("progress")
    return names


def chosen(text: str) -> list[str]:
    """The columns in what somebody typed after -o."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        raise Failure(f"-o: name columns, with commas; they are {', '.join(COLUMNS)}", USAGE)
    return [_known("-o", name).name for name in names]


def sorting(text: str) -> tuple[JobColumn, bool]:
    """The column of --sort, and whether the largest comes first."""
    return _known("--sort", text.removeprefix("-").lower()), text.startswith("-")


def _known(flag: str, name: str) -> JobColumn:
    if (column := column_of(name)) is not None:
        return column
    known = ", ".join(COLUMNS)
    raise Failure(f"{flag}: {quoted(name)} is not a column; they are {known}", USAGE)


def in_order_of(rows: Sequence[JobRow], by: str, now_ms: int) -> list[JobRow]:
    """Jobs without a value come last, either way."""
    column, down = sorting(by)
    known = [(column.order_of(row, now_ms), row) for row in rows]
    there = [pair for pair in known if pair[0] is not None]
    there.sort(key=lambda pair: pair[0], reverse=down)  # type: ignore[arg-type, return-value]
    return [row for _, row in there] + [row for value, row in known if value is None]


def table_of(
    rows: Sequence[JobRow], names: Sequence[str], now_ms: int, *, labels: bool = False
) -> tuple[list[Column], list[list[Cell]]]:
    """`names`: columns that somebody chose. The first of them stay longest."""
    ranks = {} if names else RANKS
    names = names or usual(rows, labels=labels)
    columns = [COLUMNS[name] for name in names]
    drawn = [(column.of_row, _drawn(column)) for column in columns]
    cells = [[draw(of_row(row, now_ms)) for of_row, draw in drawn] for row in rows]
    laid_out = [_laid_out(column)._replace(rank=ranks.get(column.name, 0)) for column in columns]
    return laid_out, cells


def _laid_out(column: JobColumn) -> Column:
    return LAID_OUT.get(column.name) or Column(column.name.upper(), right=column.kind in RIGHT)


def _drawn(column: JobColumn) -> Callable[[Value], Cell]:
    if column.kind is Kind.MOMENT:
        return lambda value: Cell(_moment(value), pretty=_moment(value).replace("T", " "))
    if column.kind is Kind.DURATION:
        return lambda value: Cell("" if value is None else duration_text(int(value)), "dim")
    draw = DRAWN.get(column.name, Cell)
    return lambda value: draw("" if value is None else str(value))


def _moment(value: Value) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(value) / 1000)) if value else ""


def csv_of(rows: Sequence[JobRow], names: Sequence[str], now_ms: int) -> Iterator[list[str]]:
    """The lines of a file: the names, then the jobs. Durations are in seconds."""
    columns = [COLUMNS[name] for name in names or COLUMNS]
    yield [column.name for column in columns]
    for row in rows:
        yield [_plain(column, column.of_row(row, now_ms)) for column in columns]


def _plain(column: JobColumn, value: Value) -> str:
    from shoal.forms.ledger_csv import safe

    if column.kind is Kind.TEXT:
        return safe(str(value or ""))
    if column.kind is Kind.MOMENT:
        return _moment(value)
    if value is None:
        return ""
    return f"{float(value) / 1000:.3f}" if column.kind is Kind.DURATION else str(value)
