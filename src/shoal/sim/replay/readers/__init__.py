"""One small file per trace format; the format of a file is known by the columns it names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Gangs, Trace, TraceError, in_order

# The plain one is last: what looks like another is that.
FORMATS = ("muri", "elasticflow", "shockwave", "pollux", "openb", "sacct", "plain")


def read_trace(
    path: Path, gangs: Gangs, *, form: str = "", where: Mapping[str, str] | None = None
) -> Trace:
    rows = Rows(path, where)
    reader = _reader(form) if form else _detect(rows)
    read = 0
    arrivals = []
    for arrival in reader.read(rows, gangs):
        read += 1
        if arrival is not None:
            arrivals.append(arrival)
    if not read:
        what = f"no row has {_where_text(rows.where)}" if rows.where else "it has a header only"
        raise TraceError(f"{path}: holds no job: {what}")
    return in_order(str(path), arrivals, skipped=read - len(arrivals))


def _reader(form: str) -> ModuleType:
    if form not in FORMATS:
        raise TraceError(f"there is no trace format {form}; there are {', '.join(FORMATS)}")
    return importlib.import_module(f"shoal.sim.replay.readers.{form}")


def _detect(rows: Rows) -> ModuleType:
    columns = frozenset(rows.columns)
    for form in FORMATS:
        reader = _reader(form)
        if reader.fits(columns):
            return reader
    have = ", ".join(rows.columns[:20])
    raise TraceError(
        f"{rows.path}: its columns are of no known format ({have}); a plain CSV needs "
        "submit_s, duration_s and gpus"
    )


def _where_text(where: Mapping[str, str]) -> str:
    return " and ".join(f"{column}={value}" for column, value in where.items())
