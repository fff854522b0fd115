"""Keeps the log store within its size: logs of finished jobs go, the oldest first.

A thread walks the folder from time to time and adds up what each tenant's logs take. If that is too
much in all, or for one tenant, logs of the tenant that has most are removed. Logs of live jobs
stay; if those of one tenant alone take too much, the middle of their output is dropped sooner.
Nothing is remembered between two looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop, Unreadable
from shoal.control.shares import kept_shares
from shoal.model.ids import array_of, in_order, number_of

GIB = 1 << 30
LOGS_BYTES_MAX = 64 * GIB
TENANT_BYTES_MAX = LOGS_BYTES_MAX // 2
FREED_PART = 10  # a tenth more than needed is removed, so that not every look removes something
FIRST_LOOK_S = 5.0  # a start has more urgent things to do
LOOK_S = 60.0
LOOK_FACTOR = 50  # a look that takes long is repeated less often
BATCH = 200  # folders between two pauses, so that the thread never keeps the loop from running
PAUSE_S = 0.005
NOBODY = ""  # the tenant of logs whose job is in no store any more


class Sizes(NamedTuple):
    """What a look found, and what it removed."""

    tenants: dict[str, int]
    removed: int
    short: frozenset[str]  # live jobs of tenants that take too much

    @property
    def total(self) -> int:
        return sum(self.tenants.values())


class LogRoom:
    def __init__(
        self,
        logs: LogStore,
        tenant_of: Callable[[str], str],
        most: int = LOGS_BYTES_MAX,
        tenant_most: int = TENANT_BYTES_MAX,
    ) -> None:
        """`tenant_of` finds the tenant of a finished job."""
        self._logs = logs
        self._tenant_of = tenant_of
        self._most = most
        self._tenant_most = tenant_most

    def look(self, live: Mapping[str, str], next_job: int) -> Sizes:
        """`live`: the tenants of live jobs. Jobs from `next_job` on may have come since then."""
        sizes: dict[str, int] = {}
        for folder in self._folders():
            tenant = live.get(folder.name) or self._tenant_of(folder.name)
            sizes[tenant] = sizes.get(tenant, 0) + _bytes(folder)
        removed = 0
        if self._over(sizes):
            jobs = sorted((folder.name for folder in self._folders()), key=in_order)
            before = [job for job in jobs if number_of(job) < next_job]
            removed = self._remove(sizes, before, live)
        over = {tenant for tenant, size in sizes.items() if size > self._tenant_most}
        short = frozenset(job for job, tenant in live.items() if tenant in over)
        self._logs.short = short
        return Sizes(sizes, removed, short)

    def _over(self, sizes: dict[str, int]) -> bool:
        largest = max(sizes.values(), default=0)
        return largest > self._tenant_most or sum(sizes.values()) > self._most

    def _remove(self, sizes: dict[str, int], jobs: list[str], live: Mapping[str, str]) -> int:
        """From the oldest on, logs of whichever tenant has too much, or has most."""
        least = self._tenant_most - self._tenant_most // FREED_PART
        excess = sum(sizes.values()) - (self._most - self._most // FREED_PART)
        if sum(sizes.values()) <= self._most:
            excess = 0
        aims = _aims(sizes, self._tenant_most, least, excess)
        removed = 0
        for count, job in enumerate(jobs):
            if not aims:
                break
            if not count % BATCH:
                time.sleep(PAUSE_S)
            if job in live:
                continue
            tenant = self._tenant_of(job)
            if not tenant and array_of(job) in live:
                continue  # an element that has begun since
            if tenant in aims:
                size = _bytes(self._logs.folder(job))
                self._logs.drop(job)
                sizes[tenant] -= size
                removed += 1
                if sizes[tenant] <= aims[tenant]:
                    del aims[tenant]
        return removed

    def _folders(self) -> Iterator[Path]:
        try:
            with os.scandir(self._logs.root) as found:
                for count, entry in enumerate(found):
                    if not count % BATCH:
                        time.sleep(PAUSE_S)
                    if number_of(entry.name):
                        yield Path(entry.path)
        except FileNotFoundError:
            return


def _aims(sizes: dict[str, int], most: int, least: int, excess: int) -> dict[str, int]:
    """How much each tenant may keep. Who has most gives first, down to what the next one has."""
    aims = {tenant: least for tenant, size in sizes.items() if size > most}
    excess -= sum(sizes[tenant] - aim for tenant, aim in aims.items())
    kept = {tenant: aims.get(tenant, size) for tenant, size in sizes.items()}
    return {**aims, **kept_shares(kept, excess)}


def _bytes(folder: Path) -> int:
    """What it takes on the disk: logs have holes."""
    total = 0
    try:
        with os.scandir(folder) as files:
            for file in files:
                total += file.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        pass  # it is being removed
    return total


async def watch(loop: ControlLoop) -> None:
    room = LogRoom(loop.logs, lambda job: _tenant(loop, job))

    async def look() -> None:
        jobs = (*loop.state.arrays.values(), *loop.state.jobs.values())
        live = {job.id: job.spec.tenant for job in jobs}
        _say(loop, await asyncio.to_thread(room.look, live, loop.state.next_job))

    await look_again(loop, look)


async def look_again(loop: ControlLoop, look: Callable[[], Awaitable[None]]) -> None:
    """From time to time, forever."""
    await asyncio.sleep(FIRST_LOOK_S)
    while True:
        took_s = 0.0
        with contextlib.suppress(Unreadable):
            await loop.settled()
            began = time.monotonic()
            await look()
            took_s = time.monotonic() - began
        await asyncio.sleep(max(LOOK_S, LOOK_FACTOR * took_s))


def _tenant(loop: ControlLoop, job_id: str) -> str:
    job = loop.store.job(job_id)
    return job.spec.tenant if job is not None else NOBODY


def _say(loop: ControlLoop, sizes: Sizes) -> None:
    full = max(sizes.tenants.values(), default=0)
    if sizes.short:
        text = f"live jobs of a tenant have more than {TENANT_BYTES_MAX // GIB} GiB of logs"
        loop.alarms.raise_("log store", f"{text}: the middle of their output is dropped sooner")
    elif sizes.removed:
        text = f"logs take at most {LOGS_BYTES_MAX // GIB} GiB, and half of it for one tenant"
        loop.alarms.raise_("log store", f"{text}: those of the oldest finished jobs were removed")
    elif sizes.total < LOGS_BYTES_MAX * 8 // 10 and full < TENANT_BYTES_MAX * 8 // 10:
        loop.alarms.clear("log store")
