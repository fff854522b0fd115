"""Rows of a table of text, whose fields are read with the row and the column in every complaint."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from shoal.sim.replay.traces import Arrival, Gangs, TraceError, open_text

SHOWN_MAX = 40  # characters of a bad value
SECONDS_MAX = 100 * 366 * 86_400  # a hundred years: more is a mistake in the unit


class Rows:
    """The rows under one header. `where` keeps those rows alone whose columns have these values."""

    def __init__(self, path: Path, where: Mapping[str, str] | None = None) -> None:
        self.path = path
        lines = open_text(path)
        first = next(lines, "")
        if not first.strip():
            raise TraceError(f"{path}: is empty; the first line must name the columns")
        delimiter = "|" if first.count("|") > first.count(",") else ","
        self._reader = csv.reader(chain([first], lines), delimiter=delimiter)
        self.columns = [name.strip() for name in next(self._reader)]
        self.index = {name: position for position, name in enumerate(self.columns)}
        self.where = dict(where or {})
        for column in self.where:
            self.need(column, why="--where")

    def need(self, *columns: str, why: str = "this format") -> None:
        missing = [column for column in columns if column not in self.index]
        if missing:
            have = ", ".join(self.columns[:20])
            raise TraceError(
                f"{self.path}: has no column {' or '.join(missing)}, which {why} needs; "
                f"its columns are {have}"
            )

    def __iter__(self) -> Iterator[Row]:
        wanted = [(self.index[column], value) for column, value in self.where.items()]
        try:
            for values in self._reader:
                if not values:
                    continue
                row = Row(self, values)
                if len(values) != len(self.columns):
                    raise row.problem(
                        f"has {len(values)} fields, but the header names {len(self.columns)}"
                    )
                if all(values[position].strip() == value for position, value in wanted):
                    yield row
        except csv.Error as error:
            raise TraceError(f"{self.path}: row {self._reader.line_num}: {error}") from error

    @property
    def line(self) -> int:
        return self._reader.line_num


class Row:
    """One row; its number is that of its line in the file, the header's being 1."""

    __slots__ = ("_rows", "_values", "number")

    def __init__(self, rows: Rows, values: list[str]) -> None:
        self._rows = rows
        self._values = values
        self.number = rows.line

    @property
    def columns(self) -> list[str]:
        return self._rows.columns

    def text(self, column: str, default: str = "") -> str:
        position = self._rows.index.get(column)
        return default if position is None else self._values[position].strip() or default

    def seconds(self, column: str, default: float | None = None) -> int:
        """A time in seconds, as milliseconds."""
        return round(self.number_in(column, default) * 1000)

    def milliseconds(self, column: str) -> int:
        return round(self.number_in(column, most=SECONDS_MAX * 1000))

    def whole(self, column: str, default: int | None = None, *, most: int = 10**9) -> int:
        value = self.number_in(column, default, most=most)
        if value != int(value):
            raise self.problem(f"{column}: must be a whole number, not {self._shown(column)}")
        return int(value)

    def number_in(
        self,
        column: str,
        default: float | None = None,
        *,
        least: float = 0,
        most: float = SECONDS_MAX,
    ) -> float:
        text = self.text(column)
        if not text:
            if default is None:
                raise self.problem(f"{column}: is empty")
            return default
        try:
            value = float(text)
        except ValueError:
            raise self.problem(f"{column}: {self._shown(column)} is not a number") from None
        if not math.isfinite(value):
            raise self.problem(f"{column}: {self._shown(column)} is not a number")
        if value < least:
            raise self.problem(f"{column}: must be at least {least:g}, not {self._shown(column)}")
        if value > most:
            raise self.problem(f"{column}: must be at most {most:g}, not {self._shown(column)}")
        return value

    def problem(self, text: str) -> TraceError:
        return TraceError(f"{self._rows.path}: row {self.number}: {text}")

    def _shown(self, column: str) -> str:
        text = self.text(column)
        return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."


# The plain CSV: one job per row, times in seconds. What to write when you make your own.


NEEDED = ("submit_s", "duration_s")
SIZE = ("gpus", "num_gpu")  # of the whole job
TENANT = ("tenant", "user", "account", "vc", "cluster")  # the first of these that is there


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED) and bool(columns.intersection(SIZE))


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    rows.need(*NEEDED)
    size = next((name for name in SIZE if name in rows.index), "")
    if not size:
        rows.need("gpus")
    tenant = next((name for name in TENANT if name in rows.index), "")
    for row in rows:
        yield arrival(row, gangs, row.whole(size), row.text(tenant))


def arrival(row: Row, gangs: Gangs, gpus: int, tenant: str) -> Arrival:
    """All the columns that are not needed have a default."""
    members = row.whole("members", 0)
    if members and gpus % members:
        raise row.problem(f"members: {gpus} GPUs cannot be split evenly over {members} members")
    spec = gangs.spec(
        gpus,
        members=members,
        cpu_milli=round(row.number_in("cpus", 0) * 1000),
        memory_mb=round(row.number_in("memory_gb", 0) * 1024),
        priority=round(row.number_in("priority", 0, least=-1000, most=1000)),
        time_limit_ms=row.seconds("time_limit_s", 0),
        tenant=tenant,
    )
    checkpoint_s = row.number_in("checkpoint_s", -1, least=-1)
    return Arrival(
        submit_ms=row.seconds("submit_s"),
        work_ms=row.seconds("duration_s"),
        spec=spec,
        row=row.number,
        tenant=tenant,
        cluster=row.text("cluster"),
        exit_code=row.whole("exit_code", 0, most=255),
        gpu_mb=round(row.number_in("gpu_memory_gb", 0) * 1024),
        checkpoint_ms=None if checkpoint_s < 0 else round(checkpoint_s * 1000),
    )
