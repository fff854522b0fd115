"""Muri's Philly-derived traces: times in milliseconds, work as iterations."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Arrival, Gangs

# Its models were drawn at random: they are neither tenants nor names that would teach anything.
NEEDED = ("submit_time", "num_gpu", "iterations", "iteration_time")
# The published simulation lets every iteration take this much longer than measured.
ITERATION_FACTOR = 1.015


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    rows.need(*NEEDED)
    for row in rows:
        iterations = row.whole("iterations", most=10**12)
        work_ms = iterations * row.number_in("iteration_time") * ITERATION_FACTOR
        yield Arrival(
            submit_ms=row.milliseconds("submit_time"),
            work_ms=round(work_ms),
            spec=gangs.spec(row.whole("num_gpu")),
            row=row.number,
        )
