"""ElasticFlow's own form of a trace, as in its Philly cluster: times in seconds."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Arrival, Gangs

NEEDED = ("submit_time", "real_duration", "num_gpu")


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    rows.need(*NEEDED)
    for row in rows:
        tenant = row.text("model_name")
        yield Arrival(
            submit_ms=row.seconds("submit_time"),
            work_ms=row.seconds("real_duration"),
            spec=gangs.spec(row.whole("num_gpu"), tenant=tenant),
            row=row.number,
            tenant=tenant,
        )
