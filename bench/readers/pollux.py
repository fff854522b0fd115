"""Pollux's workloads: the work of a job follows from the measured profiles beside the file.

A job runs `num_replicas` GPUs at a fixed `batch_size`. It takes as many iterations as the
validation profile took at that batch size, each as long as the placement profile says for
replicas packed onto nodes with 4 GPUs, where a batch too large for the GPUs is done in parts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.sim.replay.readers.rows import Row, Rows
from shoal.sim.replay.traces import Arrival, Gangs, TraceError

NEEDED = ("submit_s", "application", "num_replicas", "batch_size")
GPUS_PER_NODE = 4  # of the nodes where the profiles were measured
PROFILES = ("profile_validation.csv", "profile_placements.csv", "profile_scalability.csv")


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival]:
    rows.need(*NEEDED)
    profile = Profile(rows.path.parent)
    for row in rows:
        replicas = row.whole("num_replicas")
        if not replicas:
            raise row.problem("num_replicas: must be at least 1")
        tenant = row.text("application")
        yield Arrival(
            submit_ms=row.seconds("submit_s"),
            work_ms=round(1000 * profile.duration_s(row, tenant, replicas)),
            spec=gangs.spec(replicas, tenant=tenant),
            row=row.number,
            tenant=tenant,
        )


class Step(NamedTuple):
    local_batch: int
    step_s: float
    sync_s: float  # of which the replicas exchange gradients


class Profile:
    def __init__(self, folder: Path) -> None:
        validation, placements, scalability = (_beside(folder, name) for name in PROFILES)
        self._iterations: dict[tuple[str, int], int] = {}
        for row in Rows(validation):
            key = row.text("application"), row.whole("batch_size_file")
            self._iterations[key] = max(self._iterations.get(key, 0), row.whole("iteration"))
        self._steps: dict[tuple[str, int], list[Step]] = {}
        for row in Rows(placements):
            placement = row.text("placement")
            if placement == _packed(sum(map(int, placement))):
                self._add(row, sum(map(int, placement)))
        for row in Rows(scalability):
            replicas = row.whole("num_replicas")
            if row.whole("num_nodes") == math.ceil(replicas / GPUS_PER_NODE) and replicas > 16:
                self._add(row, replicas)
        for steps in self._steps.values():
            steps.sort()

    def _add(self, row: Row, replicas: int) -> None:
        step = Step(row.whole("local_bsz"), row.number_in("step_time"), row.number_in("sync_time"))
        self._steps.setdefault((row.text("application"), replicas), []).append(step)

    def duration_s(self, row: Row, application: str, replicas: int) -> float:
        iterations = self._iterations.get((application, row.whole("batch_size")))
        known = [count for name, count in self._steps if name == application]
        if iterations is None or not known:
            raise row.problem("application, batch_size: no such run is in the profiles")
        steps = self._steps[application, min(known, key=lambda count: abs(count - replicas))]
        local = row.whole("batch_size") / replicas
        parts = math.ceil(local / steps[-1].local_batch)
        step_s, sync_s = _between(steps, local / parts)
        return iterations * (parts * step_s - (parts - 1) * sync_s)


def _packed(replicas: int) -> str:
    """How the profiles write replicas on as few nodes as possible: 6 is '24'."""
    full, rest = divmod(replicas, GPUS_PER_NODE)
    return (str(rest) if rest else "") + str(GPUS_PER_NODE) * full


def _between(steps: list[Step], local_batch: float) -> tuple[float, float]:
    """Straight lines between the measured points."""
    position = bisect_left(steps, (local_batch, 0.0, 0.0))
    low, high = steps[max(position - 1, 0)], steps[min(position, len(steps) - 1)]
    if low.local_batch == high.local_batch:
        return high.step_s, high.sync_s
    share = (local_batch - low.local_batch) / (high.local_batch - low.local_batch)
    return (
        low.step_s + share * (high.step_s - low.step_s),
        low.sync_s + share * (high.sync_s - low.sync_s),
    )


def _beside(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise TraceError(f"{folder / name}: is needed for the run times, and is not there")
