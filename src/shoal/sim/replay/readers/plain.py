"""The plain CSV: one job per row, times in seconds. What to write when you make your own."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.replay.readers.rows import Row, Rows
from shoal.sim.replay.traces import Arrival, Gangs

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
        exit_code=row.whole("exit_code", 0, most=255),
        gpu_mb=round(row.number_in("gpu_memory_gb", 0) * 1024),
        checkpoint_ms=None if checkpoint_s < 0 else round(checkpoint_s * 1000),
    )
