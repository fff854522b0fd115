"""Alibaba's openb pod lists: shares of GPUs, CPUs and memory, allowed GPU models."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Arrival, Gangs

NEEDED = ("cpu_milli", "num_gpu", "gpu_milli")
TIMES = ("creation_time", "deletion_time")


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    """A pod's work is its time from the start to the end; those without times cannot be played."""
    rows.need(*NEEDED, *TIMES)
    for row in rows:
        submit_ms = row.seconds("creation_time")
        begin_ms = row.seconds("scheduled_time", submit_ms / 1000)
        end_ms = row.seconds("deletion_time")
        if end_ms < begin_ms:
            raise row.problem("deletion_time: is before the pod began")
        gpus, share = row.whole("num_gpu"), row.whole("gpu_milli", 0, most=1000)
        tenant = row.text("qos")
        spec = gangs.spec(
            gpus,
            members=1,
            cpu_milli=row.whole("cpu_milli"),
            memory_mb=row.whole("memory_mib", 0),
            gpu_milli=share if gpus == 1 and 0 < share < 1000 else 0,
            gpu_models=tuple(row.text("gpu_spec").split("|")) if row.text("gpu_spec") else (),
            tenant=tenant,
        )
        yield Arrival(submit_ms, end_ms - begin_ms, spec, row.number, tenant)
