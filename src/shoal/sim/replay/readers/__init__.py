"""One small file per trace format; a file's format follows from the columns it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from shoal.sim.replay.readers import rows as plain
from shoal.sim.replay.readers import sacct
from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Gangs, Trace, TraceError, in_order

# The plain one is last, because its columns are also in others.
READERS: Mapping[str, ModuleType] = {"sacct": sacct, "plain": plain}


def read_trace(
    path: Path,
    gangs: Gangs,
    *,
    form: str = "",
    where: Mapping[str, str] | None = None,
    readers: Mapping[str, ModuleType] = READERS,
) -> Trace:
    rows = Rows(path, where)
    if form and form not in readers:
        raise TraceError(f"there is no trace format {form}; there are {', '.join(readers)}")
    reader = readers[form] if form else _detect(rows, readers)
    read = 0
    arrivals = []
    for arrival in reader.read(rows, gangs):
        read += 1
        if arrival is not None:
            arrivals.append(arrival)
    if not read:
        what = f"no row has {_where_text(rows.where)}" if rows.where else "it has a header only"
        raise TraceError(f"{path}: has no jobs: {what}")
    return in_order(str(path), arrivals, skipped=read - len(arrivals))


def _detect(rows: Rows, readers: Mapping[str, ModuleType]) -> ModuleType:
    columns = frozenset(rows.columns)
    for reader in readers.values():
        if reader.fits(columns):
            return reader
    have = ", ".join(rows.columns[:20])
    raise TraceError(
        f"{rows.path}: its columns are of no known format ({have}); a plain CSV needs "
        "submit_s, duration_s and gpus"
    )


def _where_text(where: Mapping[str, str]) -> str:
    return " and ".join(f"{column}={value}" for column, value in where.items())
