"""Shockwave's traces: `duration_s` at the first batch size, taken as fixed work."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Arrival, Gangs

NEEDED = ("arrival_s", "duration_s", "scale_factor")


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    rows.need(*NEEDED)
    for row in rows:
        tenant = row.text("job_type").partition(" (")[0]
        yield Arrival(
            submit_ms=row.seconds("arrival_s"),
            work_ms=row.seconds("duration_s"),
            spec=gangs.spec(row.whole("scale_factor"), tenant=tenant),
            row=row.number,
            tenant=tenant,
        )
