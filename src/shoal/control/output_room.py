"""Keeps the store of outputs within its size and age: files of finished jobs go, the oldest first.

A thread walks the folder from time to time. If there is too much, the tenant that has most gives
first: checkpoints of its finished jobs before their outputs, because nothing starts from them any
more. Files of live jobs stay; a tenant whose files take its share sends no more of them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.control.handed_work import HandedWork
from shoal.control.kept_files import JOB_FOLDER
from shoal.control.log_room import FREED_PART, look_again
from shoal.control.loop import ControlLoop
from shoal.control.outputs import CHECKPOINT_FOLDERS, GIB, OutputStore
from shoal.control.shares import SHARE, kept_shares
from shoal.model.durations import DAY_MS
from shoal.model.job import Job
from shoal.model.kept import Kind

KEPT_MS = 30 * DAY_MS  # after the end of the job
NOBODY = ""  # the tenant of files whose job is in no store any more


class Seen(NamedTuple):
    job: str
    kind: Kind
    size: int


class Sizes(NamedTuple):
    total: int
    removed: int


class OutputRoom:
    def __init__(
        self, store: OutputStore, ended_of: Callable[[str], Job | None], kept_ms: int = KEPT_MS
    ) -> None:
        self._store = store
        self._ended_of = ended_of
        self._kept_ms = kept_ms

    def look(self, live: Mapping[str, str], now_ms: int) -> Sizes:
        """`live`: jobs whose files stay, and their tenants."""
        ended: list[tuple[bool, int, Seen]] = []
        removed = 0
        held: dict[str, int] = {}
        tenants: dict[str, str] = {}
        for seen in self._sizes():
            job = self._ended_of(seen.job) if seen.job not in live else None
            tenant = job.spec.tenant if job is not None else live.get(seen.job, NOBODY)
            tenants[seen.job] = tenant
            held[tenant] = held.get(tenant, 0) + seen.size
            if seen.job in live:
                continue
            at_ms = (job.finished_ms or 0) if job is not None else self._changed_ms(seen.job)
            # An unknown job came since we looked at the live ones, or was dropped from the store.
            if job is not None or now_ms - at_ms > DAY_MS:
                ended.append((seen.kind is Kind.OUTPUT, at_ms, seen))
        most, total = self._store.limits.total, sum(held.values())
        excess = total - (most - most // FREED_PART) if total > most else 0
        aims = kept_shares(held, excess)
        for _, at_ms, seen in sorted(ended):
            tenant = tenants[seen.job]
            if held[tenant] > aims.get(tenant, most) or now_ms - at_ms > self._kept_ms:
                self._store.drop(seen.job, None if seen.kind is Kind.OUTPUT else seen.kind)
                held[tenant] -= seen.size
                removed += 1
        total = sum(held.values())
        over = {one for one, size in held.items() if size > SHARE * max(0, most - total)}
        self._store.total = total
        self._store.crowded = frozenset(job for job, tenant in live.items() if tenant in over)
        return Sizes(total, removed)

    def _changed_ms(self, job: str) -> int:
        try:
            return (self._store.root / job).stat().st_mtime_ns // 1_000_000
        except OSError:
            return 0

    def _sizes(self) -> list[Seen]:
        found = []
        try:
            jobs = [entry.name for entry in os.scandir(self._store.root)]
        except FileNotFoundError:
            return []
        for job in jobs:
            if JOB_FOLDER.match(job):
                time.sleep(0)  # the loop runs meanwhile
                output = self._store.output(job)
                saved = [self._store.root / job / name for name in CHECKPOINT_FOLDERS]
                if any(folder.is_dir() for folder in saved):
                    found.append(Seen(job, Kind.CHECKPOINT, sum(map(_bytes, saved))))
                if output.is_dir():
                    found.append(Seen(job, Kind.OUTPUT, _bytes(output)))
        return found


def _bytes(folder: Path) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except OSError:
                continue  # it has just gone
    return total


async def watch(loop: ControlLoop, store: OutputStore) -> None:
    room = OutputRoom(store, loop.store.job)

    async def look() -> None:
        live = {job.id: job.spec.tenant for job in loop.state.jobs.values()}
        sizes = await asyncio.to_thread(room.look, live, loop.clock.now_ms())
        await asyncio.to_thread(HandedWork(store).sweep, loop.clock.now_ms())
        most = store.limits.total // GIB
        text = f"outputs take at most {most} GiB and are kept for {KEPT_MS // DAY_MS} days"
        problem = f"{text}: the oldest were removed" if sizes.removed else ""
        loop.alarms.show("output store", problem)

    await look_again(loop, look)
